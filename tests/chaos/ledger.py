"""What clients were promised, what the receiver got, and which faults happened in between: facts without judgment.

Instants are nanoseconds of the one wall clock of this machine; due times are milliseconds, as on the wire.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


class Said(enum.Enum):
    """The result of a request."""

    YES = "yes"  # 2xx: a promise
    NO = "no"  # 4xx: nothing changed
    NOTHING = "nothing"  # no or an unclear response: it may or may not have taken effect


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a client and its result; for a create with retries, the last one."""

    said: Said
    asked_ns: int
    answered_ns: int
    at_ms: int | None = None  # the due time in a create or an update


@dataclass(slots=True)
class Promise:
    """All requests of clients about one timer, one after the other."""

    id: str
    shard: int
    created: Asked
    updates: list[Asked] = field(default_factory=list)
    cancels: list[Asked] = field(default_factory=list)
    firings: int = 1  # 2: the receiver's first response names another time

    @property
    def acknowledged(self) -> bool:
        return self.created.said is Said.YES


@dataclass(frozen=True, slots=True)
class Callback:
    """One request that the receiver got."""

    id: str
    at_ms: int  # the due time in the callback itself
    webhook_id: str
    attempt: int
    received_ns: int
    answered_ns: int
    next_ms: int | None = None  # the time in the receiver's response, if any


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault on the cluster, from one instant to another.

    ``in_flight`` are the timers whose attempts were in flight on the affected part, if that is known exactly; None
    means that only the time tells: everything in flight between the two instants. ``shards`` are those whose owner was
    affected; None means all. ``coming`` are those that were moving to the affected instance, from any owner.
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
    """How often each kind of response came, for the report."""
    given_up: set[str] = field(default_factory=set)
    """Timers that the service failed because the outcomes of three attempts in a row were never recorded."""
    odd: list[str] = field(default_factory=list)
    """Responses that are invalid in themselves."""

    def add(self, promises: Iterable[Promise]) -> None:
        for promise in promises:
            self.promises[promise.id] = promise
