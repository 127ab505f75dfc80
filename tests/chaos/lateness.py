"""How late timers were around a fault: those whose owner it hit, and those of the others. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter

from tests.chaos.ledger import Callback, Fault, Ledger


@dataclass(frozen=True)
class Late:
    """The worst of some timers; and how many there were."""

    seconds: float = 0.0
    timers: int = 0
    what: str = "none"

    def __str__(self) -> str:
        return f"{self.timers} timers, the worst {self.what}"


class Whose(enum.Enum):
    """What a timer had to do with a fault."""

    IN_FLIGHT = enum.auto()  # an attempt was under way on what was hit
    HIT = enum.auto()  # what was hit owned its shard
    COMING = enum.auto()  # its shard was on its way there
    OTHERS = enum.auto()


class Lateness:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        first: dict[tuple[str, int], Callback] = {}
        for callback in sorted(ledger.callbacks, key=lambda callback: callback.received_ns):
            first.setdefault((callback.id, callback.at_ms), callback)
        due = [(self._due_ns(callback), callback) for callback in first.values() if callback.id in ledger.promises]
        self._firsts = sorted(
            ((due_ns, callback) for due_ns, callback in due if due_ns <= callback.received_ns), key=itemgetter(0)
        )

    def _due_ns(self, callback: Callback) -> int:
        """When it could be expected: the write that set its time may have been answered after that.

        One that was answered even after the callback came tells nothing of when it was written.
        """
        promise = self._ledger.promises[callback.id]
        written = [asked for asked in (promise.created, *promise.updates) if asked.at_ms == callback.at_ms]
        return max([callback.at_ms * 1_000_000, *(asked.answered_ns for asked in written)])

    def of(self, fault: Fault, *, from_ns: int, until_ns: int, whose: Whose, since_ns: int = 0) -> Late:
        """The timers of one kind that fell due between two instants.

        Left out, but for those in flight, are timers whose first attempt got lost: they wait for its deadline, rightly.
        ``since_ns`` is an instant before which nothing could be expected to fire.
        """
        low, high = (bisect_left(self._firsts, at, key=itemgetter(0)) for at in (from_ns, until_ns))
        some = [
            (callback.received_ns - max(due_ns, since_ns), due_ns, callback)
            for due_ns, callback in self._firsts[low:high]
            if self._whose(fault, callback) is whose and (callback.attempt == 1 or whose is Whose.IN_FLIGHT)
        ]
        if not some:
            return Late()
        worst_ns, due_ns, worst = max(some, key=itemgetter(0))
        what = f"due {(due_ns - fault.from_ns) / 1e9:+.2f} s after it: {worst} of {self._ledger.promises[worst.id]}"
        return Late(max(0, worst_ns) / 1e9, len(some), what)

    def _whose(self, fault: Fault, callback: Callback) -> Whose:
        shard = self._ledger.promises[callback.id].shard
        if fault.in_flight and callback.id in fault.in_flight:
            return Whose.IN_FLIGHT
        if fault.shards is None or shard in fault.shards:
            return Whose.HIT
        return Whose.COMING if shard in fault.coming else Whose.OTHERS
