"""What clients were promised, what the receiver got, and which faults came in between: facts, nothing judged.

Instants are nanoseconds of the one wall clock of this machine; times that timers are due at are milliseconds, as they
are on the wire.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


class Said(enum.Enum):
    """How a request was answered."""

    YES = "yes"  # 2xx: a promise
    NO = "no"  # 4xx: nothing was changed
    NOTHING = "nothing"  # no answer, or one that leaves it open: it may have happened or not


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a client and how it went; of a create with retries, the last one."""

    said: Said
    asked_ns: int
    answered_ns: int
    at_ms: int | None = None  # when the timer is to fire, of a create or an update


@dataclass(slots=True)
class Promise:
    """Everything that clients asked about one timer, one after the other."""

    id: str
    shard: int
    created: Asked
    updates: list[Asked] = field(default_factory=list)
    cancels: list[Asked] = field(default_factory=list)
    firings: int = 1  # 2: the first answer of the receiver names another time

    @property
    def acknowledged(self) -> bool:
        return self.created.said is Said.YES


@dataclass(frozen=True, slots=True)
class Callback:
    """One request that the receiver got."""

    id: str
    at_ms: int  # the time that the callback itself says it is for
    webhook_id: str
    attempt: int
    received_ns: int
    answered_ns: int
    next_ms: int | None = None  # the time that the receiver's answer names, if it names one


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the cluster, from one instant to another.

    ``in_flight`` are the timers whose attempts were under way on what was hit, where that is known exactly; None means
    that it is known by the time only: whatever was under way between the two instants. ``shards`` are those whose owner
    was hit; None means all. ``coming`` are those that were on their way to what was hit, from whoever had them.
    """

    kind: str
    from_ns: int
    until_ns: int
    in_flight: frozenset[str] | None = frozenset()
    shards: frozenset[int] | None = None
    coming: frozenset[int] = frozenset()


@dataclass
class Ledger:
    promises: dict[str, Promise] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    """How often each kind of answer came, for people to look at."""
    given_up: set[str] = field(default_factory=set)
    """Timers that the service failed because the outcomes of three attempts in a row were never recorded."""
    odd: list[str] = field(default_factory=list)
    """Answers that are wrong in themselves."""

    def add(self, promises: Iterable[Promise]) -> None:
        for promise in promises:
            self.promises[promise.id] = promise
