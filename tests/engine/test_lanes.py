"""Fair scheduling: lanes, weights, and limits that keep slots free for the next timers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from duetime.engine import lanes as module
from duetime.engine.destinations import BREAK_AFTER, FIRST_WINDOW, PROBES, SILENT_MS, Destination, Destinations
from duetime.engine.lanes import (
    LANES_PER_WAIT,
    PAUSED_WAIT_MS,
    PORTIONS_MAX,
    SHORT_WAIT_MS,
    UNANSWERED_MAX,
    UNANSWERED_WAIT_MS,
    Lanes,
)
from duetime.instants import CreatedAt, ExecuteAt, FireAt, Instant
from duetime.model import Definition, HttpTarget, Outcome, OutcomeKind, Timer, destination_of
from duetime.store import Begun, Lane, Portion

NOW = Instant(1_800_000_000_000)
CAP, IN_FLIGHT_MAX, LIMIT = 256, 4_096, 500
ANSWER = Outcome(kind=OutcomeKind.ANSWERED, status=200)
MISS = Outcome(kind=OutcomeKind.UNREACHABLE)


def timer(namespace: str, host: str, fire_at: Instant = NOW) -> Timer:
    return Timer(
        namespace,
        "a",
        0,
        Definition(target=HttpTarget(url=f"http://{host}/")),
        ExecuteAt(NOW),
        FireAt(fire_at),
        CreatedAt(NOW),
        NOW,
        1,
        1,
    )


class Deck:
    """Lanes with due timers, and what each look begins of them."""

    def __init__(self, *, in_flight_max: int = IN_FLIGHT_MAX, weights: Mapping[str, int] | None = None) -> None:
        self.lanes = Lanes()
        self.destinations = Destinations(cap=CAP, queue_max=1_000, in_flight_max=in_flight_max)
        self.free = in_flight_max
        self.in_flight: Counter[str] = Counter()
        self.weights = weights or {}
        self.next_at: Instant | None = None
        self.asked: list[Portion] = []

    def learn(self, namespace: str, host: str, fire_at: Instant = NOW) -> int:
        made = timer(namespace, host, fire_at)
        self.lanes.learn_timer(made)
        return made.lane

    def destination(self, host: str) -> Destination:
        return self.destinations[destination_of(HttpTarget(url=f"http://{host}/"))]

    def proven(self, *hosts: str, answers: int = CAP) -> None:
        """Make these destinations proven, with empty queues."""
        for host in hosts:
            for _ in range(answers):
                self.destination(host).note(ANSWER, NOW - 10_000)

    def broken(self, host: str, at: Instant = NOW) -> Destination:
        for _ in range(BREAK_AFTER):
            self.destination(host).note(MISS, at)
        return self.destination(host)

    def busy(self, namespace: str, host: str, count: int, at: Instant = NOW) -> None:
        """Put this many attempts in flight."""
        destination = self.destination(host)
        for _ in range(count):
            destination.start(at)
            destination.running += 1
            destination.enter(timer(namespace, host))
        self.in_flight[namespace] += count
        self.free -= count

    def look(self, now: Instant = NOW, limit: int = LIMIT) -> dict[int, int]:
        """How many timers a look may begin, by lane."""
        self.asked, self.next_at = self.lanes.portions(
            self.destinations,
            now=now,
            limit=limit,
            free=self.free,
            in_flight=self.in_flight,
            weight=lambda name: self.weights.get(name, 1),
        )
        return {portion.lane: portion.most for portion in self.asked}

    def begun(self, left: Mapping[int, Instant] | None = None, *timers: Timer, now: Instant = NOW) -> set[str]:
        return self.lanes.update_after_look(self.asked, Begun(list(timers), None, lanes=dict(left or {})), now)


# Known lanes.


def test_the_engine_starts_with_oldest_first() -> None:
    assert not Lanes().active


def test_a_due_lane_gets_a_portion_and_an_empty_one_is_forgotten() -> None:
    deck = Deck()
    lane = deck.learn("default", "a", NOW + 50)
    assert deck.look() == {} and deck.next_at == NOW + 50
    assert lane in deck.look(NOW + 50)
    deck.begun({lane: NOW + 900}, now=NOW + 50)
    assert deck.look(NOW + 60) == {} and deck.next_at == NOW + 900
    assert lane in deck.look(NOW + 900)
    deck.begun({}, now=NOW + 900)
    assert deck.look(NOW + 100_000) == {} and deck.next_at is None


def test_a_survey_does_not_delay_known_lanes() -> None:
    deck = Deck()
    lane = deck.learn("default", "a", NOW)
    deck.lanes.learn_all([Lane(lane, "default", "http://a:80", NOW + 5_000)])
    assert lane in deck.look()


def test_lanes_learned_during_a_look_are_kept() -> None:
    """The look may have read its lane just before the timer was written."""
    deck = Deck()
    lane = deck.learn("default", "a")
    deck.look()
    deck.learn("default", "a", NOW + 20)
    deck.learn("default", "a", NOW + 10)
    deck.begun({})
    assert deck.look(NOW + 9) == {} and deck.next_at == NOW + 10
    assert lane in deck.look(NOW + 10)


def test_lanes_learned_before_a_look_are_cleared_by_it() -> None:
    deck = Deck()
    deck.learn("default", "a")
    deck.look()
    deck.begun({})
    assert deck.look(NOW + 1) == {}


def test_a_lane_keeps_the_earlier_of_the_remaining_and_learned_times() -> None:
    deck = Deck()
    lane = deck.learn("default", "a")
    deck.look()
    deck.learn("default", "a", NOW + 500)
    deck.begun({lane: NOW + 300})
    assert deck.look(NOW + 1) == {} and deck.next_at == NOW + 300


def test_the_number_of_lanes_is_limited_and_new_ones_replace_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_MAX", 10)
    deck = Deck()
    for n in range(50):
        deck.learn("default", f"host-{n}")
    newest = deck.learn("other", "new")
    assert len(deck.lanes._known) == 10
    assert newest in deck.look()


def test_end_returns_due_lanes_and_clears_the_state() -> None:
    deck = Deck()
    deck.learn("default", "a")
    deck.learn("default", "b", NOW + 1)
    deck.lanes.active = True
    assert deck.lanes.end(NOW) == [("default", "http://a:80")]
    assert not deck.lanes.active and not deck.lanes._known
    assert deck.look(NOW + 100_000) == {}


def test_a_look_that_finishes_after_the_end_restores_nothing() -> None:
    deck = Deck()
    lane = deck.learn("default", "a")
    deck.look()
    deck.lanes.end(NOW)
    deck.begun({lane: NOW}, timer("default", "a"))
    assert not deck.lanes._known


def test_destinations_with_more_due_timers_are_returned() -> None:
    deck = Deck()
    more, later, done = (deck.learn("default", host) for host in ("more", "later", "done"))
    full = deck.learn("default", "full")
    deck.proven("full")
    deck.busy("default", "full", CAP)
    assert set(deck.look()) == {more, later, done}
    assert full not in deck.look()
    assert deck.begun({more: NOW, later: NOW + 1}) == {"http://more:80", "http://full:80"}


# The number of lanes.


def test_a_look_serves_a_limited_number_of_lanes_and_the_next_one_the_others() -> None:
    deck = Deck()
    hosts = [f"host-{n}" for n in range(3 * PORTIONS_MAX)]
    deck.proven(*hosts)
    lanes = [deck.learn("default", host) for host in hosts]
    seen: list[int] = []
    for _ in range(3):
        some = deck.look()
        assert len(some) == PORTIONS_MAX
        assert deck.next_at is not None and deck.next_at <= NOW, "the others wait for no reason"
        deck.begun(dict.fromkeys(some, NOW))
        seen += some
    assert seen == lanes
    assert list(deck.look()) == lanes[:PORTIONS_MAX]


def test_a_look_goes_through_a_limited_number_of_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READY_MAX", 100)
    deck = Deck()
    for n in range(60):
        deck.broken(f"closed-{n}")
        deck.learn("default", f"closed-{n}")
    for n in range(60):
        deck.proven(f"full-{n}", answers=1)
        deck.busy("default", f"full-{n}", FIRST_WINDOW + 1)
        deck.learn("default", f"full-{n}")
    deck.free = IN_FLIGHT_MAX
    for n in range(300):
        deck.learn("default", f"new-{n}")
    deck.proven("well")
    well = deck.learn("default", "well")
    looks = 0
    while well not in deck.look():
        deck.begun({})
        looks += 1
        assert deck.next_at == NOW and looks < 10, "a lane is out of reach"


def test_namespaces_take_turns() -> None:
    deck = Deck()
    deck.proven(*(f"host-{n}" for n in range(2 * PORTIONS_MAX)), "other")
    for n in range(2 * PORTIONS_MAX):
        deck.learn("many", f"host-{n}")
    few = deck.learn("few", "other")
    assert few in deck.look()


def test_the_namespace_served_least_for_its_weight_comes_first() -> None:
    deck = Deck(weights={"heavy": 3})
    deck.proven("a")
    heavy, light = deck.learn("heavy", "a"), deck.learn("light", "a")
    deck.busy("default", "a", CAP - 1)
    deck.free = IN_FLIGHT_MAX
    served: Counter[int] = Counter()
    for _ in range(400):
        ((lane, most),) = deck.look().items()
        assert most == 1
        served[lane] += 1
        deck.begun({heavy: NOW, light: NOW}, timer("heavy" if lane == heavy else "light", "a"))
    assert abs(served[heavy] - 300) <= 2 and abs(served[light] - 100) <= 2


# Shares.


def test_shares_are_by_weight_and_even_between_the_lanes_of_a_namespace() -> None:
    deck = Deck(weights={"a": 1, "b": 3})
    deck.proven("x", "y", "z")
    alone = deck.learn("a", "x")
    two = [deck.learn("b", host) for host in ("y", "z")]
    deck.look()
    shares = {portion.lane: portion.share for portion in deck.asked}
    assert shares == {alone: 1.0, two[0]: 1.5, two[1]: 1.5}


def test_portions_are_bounded_by_the_limit_of_the_look() -> None:
    deck = Deck()
    hosts = [f"host-{n}" for n in range(40)]
    deck.proven(*hosts)
    for host in hosts:
        deck.learn("default", host)
    assert max(deck.look(limit=10).values()) <= 16


def test_namespaces_share_a_destination_by_weight() -> None:
    deck = Deck(weights={"a": 1, "b": 3})
    deck.proven("x")
    a, b = deck.learn("a", "x"), deck.learn("b", "x")
    looked = deck.look()
    assert looked[b] == 3 * looked[a] == CAP * 3 // 4


def test_namespaces_together_never_exceed_the_room_of_a_destination() -> None:
    deck = Deck()
    deck.proven("x")
    for n in range(50):
        deck.learn(f"namespace-{n}", "x")
    deck.busy("default", "x", CAP - 7)
    deck.free = IN_FLIGHT_MAX
    assert sum(deck.look().values()) == 7
    assert deck.destination("x").behind
    assert deck.begun({}) == {"http://x:80"}, "the others have timers due"


def test_a_namespace_has_at_most_its_weighted_share_of_free_slots_in_flight() -> None:
    deck = Deck(in_flight_max=900, weights={"light": 1, "heavy": 2})
    deck.proven("x", "y")
    light, heavy = deck.learn("light", "x"), deck.learn("heavy", "y")
    deck.destination("busy").note(ANSWER, NOW)
    deck.busy("light", "busy", 200)
    deck.busy("heavy", "busy", 200)
    looked = deck.look()  # 500 are free: 250 for one and 500 for the other
    assert looked[light] == 50
    assert looked[heavy] > 50
    deck.busy("light", "busy", 50)
    assert light not in deck.look() and deck.lanes.short
    deck.busy("heavy", "busy", 100)
    assert heavy in deck.look()


def test_the_lightest_namespace_always_gets_one_slot() -> None:
    deck = Deck(in_flight_max=100, weights={"heavy": 1_000})
    deck.proven("x", "y")
    deck.learn("heavy", "x")
    light = deck.learn("light", "y")
    assert deck.look()[light] == 1


# Destinations that do not respond.


def test_a_look_starts_few_attempts_to_unproven_destinations() -> None:
    deck = Deck()
    for n in range(200):
        deck.learn("default", f"new-{n}")
    looked = deck.look()
    assert sum(looked.values()) == UNANSWERED_MAX and set(looked.values()) == {1}
    assert deck.next_at == NOW + SHORT_WAIT_MS
    second = deck.look(NOW + SHORT_WAIT_MS)
    assert len(second) == UNANSWERED_MAX and not second.keys() & looked.keys()


def test_new_destinations_hold_at_most_as_many_slots_as_are_free() -> None:
    deck = Deck()
    for n in range(6):
        for m in range(40):
            deck.busy(f"namespace-{n}", f"held-{n}-{m}", 8)
    assert deck.look() == {}
    lane = deck.learn("default", "new")
    assert deck.look()[lane] == UNANSWERED_MAX
    deck.busy("other", "held", 130)
    assert deck.look() == {lane: 1}  # the first one
    deck.busy("default", "new", 1)
    assert deck.look() == {} and deck.next_at == NOW + UNANSWERED_WAIT_MS
    deck.destination("new").start(NOW + SILENT_MS - 1)
    deck.destination("new")._silent_since = NOW + SILENT_MS - 1
    assert lane in deck.look(NOW + SILENT_MS), "those that were new are suspect by now"


def test_suspect_destinations_together_hold_half_of_the_free_slots() -> None:
    deck = Deck(in_flight_max=300)
    suspect, other = deck.destination("suspect"), deck.destination("other")
    suspect.note(MISS, NOW)
    other.note(MISS, NOW)
    lane = deck.learn("default", "suspect")
    deck.busy("default", "suspect", 1)
    deck.busy("elsewhere", "other", 98)
    assert deck.look()[lane] == 1  # 201 are free, and 99 are theirs
    deck.busy("elsewhere", "other", 1)
    assert deck.look(NOW + 1_000) == {}


def test_an_idle_destination_gets_an_attempt_even_if_others_hang() -> None:
    """Otherwise a destination that failed once or has recovered could not prove it while others hang for an hour."""
    deck = Deck(in_flight_max=300)
    deck.destination("other").note(MISS, NOW)
    deck.busy("default", "other", 150)
    deck.destination("flaky").note(MISS, NOW)
    flaky, new = deck.learn("default", "flaky"), deck.learn("default", "new")
    hanging = deck.learn("default", "other")
    looked = deck.look()
    assert looked == {flaky: 1, new: 1}
    assert hanging not in looked


def test_hanging_attempts_do_not_use_up_the_share_of_working_destinations() -> None:
    deck = Deck(in_flight_max=300)
    deck.busy("default", "hanging", 200, at=NOW - SILENT_MS)
    deck.proven("well")
    well = deck.learn("default", "well")
    assert deck.look()[well] > 0


def test_a_namespace_has_half_of_the_free_slots_for_suspect_destinations() -> None:
    deck = Deck(in_flight_max=300)
    deck.busy("default", "hanging-0", 60, at=NOW - SILENT_MS)
    deck.busy("default", "hanging-1", 41, at=NOW)
    lane = deck.learn("default", "hanging-1")
    assert deck.look() == {}  # 199 are free
    deck.in_flight["default"] -= 41
    deck.free += 41
    deck.destination("hanging-1").slots.clear()
    deck.destination("hanging-1").running = 1
    assert lane in deck.look(NOW + UNANSWERED_WAIT_MS)


# When to poll again.


def test_a_full_proven_destination_requests_a_poll_when_it_has_room() -> None:
    deck = Deck()
    deck.proven("x")
    deck.busy("default", "x", CAP)
    lane = deck.learn("default", "x")
    assert deck.look() == {} and deck.next_at is None
    assert deck.destination("x").behind and deck.destination("x").low == CAP // 2
    deck.destination("x").running = CAP // 2
    assert lane in deck.look()


def test_a_lane_of_a_silent_full_destination_is_skipped_for_a_while() -> None:
    deck = Deck()
    deck.busy("default", "x", FIRST_WINDOW, at=NOW - 5_000)
    lane = deck.learn("default", "x")
    assert deck.look() == {} and deck.next_at == NOW + UNANSWERED_WAIT_MS
    deck.destination("x").running = 0
    assert deck.look(NOW + 50) == {} and deck.next_at == NOW + UNANSWERED_WAIT_MS
    assert lane in deck.look(NOW + UNANSWERED_WAIT_MS)


def test_a_lane_of_a_broken_destination_is_skipped_until_its_pause_ends_or_for_a_second() -> None:
    deck = Deck()
    destination = deck.broken("x", at=NOW + 30)
    lane = deck.learn("default", "x")
    assert deck.look(NOW + 30) == {}
    assert deck.next_at == NOW + PAUSED_WAIT_MS + UNANSWERED_WAIT_MS
    assert destination.paused_until is not None
    shortly = destination.paused_until - 10
    assert deck.look(shortly) == {}
    assert (
        deck.next_at is not None
        and destination.paused_until <= deck.next_at < destination.paused_until + UNANSWERED_WAIT_MS
    )
    assert deck.look(deck.next_at)[lane] == PROBES


def test_waits_of_lanes_end_at_the_same_time() -> None:
    """If each had its own rhythm, a thousand of them would need a look every few milliseconds."""
    deck = Deck()
    for n in range(300):
        deck.broken(f"x-{n}", at=NOW + n)
        deck.learn("default", f"x-{n}", NOW + n)
    looks, now = 0, NOW + 300
    while now < NOW + 3_300:
        assert deck.look(now) == {} and deck.next_at is not None
        looks, now = looks + 1, max(now + 1, deck.next_at)
    assert looks <= 3 * 1_000 / UNANSWERED_WAIT_MS + 1


def test_waits_grow_with_the_number_of_lanes() -> None:
    deck = Deck()
    for n in range(2 * LANES_PER_WAIT):
        deck.learn("default", f"new-{n}")
    deck.look()
    waits = [known.ready_at - NOW for known in deck.lanes._known.values() if known.ready_at]
    assert min(waits) > SHORT_WAIT_MS


def test_no_lane_is_requested_twice() -> None:
    deck = Deck()
    deck.proven(*(f"host-{n}" for n in range(10)))
    for n in range(100):
        deck.learn(f"namespace-{n % 7}", f"host-{n % 10}")
    deck.look()
    assert len({portion.lane for portion in deck.asked}) == len(deck.asked) == 64
    assert all(portion.most > 0 and portion.share > 0 for portion in deck.asked)


def test_the_budget_of_new_destinations_is_shared_within_a_look() -> None:
    deck = Deck(in_flight_max=64)
    for host in ("first", "second"):
        deck.learn("new", host)
    assert sum(deck.look().values()) == deck.free // 2
