"""What each destination can take now: a window that grows with its answers, a short queue, and a circuit breaker.

A destination starts with a small window of concurrent attempts. Each answer widens it by one, up to the limit in the
settings, so one that answers soon has all of it and one that never answers holds little. Behind the window a queue in
memory holds as many timers as the destination answered within a second. What it can't take stays in the store.

Twenty failures to connect or timeouts in a row open the breaker: no attempt for five seconds, then a few as a probe.
Each failed probe doubles the pause, up to a minute. An answer, whatever it says, closes the breaker.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable

from duetime.model import Outcome, OutcomeKind, Timer, lane_of

FIRST_WINDOW = 64
PROBES = 5
"""Concurrent attempts to a destination whose breaker is open and whose pause is over."""
BREAK_AFTER = 20
BREAK_MS, BREAK_MS_MAX = 5_000, 60_000
HOLD_MS, HOLD_MS_MAX = 1_000, 8_000
"""How long a destination waits after we ran out of something for it: of descriptors, lookups, or the broker."""
SILENT_MS = 1_000
"""A destination is suspect when attempts are under way and none has been answered for this long."""
STALLED_MS = 1_000
"""A queue that nothing has left for this long goes back to the store."""
UNQUEUED_MS = 10_000
"""A destination whose queue went back to the store has none for this long."""
DESTINATIONS_MAX = 10_000
LANES_MAX = 1_000
"""How many lanes a destination remembers: one per namespace that has timers for it."""
SLOT_BYTES = 64 * 1024
"""How much payload and metadata a timer in flight may have for one slot; a larger one takes several."""

_ALIVE = (OutcomeKind.ANSWERED, OutcomeKind.REFUSED)


class Trust(enum.Enum):
    PROVEN = "answers"
    FRESH = "has not been tried enough to tell"
    SUSPECT = "does not answer"


def slots_of(timer: Timer) -> int:
    definition = timer.definition
    return 1 + (len(definition.payload) + len(definition.metadata)) // SLOT_BYTES


class Destination:
    def __init__(self, name: str, cap: int, queue_max: int) -> None:
        self.name = name
        self.running = 0
        self.waiting: deque[Timer] = deque()
        self.slots: Counter[str] = Counter()
        """What its running and waiting timers take, by namespace."""
        self.lanes: dict[int, str] = {}
        """Those that looks name, each with its namespace."""
        self.behind = False
        """Whether timers that it could not take are due in the store."""
        self.low = -1
        """How little it must hold to be given more, if it is behind."""
        self._cap = cap
        self._queue_max = queue_max
        self._window = min(FIRST_WINDOW, cap)
        self._answered = False
        self._misses = 0
        self._closed_until: int | None = None
        self._pause_ms = 0
        self._started_at = 0
        self._unqueued_until = 0
        self._silent_since = 0
        self._second = 0
        self._done_now = 0
        self._done_before = 0

    @property
    def held(self) -> int:
        return self.running + len(self.waiting)

    @property
    def idle(self) -> bool:
        return not self.held and self._closed_until is None

    @property
    def opens_at(self) -> int | None:
        """When the pause of the breaker ends; None while it is closed."""
        return self._closed_until

    def trust(self, now: int) -> Trust:
        silent = self.running > 0 and now - self._silent_since >= SILENT_MS
        if silent or self._misses or self._closed_until is not None:
            return Trust.SUSPECT
        return Trust.PROVEN if self._answered else Trust.FRESH

    def free(self, now: int) -> bool:
        """Whether one more attempt may start now."""
        if self._closed_until is not None:
            return now >= self._closed_until and self.running < PROBES
        return self.running < self._window

    def room(self, now: int, share: int) -> int:
        """How many more timers may be begun for it, when ``share`` may be under way."""
        if self._closed_until is not None:
            return 0 if now < self._closed_until else max(0, PROBES - self.held)
        return max(0, min(self._window, share) + self._ahead(now) - self.held)

    def takes(self, now: int) -> bool:
        """Whether a timer that can't start now may wait in the queue."""
        return self._closed_until is None and len(self.waiting) < self._ahead(now)

    def enter(self, timer: Timer) -> None:
        self.slots[timer.namespace] += slots_of(timer)

    def leave(self, timer: Timer) -> None:
        self.slots[timer.namespace] -= slots_of(timer)
        if not self.slots[timer.namespace]:
            del self.slots[timer.namespace]

    def fall_behind(self) -> None:
        """It could not take all that is due: give it more when half of what it holds is done."""
        self.behind, self.low = True, self.held // 2

    def start(self, now: int) -> None:
        """An attempt leaves."""
        self._started_at = now
        if not self.running:
            self._silent_since = now

    def stalled(self, now: int) -> bool:
        return bool(self.waiting) and now - self._started_at >= STALLED_MS

    def stall(self, now: int) -> None:
        """Its queue stood still: it answers in bursts, and a queue would only be put back again."""
        self._unqueued_until = now + UNQUEUED_MS

    def note(self, outcome: Outcome, now: int) -> bool:
        """Learn from an attempt; whether the breaker has just opened."""
        if outcome.kind in _ALIVE:
            self._count(now)
            self._done_now += 1
            self._silent_since = now
            self._misses, self._answered = 0, True
            if self._closed_until is not None:
                self._closed_until, self._pause_ms, self._window = None, 0, min(PROBES, self._cap)
            elif self._window < self._cap:
                self._window += 1
            return False
        self._misses += 1
        if self._misses < BREAK_AFTER and self._closed_until is None:
            return False
        opened = self._closed_until is None
        self._close(now, BREAK_MS, BREAK_MS_MAX)
        return opened

    def hold(self, now: int) -> None:
        """We ran out of something that an attempt needs: try again a little later, and then more rarely."""
        self._close(now, HOLD_MS, HOLD_MS_MAX)

    def _close(self, now: int, first_ms: int, most_ms: int) -> None:
        if self._closed_until is None or now >= self._closed_until:  # not for each of the probes that fail together
            self._pause_ms = min(max(first_ms, 2 * self._pause_ms), most_ms)
            self._closed_until = now + self._pause_ms

    def _ahead(self, now: int) -> int:
        """How many timers may wait in memory: what it answered in a second."""
        if now < self._unqueued_until:
            return 0
        self._count(now)
        return min(self._queue_max, max(self._done_before, self._done_now))

    def _count(self, now: int) -> None:
        second = now // 1000
        if second != self._second:
            self._done_before = self._done_now if second == self._second + 1 else 0
            self._second, self._done_now = second, 0


