"""Backpressure per destination: a concurrency window, a short queue, and a circuit breaker.

A destination starts with a small window of concurrent attempts. Each response widens it by one, up to the limit in the
settings, so a destination that responds soon reaches the limit and one that never does holds few slots. The queue in
memory behind the window holds as many timers as the destination answered in one second. The rest stays in the store.

Twenty connection failures or timeouts in a row open the breaker: no attempts for five seconds, then a few probes. Each
failed probe doubles the pause, up to a minute. Any response, even an error, closes the breaker.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable

from duetime.instants import EPOCH, Instant
from duetime.model import Outcome, OutcomeKind, Timer, lane_of

FIRST_WINDOW = 64
PROBES = 5
"""Concurrent attempts while the breaker is open and its pause is over."""
BREAK_AFTER = 20
BREAK_MS, BREAK_MS_MAX = 5_000, 60_000
BACKOFF_MS, BACKOFF_MS_MAX = 1_000, 8_000
"""How long a destination pauses after a local shortage: of file descriptors, lookup threads, or the broker."""
SILENT_MS = 1_000
"""A destination is suspect if it has attempts in flight and has sent no response for this long."""
STALLED_MS = 1_000
"""A queue goes back to the store if no attempt has started for this long."""
UNQUEUED_MS = 10_000
"""After its queue went back to the store, a destination has no queue for this long."""
DESTINATIONS_MAX = 10_000
LANES_MAX = 1_000
"""The most lanes remembered per destination: one per namespace that has timers for it."""
SLOT_BYTES = 64 * 1024
"""One slot per this much payload and metadata: a larger timer takes several slots."""

_ALIVE = (OutcomeKind.ANSWERED, OutcomeKind.REFUSED)


class Trust(enum.Enum):
    PROVEN = "responds"
    FRESH = "unknown: not tried enough"
    SUSPECT = "does not respond"


def slots_of(timer: Timer) -> int:
    definition = timer.definition
    return 1 + (len(definition.payload) + len(definition.metadata)) // SLOT_BYTES


class Destination:
    def __init__(self, name: str, cap: int, queue_max: int) -> None:
        self.name = name
        self.running = 0
        self.waiting: deque[Timer] = deque()
        self.slots: Counter[str] = Counter()
        """Slots of its running and waiting timers, by namespace."""
        self.lanes: dict[int, str] = {}
        """The lanes to which looks apply a limit, with their namespaces."""
        self.behind = False
        """Whether the store has due timers that did not fit here."""
        self.low = -1
        """If it is behind, it gets more timers once it holds at most this many."""
        self.paused_until: Instant | None = None
        """When the pause ends, after which there are a few probes; None while the breaker is closed."""
        self._cap = cap
        self._queue_max = queue_max
        self._window = min(FIRST_WINDOW, cap)
        self._answered = False
        self._misses = 0
        self._pause_ms = 0
        self._started_at = EPOCH
        self._unqueued_until = EPOCH
        self._silent_since = EPOCH
        self._second = 0
        self._done_now = 0
        self._done_before = 0

    @property
    def held(self) -> int:
        return self.running + len(self.waiting)

    @property
    def idle(self) -> bool:
        return not self.held and self.paused_until is None

    def trust(self, now: Instant) -> Trust:
        silent = self.running > 0 and now - self._silent_since >= SILENT_MS
        if silent or self._misses or self.paused_until is not None:
            return Trust.SUSPECT
        return Trust.PROVEN if self._answered else Trust.FRESH

    def free(self, now: Instant) -> bool:
        """Whether one more attempt may start now."""
        if self.paused_until is not None:
            return now >= self.paused_until and self.running < PROBES
        return self.running < self._window

    def room(self, now: Instant, share: int) -> int:
        """How many more timers may be begun for it if at most ``share`` may be in flight."""
        if self.paused_until is not None:
            return 0 if now < self.paused_until else max(0, PROBES - self.held)
        return max(0, min(self._window, share) + self._ahead(now) - self.held)

    def takes(self, now: Instant) -> bool:
        """Whether the queue has room for one more timer."""
        return self.paused_until is None and len(self.waiting) < self._ahead(now)

    def enter(self, timer: Timer) -> None:
        self.slots[timer.namespace] += slots_of(timer)

    def leave(self, timer: Timer) -> None:
        self.slots[timer.namespace] -= slots_of(timer)
        if not self.slots[timer.namespace]:
            del self.slots[timer.namespace]

    def fall_behind(self) -> None:
        """Not everything due fits: get more once half of what it holds is done."""
        self.behind, self.low = True, self.held // 2

    def start(self, now: Instant) -> None:
        """An attempt starts."""
        self._started_at = now
        if not self.running:
            self._silent_since = now

    def stalled(self, now: Instant) -> bool:
        return bool(self.waiting) and now - self._started_at >= STALLED_MS

    def stall(self, now: Instant) -> None:
        """Use no queue for a while: it stalled, and a new one would probably stall and be put back again."""
        self._unqueued_until = now + UNQUEUED_MS

    def note(self, outcome: Outcome, now: Instant) -> bool:
        """Update the state after an attempt. Returns whether this opened the breaker."""
        if outcome.kind in _ALIVE:
            self._count(now)
            self._done_now += 1
            self._silent_since = now
            self._misses, self._answered = 0, True
            if self.paused_until is not None:
                self.paused_until, self._pause_ms, self._window = None, 0, min(PROBES, self._cap)
            elif self._window < self._cap:
                self._window += 1
            return False
        self._misses += 1
        if self._misses < BREAK_AFTER and self.paused_until is None:
            return False
        opened = self.paused_until is None
        self._pause(now, BREAK_MS, BREAK_MS_MAX)
        return opened

    def back_off(self, now: Instant) -> None:
        """Pause after a local shortage, longer each time."""
        self._pause(now, BACKOFF_MS, BACKOFF_MS_MAX)

    def _pause(self, now: Instant, first_ms: int, most_ms: int) -> None:
        if self.paused_until is None or now >= self.paused_until:  # only once for probes that fail together
            self._pause_ms = min(max(first_ms, 2 * self._pause_ms), most_ms)
            self.paused_until = now + self._pause_ms

    def _ahead(self, now: Instant) -> int:
        """The queue's limit: as many timers as the destination answered in a second."""
        if now < self._unqueued_until:
            return 0
        self._count(now)
        return min(self._queue_max, max(self._done_before, self._done_now))

    def _count(self, now: Instant) -> None:
        second = now // 1000
        if second != self._second:
            self._done_before = self._done_now if second == self._second + 1 else 0
            self._second, self._done_now = second, 0


