"""Destinations: concurrency windows, queues and circuit breakers, and which destinations are remembered."""

from __future__ import annotations

import pytest
from msgspec import Raw

from duetime.engine import destinations as module
from duetime.engine.destinations import (
    BACKOFF_MS,
    BACKOFF_MS_MAX,
    BREAK_AFTER,
    BREAK_MS,
    BREAK_MS_MAX,
    DESTINATIONS_MAX,
    FIRST_WINDOW,
    LANES_MAX,
    PROBES,
    SILENT_MS,
    SLOT_BYTES,
    STALLED_MS,
    UNQUEUED_MS,
    Destination,
    Destinations,
    Trust,
    slots_of,
)
from duetime.instants import Instant
from duetime.model import Definition, HttpTarget, Outcome, OutcomeKind, Timer, lane_of
from tests.clocks import all_at

NOW = Instant(1_800_000_000_000)
ANSWER = Outcome(kind=OutcomeKind.ANSWERED, status=500)
REFUSED = Outcome(kind=OutcomeKind.REFUSED)
MISS = Outcome(kind=OutcomeKind.UNREACHABLE)
SILENCE = Outcome(kind=OutcomeKind.TIMED_OUT)
CAP, QUEUE_MAX, IN_FLIGHT_MAX = 256, 1_000, 4_096
EVERYTHING = 1_000_000


def timer(namespace: str = "default", payload: int = 0, metadata: int = 0) -> Timer:
    definition = Definition(
        target=HttpTarget(url="http://a/"), payload=Raw(b"x" * payload), metadata=Raw(b"x" * metadata)
    )
    return Timer(namespace, "a", 0, definition, *all_at(NOW), 1, 1)


def new(cap: int = CAP, queue_max: int = QUEUE_MAX) -> Destination:
    return Destination("http://a:80", cap, queue_max)


def several(cap: int = CAP, in_flight_max: int = IN_FLIGHT_MAX) -> Destinations:
    return Destinations(cap=cap, queue_max=QUEUE_MAX, in_flight_max=in_flight_max)


def start(destination: Destination, count: int, now: Instant = NOW) -> None:
    for _ in range(count):
        destination.start(now)
        destination.running += 1


def note(destination: Destination, outcome: Outcome, count: int, now: Instant = NOW) -> list[bool]:
    return [destination.note(outcome, now) for _ in range(count)]


def broken(destination: Destination | None = None, now: Instant = NOW) -> Destination:
    destination = destination or new()
    note(destination, MISS, BREAK_AFTER, now)
    return destination


def room(destination: Destination, now: Instant = NOW) -> int:
    return destination.room(now, EVERYTHING)


# The window.


def test_a_new_destination_takes_the_first_window() -> None:
    destination = new()
    assert room(destination) == FIRST_WINDOW
    start(destination, FIRST_WINDOW - 1)
    assert destination.free(NOW)
    start(destination, 1)
    assert not destination.free(NOW) and room(destination) == 0


def test_the_cap_limits_the_first_window() -> None:
    assert room(new(cap=3)) == 3


def test_each_response_widens_the_window_by_one_up_to_the_cap() -> None:
    destination = new()
    later = NOW + 10_000  # By then, these responses allow no queue any more.
    note(destination, ANSWER, 10)
    assert room(destination, later) == FIRST_WINDOW + 10
    note(destination, REFUSED, 1)  # A refusal by the address guard counts as a response.
    assert room(destination, later) == FIRST_WINDOW + 11
    note(destination, ANSWER, CAP)
    assert room(destination, later) == CAP


def test_a_failure_does_not_widen_the_window() -> None:
    destination = new()
    note(destination, MISS, BREAK_AFTER - 1)
    assert room(destination) == FIRST_WINDOW


# The queue.


def test_queue_length_is_the_number_of_responses_in_a_second() -> None:
    destination = new(cap=2)
    start(destination, 2)
    assert not destination.takes(NOW)
    note(destination, ANSWER, 3)
    for _ in range(3):
        assert destination.takes(NOW)
        destination.waiting.append(timer())
    assert not destination.takes(NOW) and room(destination) == 0
    destination.waiting.pop()
    assert destination.takes(NOW + 1_999)
    assert not destination.takes(NOW + 2_000)


def test_the_queue_has_a_limit() -> None:
    destination = new(cap=1, queue_max=5)
    note(destination, ANSWER, 100)
    assert room(destination) == 1 + 5


def test_queue_stalls_when_no_attempt_starts_for_a_while() -> None:
    destinations = several()
    moving, standing, empty = destinations["moving"], destinations["standing"], destinations["empty"]
    for destination in (moving, standing, empty):
        start(destination, 1)
    for destination in (moving, standing):
        destinations.queue(destination, timer())
    assert destinations.stalled(NOW + STALLED_MS - 1) == []
    moving.start(NOW + 1)
    assert destinations.stalled(NOW + STALLED_MS) == [standing]
    assert destinations.queued == {moving, standing}


