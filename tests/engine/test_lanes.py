"""Who gets how much of a look: lanes, weights and the limits that leave something for the next that comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from duetime.engine import lanes as module
from duetime.engine.destinations import BREAK_AFTER, FIRST_WINDOW, PROBES, SILENT_MS, Destination, Destinations
from duetime.engine.lanes import (
    CLOSED_WAIT_MS,
    LANES_PER_WAIT,
    PORTIONS_MAX,
    SHORT_WAIT_MS,
    UNANSWERED_MAX,
    UNANSWERED_WAIT_MS,
    Lanes,
)
from duetime.model import Definition, HttpTarget, Outcome, OutcomeKind, Timer, destination_of
from duetime.store import Begun, Lane, Portion

NOW = 1_800_000_000_000
CAP, IN_FLIGHT_MAX, LIMIT = 256, 4_096, 500
ANSWER = Outcome(kind=OutcomeKind.ANSWERED, status=200)
MISS = Outcome(kind=OutcomeKind.UNREACHABLE)


def timer(namespace: str, host: str, fire_at: int = NOW) -> Timer:
    return Timer(namespace, "a", 0, Definition(target=HttpTarget(url=f"http://{host}/")), NOW, fire_at, NOW, NOW, 1, 1)


class Deck:
    """Lanes that have timers due, and what each look takes of them."""

    def __init__(self, *, in_flight_max: int = IN_FLIGHT_MAX, weights: Mapping[str, int] | None = None) -> None:
        self.lanes = Lanes()
        self.destinations = Destinations(cap=CAP, queue_max=1_000, in_flight_max=in_flight_max)
        self.free = in_flight_max
        self.in_flight: Counter[str] = Counter()
        self.weights = weights or {}
        self.next_at: int | None = None
        self.asked: list[Portion] = []

    def learn(self, namespace: str, host: str, fire_at: int = NOW) -> int:
        made = timer(namespace, host, fire_at)
        self.lanes.learn_timer(made)
        return made.lane

    def destination(self, host: str) -> Destination:
        return self.destinations[destination_of(HttpTarget(url=f"http://{host}/"))]

    def proven(self, *hosts: str, answers: int = CAP) -> None:
        """These answer, and have nothing in their queues."""
        for host in hosts:
            for _ in range(answers):
                self.destination(host).note(ANSWER, NOW - 10_000)

    def broken(self, host: str, at: int = NOW) -> Destination:
        for _ in range(BREAK_AFTER):
            self.destination(host).note(MISS, at)
        return self.destination(host)

    def busy(self, namespace: str, host: str, count: int, at: int = NOW) -> None:
        """So many attempts are under way."""
        destination = self.destination(host)
        for _ in range(count):
            destination.start(at)
            destination.running += 1
            destination.enter(timer(namespace, host))
        self.in_flight[namespace] += count
        self.free -= count

    def look(self, now: int = NOW, limit: int = LIMIT) -> dict[int, int]:
        """How much a look may take, by lane."""
        self.asked, self.next_at = self.lanes.portions(
            self.destinations,
            now=now,
            limit=limit,
            free=self.free,
            in_flight=self.in_flight,
            weight=lambda name: self.weights.get(name, 1),
        )
        return {portion.lane: portion.most for portion in self.asked}

    def begun(self, left: Mapping[int, int] | None = None, *timers: Timer, now: int = NOW) -> set[str]:
        return self.lanes.begun(self.asked, Begun(list(timers), None, lanes=dict(left or {})), now)


# What is known.


def test_at_first_the_oldest_are_taken() -> None:
    assert not Lanes().active


def test_a_lane_is_asked_for_when_it_is_due_and_forgotten_when_it_is_empty() -> None:
    deck = Deck()
    lane = deck.learn("default", "a", NOW + 50)
    assert deck.look() == {} and deck.next_at == NOW + 50
    assert lane in deck.look(NOW + 50)
    deck.begun({lane: NOW + 900}, now=NOW + 50)
    assert deck.look(NOW + 60) == {} and deck.next_at == NOW + 900
    assert lane in deck.look(NOW + 900)
    deck.begun({}, now=NOW + 900)
    assert deck.look(NOW + 100_000) == {} and deck.next_at is None


def test_a_survey_does_not_put_off_what_is_known() -> None:
    deck = Deck()
    lane = deck.learn("default", "a", NOW)
    deck.lanes.learn_all([Lane(lane, "default", "http://a:80", NOW + 5_000)])
    assert lane in deck.look()


def test_what_is_learned_during_a_look_is_not_lost() -> None:
    """The look may have read its lane just before the timer was written."""
    deck = Deck()
    lane = deck.learn("default", "a")
    deck.look()
    deck.learn("default", "a", NOW + 20)
    deck.learn("default", "a", NOW + 10)
    deck.begun({})
    assert deck.look(NOW + 9) == {} and deck.next_at == NOW + 10
    assert lane in deck.look(NOW + 10)


def test_what_was_learned_before_a_look_is_gone_with_it() -> None:
    deck = Deck()
    deck.learn("default", "a")
    deck.look()
    deck.begun({})
    assert deck.look(NOW + 1) == {}


def test_the_earlier_of_what_is_left_and_what_was_learned_counts() -> None:
    deck = Deck()
    lane = deck.learn("default", "a")
    deck.look()
    deck.learn("default", "a", NOW + 500)
    deck.begun({lane: NOW + 300})
    assert deck.look(NOW + 1) == {} and deck.next_at == NOW + 300


def test_the_number_of_known_lanes_is_limited_and_a_new_one_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_MAX", 10)
    deck = Deck()
    for n in range(50):
        deck.learn("default", f"host-{n}")
    newest = deck.learn("other", "new")
    assert len(deck.lanes._known) == 10
    assert newest in deck.look()


def test_the_end_says_what_is_due_and_forgets_everything() -> None:
    deck = Deck()
    deck.learn("default", "a")
    deck.learn("default", "b", NOW + 1)
    deck.lanes.active = True
    assert deck.lanes.end(NOW) == [("default", "http://a:80")]
    assert not deck.lanes.active and not deck.lanes._known
    assert deck.look(NOW + 100_000) == {}


def test_a_look_that_outlasts_the_end_brings_nothing_back() -> None:
    deck = Deck()
    lane = deck.learn("default", "a")
    deck.look()
    deck.lanes.end(NOW)
    deck.begun({lane: NOW}, timer("default", "a"))
    assert not deck.lanes._known


def test_destinations_with_more_due_are_named() -> None:
    deck = Deck()
    more, later, done = (deck.learn("default", host) for host in ("more", "later", "done"))
    full = deck.learn("default", "full")
    deck.proven("full")
    deck.busy("default", "full", CAP)
    assert set(deck.look()) == {more, later, done}
    assert full not in deck.look()
    assert deck.begun({more: NOW, later: NOW + 1}) == {"http://more:80", "http://full:80"}


# How many lanes.


def test_a_look_takes_from_a_limited_number_of_lanes_and_the_others_are_next() -> None:
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


def test_a_look_goes_through_a_limited_number_of_lanes_and_the_others_are_next(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_who_was_served_least_for_its_weight_is_first() -> None:
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


def test_a_destination_is_shared_by_its_namespaces_by_weight() -> None:
    deck = Deck(weights={"a": 1, "b": 3})
    deck.proven("x")
    a, b = deck.learn("a", "x"), deck.learn("b", "x")
    looked = deck.look()
    assert looked[b] == 3 * looked[a] == CAP * 3 // 4


def test_namespaces_together_get_no_more_than_a_destination_has_room_for() -> None:
    deck = Deck()
    deck.proven("x")
    for n in range(50):
        deck.learn(f"namespace-{n}", "x")
    deck.busy("default", "x", CAP - 7)
    deck.free = IN_FLIGHT_MAX
    assert sum(deck.look().values()) == 7
    assert deck.destination("x").behind
    assert deck.begun({}) == {"http://x:80"}, "the others have timers due"


def test_a_namespace_has_no_more_under_way_than_is_free_for_its_weight() -> None:
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


def test_one_slot_is_for_the_lightest_however_heavy_the_others_are() -> None:
    deck = Deck(in_flight_max=100, weights={"heavy": 1_000})
    deck.proven("x", "y")
    deck.learn("heavy", "x")
    light = deck.learn("light", "y")
    assert deck.look()[light] == 1


# Destinations that do not answer.


def test_a_look_starts_few_attempts_to_destinations_that_have_not_answered() -> None:
    deck = Deck()
    for n in range(200):
        deck.learn("default", f"new-{n}")
    looked = deck.look()
    assert sum(looked.values()) == UNANSWERED_MAX and set(looked.values()) == {1}
    assert deck.next_at == NOW + SHORT_WAIT_MS
    second = deck.look(NOW + SHORT_WAIT_MS)
    assert len(second) == UNANSWERED_MAX and not second.keys() & looked.keys()


def test_new_destinations_have_as_much_as_is_free() -> None:
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


def test_destinations_that_do_not_answer_have_half_of_what_is_free_together() -> None:
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


def test_a_destination_with_nothing_under_way_may_be_tried_even_if_others_hang() -> None:
    """Otherwise one that failed once, or is back, could not show that it answers while others hang for an hour."""
    deck = Deck(in_flight_max=300)
    deck.destination("other").note(MISS, NOW)
    deck.busy("default", "other", 150)
    deck.destination("flaky").note(MISS, NOW)
    flaky, new = deck.learn("default", "flaky"), deck.learn("default", "new")
    hanging = deck.learn("default", "other")
    looked = deck.look()
    assert looked == {flaky: 1, new: 1}
    assert hanging not in looked


def test_what_hangs_does_not_use_up_the_part_of_those_that_answer_in_the_same_namespace() -> None:
    deck = Deck(in_flight_max=300)
    deck.busy("default", "hanging", 200, at=NOW - SILENT_MS)
    deck.proven("well")
    well = deck.learn("default", "well")
    assert deck.look()[well] > 0


def test_one_namespace_has_half_of_what_is_free_under_way_to_those_that_do_not_answer() -> None:
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


# When to ask again.


def test_a_proven_destination_without_room_says_when_it_has_some() -> None:
    deck = Deck()
    deck.proven("x")
    deck.busy("default", "x", CAP)
    lane = deck.learn("default", "x")
    assert deck.look() == {} and deck.next_at is None
    assert deck.destination("x").behind and deck.destination("x").low == CAP // 2
    deck.destination("x").running = CAP // 2
    assert lane in deck.look()


def test_a_lane_of_a_destination_that_is_silent_and_full_is_passed_over_for_a_while() -> None:
    deck = Deck()
    deck.busy("default", "x", FIRST_WINDOW, at=NOW - 5_000)
    lane = deck.learn("default", "x")
    assert deck.look() == {} and deck.next_at == NOW + UNANSWERED_WAIT_MS
    deck.destination("x").running = 0
    assert deck.look(NOW + 50) == {} and deck.next_at == NOW + UNANSWERED_WAIT_MS
    assert lane in deck.look(NOW + UNANSWERED_WAIT_MS)


def test_a_lane_of_a_broken_destination_is_passed_over_until_its_pause_is_over_or_for_a_second() -> None:
    deck = Deck()
    destination = deck.broken("x", at=NOW + 30)
    lane = deck.learn("default", "x")
    assert deck.look(NOW + 30) == {}
    assert deck.next_at == NOW + CLOSED_WAIT_MS + UNANSWERED_WAIT_MS
    assert destination.opens_at is not None
    shortly = destination.opens_at - 10
    assert deck.look(shortly) == {}
    assert deck.next_at is not None and destination.opens_at <= deck.next_at < destination.opens_at + UNANSWERED_WAIT_MS
    assert deck.look(deck.next_at)[lane] == PROBES


def test_lanes_that_wait_do_so_together() -> None:
    """Each in its own rhythm, a thousand of them would need a look every few milliseconds."""
    deck = Deck()
    for n in range(300):
        deck.broken(f"x-{n}", at=NOW + n)
        deck.learn("default", f"x-{n}", NOW + n)
    looks, now = 0, NOW + 300
    while now < NOW + 3_300:
        assert deck.look(now) == {} and deck.next_at is not None
        looks, now = looks + 1, max(now + 1, deck.next_at)
    assert looks <= 3 * 1_000 / UNANSWERED_WAIT_MS + 1


def test_many_lanes_wait_longer() -> None:
    deck = Deck()
    for n in range(2 * LANES_PER_WAIT):
        deck.learn("default", f"new-{n}")
    deck.look()
    waits = [known.ready_at - NOW for known in deck.lanes._known.values() if known.ready_at]
    assert min(waits) > SHORT_WAIT_MS


def test_nothing_is_asked_for_twice() -> None:
    deck = Deck()
    deck.proven(*(f"host-{n}" for n in range(10)))
    for n in range(100):
        deck.learn(f"namespace-{n % 7}", f"host-{n % 10}")
    deck.look()
    assert len({portion.lane for portion in deck.asked}) == len(deck.asked) == 64
    assert all(portion.most > 0 and portion.share > 0 for portion in deck.asked)


def test_what_a_look_gives_to_one_new_destination_counts_for_the_next() -> None:
    deck = Deck(in_flight_max=64)
    for host in ("first", "second"):
        deck.learn("new", host)
    assert sum(deck.look().values()) == deck.free // 2
