"""Fair scheduling: which lanes have due timers and how many of each to begin, while more is due than can be begun.

A lane is the timers of one namespace for one destination. While the engine can begin everything that is due, it begins
the oldest timers first and needs no lanes. When held-back timers would block the rest, or a namespace would get less
than its share, it asks the store which lanes have due timers, keeps that list current, and divides the free slots:

- between namespaces by weight, and evenly between the lanes of a namespace;
- to each destination no more than it can take (``Destinations``);
- at destinations that respond, a namespace holds at most as many slots as are free, and half as many at others;
- destinations that do not respond hold at most half as many slots as are free, and new ones as many as are free;
- a destination with nothing in flight gets one attempt nearly always, so that a new or recovered one can show that it
  responds.

Each limit is relative to the free slots, so some are always left for the next timers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from duetime.engine.destinations import Destination, Destinations, Trust
from duetime.instants import EPOCH, Instant
from duetime.model import Timer, destination_of, lane_of
from duetime.store import Begun, Lane, Portion

KNOWN_MAX = 100_000
PORTIONS_MAX = 64
"""The most lanes per look."""
PORTION_MIN = 16
OVERBOOKING = 4
"""The portions of a look may add up to this many times its limit: most lanes have less due than their portion."""
UNANSWERED_MAX = 48
"""The most attempts per look to destinations that have not responded: connecting is expensive."""
UNANSWERED_WAIT_MS = 100
"""How long to skip a lane whose destination does not respond and has used up its share."""
PAUSED_WAIT_MS = 1_000
"""The longest time to skip a lane whose destination has an open breaker: an attempt in flight may close it."""
SHORT_WAIT_MS = 20
"""How long to skip a lane because of ``UNANSWERED_MAX``. Waits end at multiples of their length, so that one look
serves many lanes."""
LANES_PER_WAIT = 1_000
"""These waits are multiplied by 1 + lanes // this, because a pass over many lanes takes long."""
READY_MAX = 2_000
"""The most lanes that a look goes through."""


class LaneState(Struct):
    """The state of a lane."""

    namespace: str
    destination: str
    fire_at: Instant  # of its earliest timer
    ready_at: Instant = EPOCH  # not before


