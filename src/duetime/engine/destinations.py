"""How much each destination may be given now: a concurrency cap, a short queue, and a breaker.

So one slow destination never delays another: it holds at most its cap of attempts and a queue of what two looks bring
plus what it has shown it can do in two seconds; the rest is put back into the store, unspent. A queue that moves makes
the engine wait before it begins more, one that stands still does not.
"""

from __future__ import annotations

from collections import deque

from duetime.model import Outcome, OutcomeKind, Timer

BREAK_AFTER = 20
"""Failures to connect and timeouts in a row that open the breaker; answers, whatever they say, close it."""
BREAK_MS = 5_000
PROBES = 5
"""Attempts that a broken destination is given at a time once its pause is over."""
SATURATED_MS = 1_000
PATIENCE_MS = 250
"""A queue stands still when nothing has left it for this long."""
DESTINATIONS_MAX = 10_000

_ALIVE = (OutcomeKind.ANSWERED, OutcomeKind.REFUSED)


class Destination:
    def __init__(self, cap: int, queue: int) -> None:
        self.running = 0
        self.waiting: deque[Timer] = deque()
        self._cap = cap
        self._queue = queue
        self._started_at = 0
        self._misses = 0
        self._broken_until: int | None = None
        self._second = 0
        self._done_now = 0
        self._done_before = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting and self._broken_until is None

    def free(self) -> bool:
        """Whether one more attempt may start now."""
        return self.running < (self._cap if self._broken_until is None else PROBES)

    def put_off_ms(self, now: int) -> int | None:
        """How long to put a timer off that can neither start nor wait here; None if it can."""
        if self._broken_until is not None and (now < self._broken_until or not self.free()):
            return max(self._broken_until - now, SATURATED_MS)
        if self.free() or len(self.waiting) < self._queue + 2 * self._done_lately(now):
            return None
        return SATURATED_MS

    def start(self, now: int) -> None:
        """An attempt leaves."""
        self._started_at = now

    def backlog(self, now: int) -> int:
        """How many wait here and can be expected to leave soon."""
        return len(self.waiting) if now - self._started_at < PATIENCE_MS else 0

    def note(self, outcome: Outcome, now: int) -> bool:
        """Learn from an attempt; whether the breaker has just opened."""
        self._done_lately(now)
        self._done_now += 1
        if outcome.kind in _ALIVE:
            self._misses, self._broken_until = 0, None
            return False
        self._misses += 1
        if self._misses < BREAK_AFTER:
            return False
        opened = self._broken_until is None
        self._broken_until = now + BREAK_MS
        return opened

    def _done_lately(self, now: int) -> int:
        second = now // 1000
        if second != self._second:
            self._done_before = self._done_now if second == self._second + 1 else 0
            self._second, self._done_now = second, 0
        return max(self._done_before, self._done_now)


class Destinations:
    def __init__(self, cap: int, queue: int) -> None:
        self._cap = cap
        self._queue = queue
        self._known: dict[str, Destination] = {}
        self._queued: set[Destination] = set()

    def __getitem__(self, name: str) -> Destination:
        destination = self._known.get(name)
        if destination is None:
            if len(self._known) >= DESTINATIONS_MAX:
                self._known = {n: d for n, d in self._known.items() if not d.idle}
            destination = self._known[name] = Destination(self._cap, self._queue)
        return destination

    def queue(self, destination: Destination, timer: Timer) -> None:
        destination.waiting.append(timer)
        self._queued.add(destination)

    def backlog(self, now: int) -> int:
        """How many wait in queues that move."""
        self._queued = {destination for destination in self._queued if destination.waiting}
        return sum(destination.backlog(now) for destination in self._queued)

    def take_waiting(self) -> list[Timer]:
        """Empty every queue, for a drain."""
        taken = [timer for destination in self._queued for timer in destination.waiting]
        for destination in self._queued:
            destination.waiting.clear()
        return taken