class Destinations:
    """All destinations that something is known about, and the ones to watch."""

    def __init__(self, *, cap: int, queue_max: int, in_flight_max: int) -> None:
        self._cap = cap
        self._queue_max = queue_max
        self.in_flight_max = in_flight_max
        self._share = min(cap, in_flight_max)
        self._known: dict[str, Destination] = {}
        self._known_max = DESTINATIONS_MAX
        self.queued: set[Destination] = set()
        self.limited: dict[Destination, None] = {}
        """Those that can take less than others, or were given more: a look needs a limit for their lanes."""

    def __getitem__(self, name: str) -> Destination:
        destination = self._known.get(name)
        if destination is None:
            if len(self._known) >= self._known_max:
                self._forget()
            destination = self._known[name] = Destination(name, self._cap, self._queue_max)
        return destination

    def _forget(self) -> None:
        """Make room: forget those that nothing is to be known of. If that is not enough, forget of those that hold
        nothing the ones whose breaker is closed, or was the first to let attempts out."""
        most = DESTINATIONS_MAX // 2
        kept = [d for d in self._known.values() if not d.idle or d in self.limited]
        if len(kept) > most:
            kept.sort(key=lambda d: (d.held > 0, d.opens_at or 0), reverse=True)
            kept = kept[: max(most, sum(d.held > 0 for d in kept))]
        self._known = {d.name: d for d in kept}
        self.limited = {d: None for d in self.limited if d.name in self._known}
        self._known_max = max(DESTINATIONS_MAX, 2 * len(kept))  # so each is looked at a few times, not for each new one

    def get(self, name: str) -> Destination | None:
        return self._known.get(name)

    def room(self, destination: Destination, now: int, free: int) -> int:
        """Each may have a share of what is free: the more others hold, the less. So some is always left, however many
        destinations do not answer."""
        return destination.room(now, max(1, free * self._share // self.in_flight_max))

    def limit(self, destination: Destination, namespace: str) -> None:
        """Name this lane in looks from now on."""
        self.limited[destination] = None
        destination.lanes[lane_of(namespace, destination.name)] = namespace
        if len(destination.lanes) > LANES_MAX:
            del destination.lanes[next(iter(destination.lanes))]

    def limits(self, now: int, free: int, weight: Callable[[str], int]) -> dict[int, int]:
        """The lanes with a limit of their own: namespaces share the room of a destination by their weights."""
        limits: dict[int, int] = {}
        for destination in self.limited:
            room = self.room(destination, now, free)
            weights = {lane: weight(namespace) for lane, namespace in destination.lanes.items()}
            total = sum(weights.values())
            shares = {lane: room * each // total for lane, each in weights.items()}
            left = room - sum(shares.values())
            for place, (lane, share) in enumerate(shares.items()):
                limits[lane] = share + (place < left)
        return limits

    def relax(self, now: int, free: int, enough: int) -> None:
        """Forget the limits of those that have nothing held back and can take ``enough`` again, or were broken and have
        not been asked for since."""
        self.limited = {
            d: None
            for d in self.limited
            if d.behind or (d.lanes and self.room(d, now, free) < enough and now < (d.opens_at or now) + BREAK_MS_MAX)
        }

    def queue(self, destination: Destination, timer: Timer) -> None:
        destination.waiting.append(timer)
        destination.enter(timer)
        self.queued.add(destination)

    def take_waiting(self, destinations: Iterable[Destination]) -> list[Timer]:
        """Empty these queues."""
        taken: list[Timer] = []
        for destination in tuple(destinations):
            taken += destination.waiting
            for timer in destination.waiting:
                destination.leave(timer)
            destination.waiting.clear()
            self.queued.discard(destination)
        return taken

    def stalled(self, now: int) -> list[Destination]:
        self.queued = {destination for destination in self.queued if destination.waiting}
        return [destination for destination in self.queued if destination.stalled(now)]

    def unproven(self, now: int) -> tuple[Counter[Trust], Counter[str]]:
        """The slots that destinations take which do not answer, or have not yet: by trust and by namespace."""
        by_trust: Counter[Trust] = Counter()
        by_namespace: Counter[str] = Counter()
        for destination in self._known.values():
            if destination.running and (trust := destination.trust(now)) is not Trust.PROVEN:
                by_trust[trust] += destination.slots.total()
                by_namespace.update(destination.slots)
        return by_trust, by_namespace