class Lanes:
    def __init__(self) -> None:
        self._known: dict[int, LaneState] = {}
        self._learned: dict[int, Instant] = {}
        self._passed_over: set[str] = set()
        self._served: dict[str, float] = {}
        """Timers begun per namespace, divided by its weight; the namespace with the least comes first."""
        self._weights: dict[str, int] = {}
        self.short = False
        """Whether the last look skipped a lane because too few slots were free."""
        self.active = False
        """Whether timers are begun by lane."""

    def learn(self, lane: int, namespace: str, destination: str, fire_at: Instant) -> None:
        """A timer of this lane falls due at ``fire_at``."""
        known = self._known.get(lane)
        if known is not None:
            known.fire_at = min(known.fire_at, fire_at)
        else:
            if len(self._known) >= KNOWN_MAX:  # Drop the one served longest ago; the next survey finds it again.
                del self._known[next(iter(self._known))]
            self._known[lane] = LaneState(namespace, destination, fire_at)
        self._learned[lane] = min(fire_at, self._learned.get(lane, fire_at))

    def learn_timer(self, timer: Timer) -> None:
        destination = destination_of(timer.definition.target)
        self.learn(lane_of(timer.namespace, destination), timer.namespace, destination, timer.fire_at)

    def learn_all(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self.learn(lane.lane, lane.namespace, lane.destination, lane.fire_at)

    def end(self, now: Instant) -> list[tuple[str, str]]:
        """Go back to the oldest timers first. Returns the namespace and destination of each lane with due timers."""
        self.active = False
        due = [(known.namespace, known.destination) for known in self._known.values() if known.fire_at <= now]
        self._known.clear()
        self._learned.clear()
        self._served.clear()
        self.short = False
        return due

    def portions(
        self,
        destinations: Destinations,
        *,
        now: Instant,
        limit: int,
        free: int,
        in_flight: Mapping[str, int],
        weight: Callable[[str], int],
        size: Callable[[str], int] = lambda namespace: 1,
    ) -> tuple[list[Portion], Instant | None]:
        """How many timers to begin per lane, and when to call this again if nothing changes before."""
        self._learned.clear()
        self._passed_over.clear()
        self.short = False
        ready, next_at = self._ready(now)
        if not ready:
            return [], next_at
        self._weights = weights = {name: weight(name) for name in {known.namespace for _, known in ready}}
        least = min((self._served[name] for name in weights if name in self._served), default=0.0)
        self._served = {name: self._served.get(name, least) for name in weights}
        sharing: Counter[str] = Counter()
        for _, known in ready:
            sharing[known.destination] += weights[known.namespace]
        sizes = {name: min(size(name), 1 + destinations.in_flight_max // 4) for name in weights}
        budget = _Budget(destinations, now, free, in_flight, weights, sharing, sizes)
        chosen: list[tuple[int, LaneState, int]] = []
        for lane, known in _round_robin(ready, self._served):
            trust = budget.trusts[known.destination]
            if trust is Trust.FRESH and budget.spent:  # There may be many new destinations: this must be quick.
                known.ready_at = budget.later(trust, len(self._known))
            elif not (room := budget.room(known, destination := destinations[known.destination])):
                self._passed_over.add(known.destination)
                destination.fall_behind()
                if trust is not Trust.PROVEN:
                    paused_until = min(destination.paused_until or EPOCH, now + PAUSED_WAIT_MS)
                    known.ready_at = _next_multiple(max(now, paused_until - 1), UNANSWERED_WAIT_MS)
            elif most := budget.take(known, destination, room):
                chosen.append((lane, known, most))
                if len(chosen) == PORTIONS_MAX:
                    next_at = now
                    break
                continue
            elif trust is Trust.PROVEN:
                self.short = True
            else:
                known.ready_at = budget.later(trust, len(self._known))
            if trust is Trust.PROVEN and len(self._known) > READY_MAX:  # With fewer, the next finished attempt polls.
                known.ready_at = budget.later(trust, len(self._known))
            if known.ready_at > now:
                next_at = min(next_at or known.ready_at, known.ready_at)
        per_lane = max(PORTION_MIN, OVERBOOKING * limit // max(1, len(chosen)))
        lanes_of = Counter(known.namespace for _, known, _ in chosen)
        for lane, _, _ in chosen:  # move to the end: other lanes come first next time
            self._known[lane] = self._known.pop(lane)
        portions = [
            Portion(lane, min(most, per_lane), weights[known.namespace] / lanes_of[known.namespace])
            for lane, known, most in chosen
        ]
        return portions, next_at

    def update_after_look(self, portions: Sequence[Portion], begun: Begun, now: Instant) -> set[str]:
        """Update the lanes after a look. It may have missed timers that were learned while it ran. Returns the
        destinations that have more due."""
        for namespace, count in Counter(timer.namespace for timer in begun.timers).items():
            if namespace in self._served:
                self._served[namespace] += count / self._weights[namespace]
        left, behind = begun.lanes, set(self._passed_over)
        for portion in portions:
            lane = portion.lane
            known = self._known.get(lane)
            fire_at = min((at for at in (left.get(lane), self._learned.get(lane)) if at is not None), default=None)
            if known is None:
                continue
            if fire_at is None:
                del self._known[lane]
                continue
            known.fire_at = fire_at
            if fire_at <= now:
                behind.add(known.destination)
        return behind

    def _ready(self, now: Instant) -> tuple[list[tuple[int, LaneState]], Instant | None]:
        """The lanes that are ready now, and when the next one will be."""
        ready: list[tuple[int, LaneState]] = []
        next_at = None
        for lane, known in self._known.items():
            at = max(known.fire_at, known.ready_at)
            if at > now:
                if next_at is None or at < next_at:
                    next_at = at
            elif len(ready) < READY_MAX:
                ready.append((lane, known))
            else:
                return ready, now
        return ready, next_at


class _Budget:
    """What one look may begin: the room of each destination, and what is left of each limit."""

    def __init__(
        self,
        destinations: Destinations,
        now: Instant,
        free: int,
        in_flight: Mapping[str, int],
        weights: Mapping[str, int],
        sharing: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> None:
        by_trust, self._unproven = destinations.unproven(now)
        self._answered = {name: in_flight.get(name, 0) - self._unproven[name] for name in weights}
        self._destinations = destinations
        self._now = now
        self._free = free
        self._weights = weights
        self._heaviest = max(weights.values())
        self._sharing = sharing
        self._sizes = sizes
        self._for_large = free // 2
        self._rooms: dict[str, int] = {}
        self._pools = {
            Trust.FRESH: free - by_trust[Trust.FRESH],
            Trust.SUSPECT: free // 2 - by_trust[Trust.SUSPECT],
        }
        self._starts = {Trust.FRESH: UNANSWERED_MAX, Trust.SUSPECT: UNANSWERED_MAX}
        known = ((name, destinations.get(name)) for name in sharing)
        self.trusts = {name: destination.trust(now) if destination else Trust.FRESH for name, destination in known}
        untried = sum(trust is not Trust.PROVEN for trust in self.trusts.values())
        self._starts_each = max(1, UNANSWERED_MAX // max(1, untried))

    def room(self, known: LaneState, destination: Destination) -> int:
        """The lane's share of its destination's room, which it shares with the lanes of other namespaces."""
        room = self._destinations.room(destination, self._now, self._free)
        part = -(-room * self._weights[known.namespace] // self._sharing[known.destination])
        return min(part, self._rooms.setdefault(known.destination, room))

    def take(self, known: LaneState, destination: Destination, room: int) -> int:
        """Reserve and return how many timers to begin of a lane whose share of the room is ``room``."""
        trust, namespace = self.trusts[known.destination], known.namespace
        size = self._sizes[namespace]
        if size > 1:
            room = min(room, self._for_large // size)
        share = max(1, self._free * self._weights[namespace] // self._heaviest)
        if trust is Trust.PROVEN:
            most = min(room, -((self._answered[namespace] - share) // size))
        else:
            unproven = self._unproven[namespace]
            most = min((share // 2 - unproven, self._pools[trust])) // size
            most = min(room, most, self._starts[trust], self._starts_each)
            if most <= 0 and not destination.held and unproven < 2 * share:
                trust, most = Trust.FRESH, min(1, room, self._starts[Trust.FRESH])
        most = max(0, most)
        if trust is not Trust.PROVEN:
            self._pools[trust] -= most * size
            self._starts[trust] -= most
            self._unproven[namespace] += most * size
        elif size > 1:  # Large timers are not overbooked.
            self._answered[namespace] += most * size
        self._for_large -= most * size if size > 1 else 0
        self._rooms[known.destination] -= most
        return most

    @property
    def spent(self) -> bool:
        """Whether this look may start no more attempts to new destinations."""
        return self._starts[Trust.FRESH] <= 0

    def later(self, trust: Trust, lanes: int) -> Instant:
        """Until when to skip a lane that got nothing: until the next look, or until some attempts have ended."""
        wait_ms = UNANSWERED_WAIT_MS if self._starts.get(trust, 0) > 0 else SHORT_WAIT_MS
        return _next_multiple(self._now, wait_ms * (1 + lanes // LANES_PER_WAIT))


def _next_multiple(now: Instant, wait_ms: int) -> Instant:
    """The next multiple of ``wait_ms`` after ``now``."""
    return Instant((now // wait_ms + 1) * wait_ms)


def _round_robin(lanes: list[tuple[int, LaneState]], served: Mapping[str, float]) -> Iterable[tuple[int, LaneState]]:
    """Round robin: the first lane of each namespace, then the second of each, and so on."""
    places: Counter[str] = Counter()
    turns: list[tuple[int, float, int]] = []
    for number, (_, known) in enumerate(lanes):
        turns.append((places[known.namespace], served[known.namespace], number))
        places[known.namespace] += 1
    return (lanes[number] for _, _, number in sorted(turns))