def test_a_stalled_destination_has_no_queue_for_a_while() -> None:
    """A destination that responds in bursts would get a queue after each, which would only be put back."""
    destination = new(cap=1)
    start(destination, 1)
    destination.stall(NOW)
    note(destination, ANSWER, 50, NOW + UNQUEUED_MS - 1)
    assert room(destination, NOW + UNQUEUED_MS - 1) == 0
    assert room(destination, NOW + UNQUEUED_MS) == 50


def test_taking_the_waiting_timers_clears_the_queue() -> None:
    destinations = several()
    destination = destinations["a"]
    waiting = [timer("a"), timer("b", payload=3 * SLOT_BYTES)]
    for each in waiting:
        destinations.queue(destination, each)
    assert destination.slots == {"a": 1, "b": 4}
    assert destinations.take_waiting(destinations.queued) == waiting
    assert not destination.held and not destination.slots and not destinations.queued
    assert destinations.take_waiting([destination]) == []


# The breaker.


def test_only_consecutive_failures_open_the_breaker() -> None:
    destination = new()
    assert not any(note(destination, ANSWER, BREAK_AFTER * 3))
    assert note(destination, MISS, 10) + note(destination, SILENCE, 10) == [False] * 19 + [True]
    assert destination.paused_until == NOW + BREAK_MS
    assert room(destination) == 0 and not destination.free(NOW) and not destination.takes(NOW)


def test_a_response_resets_the_failure_count() -> None:
    destination = new()
    note(destination, MISS, BREAK_AFTER - 1)
    note(destination, ANSWER, 1)
    assert not any(note(destination, MISS, BREAK_AFTER - 1))
    assert destination.paused_until is None


def test_attempts_in_flight_when_the_breaker_opens_do_not_prolong_the_pause() -> None:
    destination = broken()
    assert not any(note(destination, SILENCE, 200, NOW + BREAK_MS - 1))
    assert destination.paused_until == NOW + BREAK_MS


def test_after_the_pause_the_breaker_allows_a_few_probes() -> None:
    destination = broken()
    later = NOW + BREAK_MS
    assert room(destination, later - 1) == 0 and not destination.free(later - 1)
    for count in range(PROBES):
        assert destination.free(later) and room(destination, later) == PROBES - count
        start(destination, 1, later)
    assert not destination.free(later) and room(destination, later) == 0
    assert not destination.takes(later)


def test_failed_probes_together_double_the_pause_once_up_to_a_limit() -> None:
    destination = broken()
    pauses = []
    for _ in range(7):
        assert destination.paused_until is not None
        at = destination.paused_until
        start(destination, PROBES, at)
        assert not any(note(destination, MISS, PROBES, at + 30))
        destination.running -= PROBES
        pauses.append(destination.paused_until - at - 30)
    assert pauses == [2 * BREAK_MS, 4 * BREAK_MS, 8 * BREAK_MS, *[BREAK_MS_MAX] * 4]


def test_one_response_closes_the_breaker_with_a_small_window() -> None:
    destination = new()
    note(destination, ANSWER, CAP)
    broken(destination, NOW + 10_000)
    later = NOW + 60_000
    note(destination, ANSWER, 1, later)
    assert destination.paused_until is None and destination.trust(later) is Trust.PROVEN
    assert room(destination, later + 10_000) == PROBES
    note(destination, ANSWER, 3, later)
    assert room(destination, later + 10_000) == PROBES + 3


def test_a_response_resets_the_pause_of_the_breaker() -> None:
    destination = broken()
    note(destination, MISS, 1, NOW + BREAK_MS)
    note(destination, ANSWER, 1, NOW + BREAK_MS + 1)
    later = NOW + 100_000
    broken(destination, later)
    assert destination.paused_until == later + BREAK_MS


def test_local_shortages_pause_a_destination_for_longer_each_time() -> None:
    destination, now, pauses = new(), NOW, []
    for _ in range(6):
        destination.back_off(now)
        destination.back_off(now + 1)  # for the next of those that were under way
        assert destination.paused_until is not None and room(destination, now) == 0
        pauses.append(destination.paused_until - now)
        now = destination.paused_until
    assert pauses == [BACKOFF_MS, 2 * BACKOFF_MS, 4 * BACKOFF_MS, BACKOFF_MS_MAX, BACKOFF_MS_MAX, BACKOFF_MS_MAX]
    note(destination, ANSWER, 1, now)
    assert destination.paused_until is None
    destination.back_off(now)
    assert destination.paused_until == now + BACKOFF_MS


# Trust.


