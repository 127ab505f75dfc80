"""Caps, queues and breakers: what a destination is given."""

from __future__ import annotations

from duetime.engine.destinations import BREAK_AFTER, BREAK_MS, PATIENCE_MS, PROBES, Destination, Destinations
from duetime.model import Outcome, OutcomeKind

NOW = 1_800_000_000_000
ANSWER = Outcome(kind=OutcomeKind.ANSWERED, status=500)
MISS = Outcome(kind=OutcomeKind.UNREACHABLE)


def broken() -> Destination:
    destination = Destination(10, 10)
    for _ in range(BREAK_AFTER):
        destination.note(MISS, NOW)
    return destination


def test_it_takes_its_cap_and_a_queue() -> None:
    destination = Destination(2, 2)
    assert destination.free() and destination.put_off_ms(NOW) is None
    destination.running = 2
    assert not destination.free() and destination.put_off_ms(NOW) is None
    destination.waiting.extend([None, None])  # type: ignore[list-item]
    assert destination.put_off_ms(NOW) is not None


def test_a_fast_one_may_queue_what_it_does_in_two_seconds() -> None:
    destination = Destination(2, 2)
    destination.running = 2
    for _ in range(100):
        destination.note(ANSWER, NOW)
    destination.waiting.extend([None] * 201)  # type: ignore[list-item]
    assert destination.put_off_ms(NOW) is None
    assert destination.put_off_ms(NOW + 5_000) is not None


def test_a_queue_counts_as_backlog_while_it_moves() -> None:
    destinations = Destinations(1, 10)
    destination = destinations["a"]
    destination.start(NOW)
    destinations.queue(destination, None)  # type: ignore[arg-type]
    assert destinations.backlog(NOW + PATIENCE_MS - 1) == 1
    assert destinations.backlog(NOW + PATIENCE_MS) == 0


def test_misses_in_a_row_open_the_breaker_and_answers_do_not() -> None:
    destination = Destination(10, 10)
    for _ in range(BREAK_AFTER * 3):
        assert not destination.note(ANSWER, NOW)
    opened = [destination.note(MISS, NOW) for _ in range(BREAK_AFTER)]
    assert opened == [False] * (BREAK_AFTER - 1) + [True]
    assert destination.put_off_ms(NOW) == BREAK_MS


def test_one_answer_in_between_starts_the_count_anew() -> None:
    destination = Destination(10, 10)
    for _ in range(BREAK_AFTER - 1):
        destination.note(MISS, NOW)
    destination.note(ANSWER, NOW)
    assert not destination.note(MISS, NOW)
    assert destination.put_off_ms(NOW) is None


def test_after_its_pause_a_broken_one_gets_a_few_probes() -> None:
    destination = broken()
    later = NOW + BREAK_MS
    for _ in range(PROBES):
        assert destination.put_off_ms(later) is None
        destination.running += 1
    assert destination.put_off_ms(later) is not None


def test_a_failed_probe_opens_it_again_and_an_answer_closes_it() -> None:
    destination = broken()
    later = NOW + BREAK_MS
    destination.note(MISS, later)
    assert destination.put_off_ms(later) == BREAK_MS
    destination.note(ANSWER, later)
    assert destination.put_off_ms(later) is None


def test_idle_destinations_are_forgotten_and_broken_ones_are_not() -> None:
    destinations = Destinations(4, 4)
    for _ in range(BREAK_AFTER):
        destinations["broken"].note(MISS, NOW)
    kept = destinations["broken"]
    for n in range(25_000):
        destinations[f"host-{n}"]
    assert destinations["broken"] is kept