class Destinations:
    """All known destinations, and which of them have a queue or a limit."""

    def __init__(self, *, cap: int, queue_max: int, in_flight_max: int) -> None:
        self._cap = cap
        self._queue_max = queue_max
        self.in_flight_max = in_flight_max
        self._share = min(cap, in_flight_max)
        self._known: dict[str, Destination] = {}
        self._known_max = DESTINATIONS_MAX
        self.queued: set[Destination] = set()
        self.limited: dict[Destination, None] = {}
        """Destinations whose lanes need a limit of their own in looks, below or above the default."""

    def __getitem__(self, name: str) -> Destination:
        destination = self._known.get(name)
        if destination is None:
            if len(self._known) >= self._known_max:
                self._forget()
            destination = self._known[name] = Destination(name, self._cap, self._queue_max)
        return destination

    def _forget(self) -> None:
        """Make room. First drop destinations that are idle and unlimited. If that is not enough, drop destinations that
        hold nothing: those with a closed breaker first, then those whose pause ends earliest."""
        most = DESTINATIONS_MAX // 2
        kept = [d for d in self._known.values() if not d.idle or d in self.limited]
        if len(kept) > most:
            kept.sort(key=lambda d: (d.held > 0, d.paused_until or 0), reverse=True)
            kept = kept[: max(most, sum(d.held > 0 for d in kept))]
        self._known = {d.name: d for d in kept}
        self.limited = {d: None for d in self.limited if d.name in self._known}
        self._known_max = max(DESTINATIONS_MAX, 2 * len(kept))  # amortized: not a full pass for each new destination

    def get(self, name: str) -> Destination | None:
        return self._known.get(name)

    def room(self, destination: Destination, now: Instant, free: int) -> int:
        """How many more timers the destination may get: at most a share of the free slots. The more the others hold,
        the less that is, so some slots stay free however many destinations do not respond."""
        return destination.room(now, max(1, free * self._share // self.in_flight_max))

    def limit(self, destination: Destination, namespace: str) -> None:
        """Apply a limit to this lane in looks from now on."""
        self.limited[destination] = None
        destination.lanes[lane_of(namespace, destination.name)] = namespace
        if len(destination.lanes) > LANES_MAX:
            del destination.lanes[next(iter(destination.lanes))]

    def limits(self, now: Instant, free: int, weight: Callable[[str], int]) -> dict[int, int]:
        """The limit of each limited lane: namespaces share a destination's room by their weights."""
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

    def relax(self, now: Instant, free: int, enough: int) -> None:
        """Drop the limits of destinations that are not behind and have room for ``enough`` timers again, or have had
        nothing due for a while after the pause of their breaker."""
        self.limited = {
            d: None
            for d in self.limited
            if d.behind
            or (d.lanes and self.room(d, now, free) < enough and now < (d.paused_until or now) + BREAK_MS_MAX)
        }

    def queue(self, destination: Destination, timer: Timer) -> None:
        destination.waiting.append(timer)
        destination.enter(timer)
        self.queued.add(destination)

    def take_waiting(self, destinations: Iterable[Destination]) -> list[Timer]:
        """Empty the queues of these destinations and return their timers."""
        taken: list[Timer] = []
        for destination in tuple(destinations):
            taken += destination.waiting
            for timer in destination.waiting:
                destination.leave(timer)
            destination.waiting.clear()
            self.queued.discard(destination)
        return taken

    def stalled(self, now: Instant) -> list[Destination]:
        self.queued = {destination for destination in self.queued if destination.waiting}
        return [destination for destination in self.queued if destination.stalled(now)]

    def unproven(self, now: Instant) -> tuple[Counter[Trust], Counter[str]]:
        """Slots of destinations that do not respond or have not responded yet, by trust and by namespace."""
        by_trust: Counter[Trust] = Counter()
        by_namespace: Counter[str] = Counter()
        for destination in self._known.values():
            if destination.running and (trust := destination.trust(now)) is not Trust.PROVEN:
                by_trust[trust] += destination.slots.total()
                by_namespace.update(destination.slots)
        return by_trust, by_namespace