def test_a_new_destination_is_fresh_until_it_has_been_silent_for_a_while() -> None:
    destination = new()
    assert destination.trust(NOW + 100_000) is Trust.FRESH
    start(destination, 1)
    assert destination.trust(NOW + SILENT_MS - 1) is Trust.FRESH
    assert destination.trust(NOW + SILENT_MS) is Trust.SUSPECT


def test_a_response_makes_it_proven_and_a_failure_suspect() -> None:
    destination = new()
    note(destination, ANSWER, 1)
    assert destination.trust(NOW) is Trust.PROVEN
    note(destination, MISS, 1)
    assert destination.trust(NOW) is Trust.SUSPECT
    note(destination, ANSWER, 1)
    assert destination.trust(NOW) is Trust.PROVEN


def test_a_proven_destination_becomes_suspect_when_it_falls_silent() -> None:
    """It may hold hundreds of slots, with a timeout of an hour."""
    destination = new()
    start(destination, 2)
    note(destination, ANSWER, 1, NOW + 500)
    assert destination.trust(NOW + 500 + SILENT_MS - 1) is Trust.PROVEN
    assert destination.trust(NOW + 500 + SILENT_MS) is Trust.SUSPECT
    note(destination, ANSWER, 1, NOW + 9_000)
    assert destination.trust(NOW + 9_000) is Trust.PROVEN
    destination.running = 0
    assert destination.trust(NOW + 100_000) is Trust.PROVEN


def test_an_open_breaker_is_suspect() -> None:
    assert broken().trust(NOW + BREAK_MS) is Trust.SUSPECT
    held = new()
    held.back_off(NOW)
    assert held.trust(NOW) is Trust.SUSPECT


def test_slots_of_unproven_destinations_are_counted_by_trust_and_namespace() -> None:
    destinations = several()
    for name, namespace, outcome in (
        ("new", "a", None),
        ("dead", "a", MISS),
        ("well", "b", ANSWER),
        ("odd", "b", MISS),
    ):
        destination = destinations[name]
        for payload in (0, 2 * SLOT_BYTES):
            start(destination, 1)
            destination.enter(timer(namespace, payload))
        if outcome is not None:
            destination.note(outcome, NOW)
    destinations["odd"].running = 0  # Nothing is in flight, so its queue does not count.
    by_trust, by_namespace = destinations.unproven(NOW)
    assert by_trust == {Trust.FRESH: 4, Trust.SUSPECT: 4}
    assert by_namespace == {"a": 8}
    for payload in (0, 2 * SLOT_BYTES):
        destinations["dead"].leave(timer("a", payload))
    assert not destinations["dead"].slots


