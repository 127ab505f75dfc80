"""Which lanes have due timers, and how much of each to begin: used while too many are due to take the oldest of all.

A lane is the timers of one namespace for one destination. While everything that is due can be begun, the engine takes
the oldest and needs no lanes. When that would not get past what is held back, or when somebody would go short, it asks
the store which lanes have something due, keeps that up to date from what it begins and hears, and deals what there is:

- between namespaces by their weights, and evenly between the lanes of one;
- to each destination what it can take (``Destinations``);
- one namespace has no more under way to destinations that answer than is free, and to the others half as much;
- destinations that do not answer have at most half of what is free, those that are new as much as is free;
- a destination that has nothing under way may have one attempt nearly always: so a new one, or one that is back, can
  show that it answers.

Each limit is a part of what is free. So there is always something left for the next that comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from duetime.engine.destinations import Destination, Destinations, Trust
from duetime.model import Timer, destination_of, lane_of
from duetime.store import Begun, Lane, Portion

KNOWN_MAX = 100_000
PORTIONS_MAX = 64
"""From how many lanes a look takes timers."""
PORTION_MIN = 16
OVERBOOKING = 4
"""How many times the limit the portions of a look may add up to: most lanes have less due than they may have."""
UNANSWERED_MAX = 48
"""How many attempts one look starts to destinations that have not answered: connecting is expensive."""
UNANSWERED_WAIT_MS = 100
"""How long a lane is passed over whose destination does not answer and may not have more."""
CLOSED_WAIT_MS = 1_000
"""How long a lane is passed over whose destination has an open breaker: an attempt that is under way may close it."""
SHORT_WAIT_MS = 20
"""How long a lane is passed over because of ``UNANSWERED_MAX``. Waits end at multiples of their length, so that many
lanes need few looks."""
LANES_PER_WAIT = 1_000
"""Such waits are as many times as long as there are lanes by this number: going through them takes time."""
READY_MAX = 2_000
"""How many lanes a look goes through."""


class Known(Struct):
    """What is known of a lane."""

    namespace: str
    destination: str
    fire_at: int  # of its earliest timer
    ready_at: int = 0  # not before


class Lanes:
    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._learned: dict[int, int] = {}
        self._passed_over: set[str] = set()
        self._served: dict[str, float] = {}
        """How much each namespace has had of late, for its weight; who had least is first."""
        self._weights: dict[str, int] = {}
        self.short = False
        """Whether the latest look passed over somebody because too few slots are free."""
        self.active = False
        """Whether timers are begun by lane."""

    def learn(self, lane: int, namespace: str, destination: str, fire_at: int) -> None:
        """A timer of this lane falls due at ``fire_at``."""
        known = self._known.get(lane)
        if known is not None:
            known.fire_at = min(known.fire_at, fire_at)
        else:
            if len(self._known) >= KNOWN_MAX:  # The first has waited for longest; the next survey finds it again.
                del self._known[next(iter(self._known))]
            self._known[lane] = Known(namespace, destination, fire_at)
        self._learned[lane] = min(fire_at, self._learned.get(lane, fire_at))

    def learn_timer(self, timer: Timer) -> None:
        destination = destination_of(timer.definition.target)
        self.learn(lane_of(timer.namespace, destination), timer.namespace, destination, timer.fire_at)

    def learn_all(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self.learn(lane.lane, lane.namespace, lane.destination, lane.fire_at)

    def end(self, now: int) -> list[tuple[str, str]]:
        """Timers are begun oldest first again. Returns the namespaces and destinations of lanes with something due."""
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
        now: int,
        limit: int,
        free: int,
        in_flight: Mapping[str, int],
        weight: Callable[[str], int],
        size: Callable[[str], int] = lambda namespace: 1,
    ) -> tuple[list[Portion], int | None]:
        """How much to begin of which lane, and when to ask again if nothing happens before."""
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
        chosen: list[tuple[int, Known, int]] = []
        for lane, known in _in_turn(ready, self._served):
            trust = budget.trusts[known.destination]
            if trust is Trust.FRESH and budget.spent:  # There may be many, so it must not take long.
                known.ready_at = budget.later(trust, len(self._known))
            elif not (room := budget.room(known, destination := destinations[known.destination])):
                self._passed_over.add(known.destination)
                destination.fall_behind()
                if trust is not Trust.PROVEN:
                    opens_at = min(destination.opens_at or 0, now + CLOSED_WAIT_MS)
                    known.ready_at = _multiple(max(now, opens_at - 1), UNANSWERED_WAIT_MS)
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
            if trust is Trust.PROVEN and len(self._known) > READY_MAX:  # Otherwise an attempt that ends brings a look.
                known.ready_at = budget.later(trust, len(self._known))
            if known.ready_at > now:
                next_at = min(next_at or known.ready_at, known.ready_at)
        per_lane = max(PORTION_MIN, OVERBOOKING * limit // max(1, len(chosen)))
        lanes_of = Counter(known.namespace for _, known, _ in chosen)
        for lane, _, _ in chosen:  # to the end: others are first the next time
            self._known[lane] = self._known.pop(lane)
        portions = [
            Portion(lane, min(most, per_lane), weights[known.namespace] / lanes_of[known.namespace])
            for lane, known, most in chosen
        ]
        return portions, next_at

    def begun(self, portions: Sequence[Portion], begun: Begun, now: int) -> set[str]:
        """A look has begun these portions. What was learned meanwhile it may have missed. Returns the destinations that
        have more due."""
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

    def _ready(self, now: int) -> tuple[list[tuple[int, Known]], int | None]:
        """The lanes whose time has come, and when that of the next one does."""
        ready: list[tuple[int, Known]] = []
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
    """What a look may begin: what each destination has room for, and what is left of each limit."""

    def __init__(
        self,
        destinations: Destinations,
        now: int,
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

    def room(self, known: Known, destination: Destination) -> int:
        """The part of its destination's room that a lane may have, beside the lanes of other namespaces."""
        room = self._destinations.room(destination, self._now, self._free)
        part = -(-room * self._weights[known.namespace] // self._sharing[known.destination])
        return min(part, self._rooms.setdefault(known.destination, room))

    def take(self, known: Known, destination: Destination, room: int) -> int:
        """How much to begin of a lane whose destination has this much room."""
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
        elif size > 1:  # It is not overbooked.
            self._answered[namespace] += most * size
        self._for_large -= most * size if size > 1 else 0
        self._rooms[known.destination] -= most
        return most

    @property
    def spent(self) -> bool:
        """Whether this look starts no more attempts to new destinations."""
        return self._starts[Trust.FRESH] <= 0

    def later(self, trust: Trust, lanes: int) -> int:
        """Until when to pass over a lane that got nothing: the next look may start more, or some must end before."""
        wait_ms = UNANSWERED_WAIT_MS if self._starts.get(trust, 0) > 0 else SHORT_WAIT_MS
        return _multiple(self._now, wait_ms * (1 + lanes // LANES_PER_WAIT))


def _multiple(now: int, wait_ms: int) -> int:
    """The end of a wait."""
    return (now // wait_ms + 1) * wait_ms


def _in_turn(lanes: list[tuple[int, Known]], served: Mapping[str, float]) -> Iterable[tuple[int, Known]]:
    """One lane of each namespace after the other, then the second of each."""
    places: Counter[str] = Counter()
    turns: list[tuple[int, float, int]] = []
    for number, (_, known) in enumerate(lanes):
        turns.append((places[known.namespace], served[known.namespace], number))
        places[known.namespace] += 1
    return (lanes[number] for _, _, number in sorted(turns))
