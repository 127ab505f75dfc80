"""How late timers were around a fault: those whose owner was affected, and the others. Pure."""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter

from tests.chaos.ledger import Callback, Fault, Ledger


@dataclass(frozen=True)
class Late:
    """The worst lateness of some timers, and their number."""

    seconds: float = 0.0
    timers: int = 0
    what: str = "none"

    def __str__(self) -> str:
        return f"{self.timers} timers, the worst {self.what}"


class Whose(enum.Enum):
    """How a timer relates to a fault."""

    IN_FLIGHT = enum.auto()  # it had an attempt in flight on the affected part
    HIT = enum.auto()  # the affected instance owned its shard
    COMING = enum.auto()  # its shard was moving to the affected instance
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
        """When the callback could be expected: the write that set its time may have been acknowledged after that time.

        A write that was acknowledged only after the callback does not show when it was committed.
        """
        promise = self._ledger.promises[callback.id]
        written = [asked for asked in (promise.created, *promise.updates) if asked.at_ms == callback.at_ms]
        return max([callback.at_ms * 1_000_000, *(asked.answered_ns for asked in written)])

    def of(self, fault: Fault, *, from_ns: int, until_ns: int, whose: Whose, since_ns: int = 0) -> Late:
        """The timers of one kind that fell due between two instants.

        Except for those in flight, it leaves out timers whose first attempt was lost: they correctly wait for its
        deadline. ``since_ns`` is an instant before which no firing could be expected.
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