def test_a_large_payload_takes_several_slots() -> None:
    assert [slots_of(timer(payload=size)) for size in (0, SLOT_BYTES - 1, SLOT_BYTES, 10 * SLOT_BYTES)] == [1, 1, 2, 11]
    assert slots_of(timer(payload=SLOT_BYTES // 2, metadata=3 * SLOT_BYTES // 2)) == 3


# All destinations.


def test_a_destination_gets_less_room_when_fewer_slots_are_free() -> None:
    destinations = several()
    destination = destinations["a"]
    note(destination, ANSWER, CAP, NOW - 10_000)
    rooms = [destinations.room(destination, NOW, free) for free in (IN_FLIGHT_MAX, IN_FLIGHT_MAX // 2, 160, 16, 1)]
    assert rooms == [CAP, CAP // 2, 10, 1, 1]


def test_one_destination_never_gets_all_slots_even_if_there_are_few() -> None:
    destinations = several(cap=256, in_flight_max=100)
    destination = destinations["a"]
    note(destination, ANSWER, CAP, NOW - 10_000)
    free = 100
    while (takes := min(destinations.room(destination, NOW, free), free // 2)) > 0:
        start(destination, takes)
        free -= takes
    assert free >= 50


def test_limits_divide_the_room_of_a_destination_between_its_lanes() -> None:
    destinations = several()
    wide, narrow, paused = destinations["wide"], destinations["narrow"], broken(destinations["paused"])
    start(narrow, FIRST_WINDOW - 3)
    for namespace in "abcde":
        destinations.limit(narrow, namespace)
    destinations.limit(wide, "a")
    destinations.limit(paused, "a")
    limits = destinations.limits(NOW, IN_FLIGHT_MAX, lambda name: 1)
    assert [limits[lane_of(name, "narrow")] for name in "abcde"] == [1, 1, 1, 0, 0]  # no more than there is room for
    assert limits[lane_of("a", "wide")] == FIRST_WINDOW and limits[lane_of("a", "paused")] == 0
    limits = destinations.limits(NOW + BREAK_MS, IN_FLIGHT_MAX, lambda name: 1)
    assert limits[lane_of("a", "paused")] == PROBES


def test_limits_are_divided_by_weight() -> None:
    destinations = several()
    for namespace in ("light", "heavy"):
        destinations.limit(destinations["x"], namespace)
    limits = destinations.limits(NOW, IN_FLIGHT_MAX, lambda name: 3 if name == "heavy" else 1)
    assert limits[lane_of("heavy", "x")] == 3 * limits[lane_of("light", "x")] == FIRST_WINDOW * 3 // 4


def test_limits_are_dropped_when_nothing_is_held_back_and_there_is_room() -> None:
    destinations = several()
    behind, full, well = destinations["behind"], destinations["full"], destinations["well"]
    for destination in (behind, full, well):
        destinations.limit(destination, "default")
    behind.fall_behind()
    start(full, FIRST_WINDOW)
    destinations.relax(NOW, IN_FLIGHT_MAX, 16)
    assert set(destinations.limited) == {behind, full}
    full.running = 0
    behind.behind = False
    destinations.relax(NOW, IN_FLIGHT_MAX, 16)
    assert not destinations.limited


def test_limits_of_an_unused_broken_destination_are_dropped_eventually() -> None:
    destinations = several()
    destination = broken(destinations["a"])
    destinations.limit(destination, "default")
    paused_until = destination.paused_until
    assert paused_until is not None
    destinations.relax(paused_until + BREAK_MS_MAX - 1, IN_FLIGHT_MAX, 16)
    assert destination in destinations.limited
    destinations.relax(paused_until + BREAK_MS_MAX, IN_FLIGHT_MAX, 16)
    assert not destinations.limited


def test_a_destination_remembers_a_limited_number_of_lanes() -> None:
    destinations = several()
    destination = destinations["a"]
    for n in range(LANES_MAX + 10):
        destinations.limit(destination, f"namespace-{n}")
    assert len(destination.lanes) == LANES_MAX
    assert list(destination.lanes.values())[-1] == f"namespace-{LANES_MAX + 9}"


def test_a_destination_that_is_behind_gets_more_when_half_is_done() -> None:
    destination = new()
    start(destination, 9)
    destination.waiting.append(timer())
    destination.fall_behind()
    assert destination.behind and destination.low == 5


def test_only_idle_destinations_are_forgotten() -> None:
    destinations = several()
    open_, busy, limited = broken(destinations["open"]), destinations["busy"], destinations["limited"]
    start(busy, 1)
    destinations.limit(limited, "default")
    for n in range(2 * DESTINATIONS_MAX + 500):
        destinations[f"host-{n}"]
    assert destinations.get("open") is open_
    assert destinations.get("busy") is busy
    assert destinations.get("limited") is limited
    assert destinations.get("host-0") is None


@pytest.mark.parametrize("trouble", [broken, lambda d: d.back_off(NOW), lambda d: d.fall_behind()])
def test_the_number_of_destinations_is_limited_even_if_all_are_in_trouble(
    trouble: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DESTINATIONS_MAX", 100)
    destinations = several()
    busy = destinations["busy"]
    start(busy, 1)
    for n in range(1_000):
        destination = destinations[f"host-{n}"]
        trouble(destination)  # type: ignore[operator]
        destinations.limit(destination, "default")
        assert len(destinations._known) <= 100 and len(destinations.limited) <= 100
    assert destinations.get("busy") is busy


def test_of_too_many_broken_destinations_those_with_the_longest_pause_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DESTINATIONS_MAX", 100)
    destinations = several()
    for n in range(100):
        long_ago = n % 3 == 0
        broken(destinations[f"host-{n}"], NOW - BREAK_MS if long_ago else NOW + n)
        destinations.limit(destinations[f"host-{n}"], "default")
    busy = destinations.get("host-0")
    assert busy is not None
    start(busy, 1)
    destinations["new"]
    known = {n for n in range(100) if destinations.get(f"host-{n}")}
    longest = [n for n in range(99, -1, -1) if n % 3][:49]
    assert known == {0, *longest}
    assert {d.name for d in destinations.limited} == {f"host-{n}" for n in known}


def test_new_destinations_are_cheap_however_many_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESTINATIONS_MAX", 100)
    destinations = several()
    cleanings = 0
    forget = Destinations._forget

    def counted(self: Destinations) -> None:
        nonlocal cleanings
        cleanings += 1
        forget(self)

    monkeypatch.setattr(Destinations, "_forget", counted)
    for n in range(5_000):
        start(destinations[f"busy-{n}"], 1)
    assert cleanings <= 10
    assert all(destinations.get(f"busy-{n}") for n in range(5_000))
    for n in range(5_000):
        destinations[f"busy-{n}"].running = 0
    for n in range(10_000):
        destinations[f"host-{n}"]
    assert len(destinations._known) <= 100
