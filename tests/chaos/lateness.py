"""How late timers were around a fault: those whose owner it hit, and those of the others. Pure."""

from __future__ import annotations

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

    def of(self, fault: Fault, *, from_ns: int, until_ns: int, hit: bool, since_ns: int = 0) -> Late:
        """The timers that fell due between two instants, in shards that the fault hit or in the others.

        Left out are those whose first attempt got lost: they wait for its deadline, rightly. ``since_ns`` is an instant
        before which nothing could be expected to fire.
        """
        low, high = (bisect_left(self._firsts, at, key=itemgetter(0)) for at in (from_ns, until_ns))
        some = [
            (callback.received_ns - max(due_ns, since_ns), due_ns, callback)
            for due_ns, callback in self._firsts[low:high]
            if callback.attempt == 1 and self._is_hit(fault, callback) is hit
        ]
        if not some:
            return Late()
        worst_ns, due_ns, worst = max(some, key=itemgetter(0))
        what = f"due {(due_ns - fault.from_ns) / 1e9:+.2f} s after it: {worst} of {self._ledger.promises[worst.id]}"
        return Late(max(0, worst_ns) / 1e9, len(some), what)

    def _is_hit(self, fault: Fault, callback: Callback) -> bool:
        return fault.shards is None or self._ledger.promises[callback.id].shard in fault.shards
