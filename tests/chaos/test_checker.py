"""The checker finds each kind of violation, and none in a correct history."""

from __future__ import annotations

import pytest

from tests.chaos.checker import KINDS, judge
from tests.chaos.lateness import Lateness, Whose
from tests.chaos.ledger import Asked, Callback, Fault, Ledger, Promise, Said

MS = 1_000_000


def asked(said: Said = Said.YES, from_ms: float = 0, to_ms: float = 1, at_ms: int | None = None) -> Asked:
    return Asked(said, int(from_ms * MS), int(to_ms * MS), at_ms)


def created(said: Said = Said.YES, at_ms: int = 1000) -> Asked:
    return asked(said, at_ms=at_ms)


def promise(*, said: Said = Said.YES, firings: int = 1, **changes: list[Asked]) -> Promise:
    return Promise("a", 5, created(said), firings=firings, **changes)


def got(
    received_ms: float = 1001, *, at_ms: int = 1000, webhook_id: str = "w", attempt: int = 1, next_ms: int | None = None
) -> Callback:
    received_ns = int(received_ms * MS)
    return Callback("a", at_ms, webhook_id, attempt, received_ns, received_ns + 10 * MS, next_ms)


def moved(said: Said = Said.YES) -> list[Asked]:
    return [asked(said, 990, 1010, at_ms=3000)]


def canceled(said: Said = Said.YES) -> list[Asked]:
    return [asked(said, 990, 1010)]


HIT = Fault("kill", 2000 * MS, 2100 * MS, in_flight=frozenset({"a"}))
MISSED = Fault("kill", 2000 * MS, 2100 * MS, in_flight=frozenset({"b"}))
AWAY = Fault("postgres", 2000 * MS, 4000 * MS, in_flight=None)


@pytest.mark.parametrize(
    ("promised", "callbacks", "faults", "kind"),
    [
        (promise(), [got()], [], None),
        (promise(), [], [], "lost"),
        (promise(said=Said.NO), [], [], None),
        (promise(said=Said.NOTHING), [], [], None),
        (promise(said=Said.NOTHING), [got()], [], None),
        (promise(), [got(1000)], [], None),
        (promise(), [got(999.999)], [], "early"),
        (promise(said=Said.NOTHING), [got(999)], [], "early"),
        # Cancels.
        (promise(cancels=canceled()), [], [], None),
        (promise(cancels=canceled()), [got()], [], "after cancel"),
        (promise(cancels=canceled()), [got(5000, attempt=2)], [HIT], "after cancel"),
        (promise(cancels=[asked(Said.YES, 1500, 1510)]), [got()], [], "after cancel"),
        (promise(cancels=[asked(Said.YES, 2500, 2510)]), [got()], [HIT], None),
        (promise(cancels=[asked(Said.YES, 1500, 1510)]), [got()], [HIT], "after cancel"),
        (promise(cancels=canceled(Said.NO)), [got()], [], None),
        (promise(cancels=canceled(Said.NO)), [], [], "lost"),
        (promise(cancels=canceled(Said.NOTHING)), [], [], None),
        (promise(cancels=canceled(Said.NOTHING)), [got()], [], None),
        (promise(cancels=canceled(Said.NO) + canceled()), [], [], None),
        (promise(cancels=canceled(Said.NO) + canceled()), [got()], [], "after cancel"),
        # Updates.
        (promise(updates=moved()), [got(3000, at_ms=3000)], [], None),
        (promise(updates=moved()), [got()], [], "moved"),
        (promise(updates=moved()), [got(2999, at_ms=3000)], [], "early"),
        (promise(updates=moved()), [], [], "lost"),
        (promise(updates=moved(Said.NO)), [got()], [], None),
        (promise(updates=moved(Said.NO)), [got(3001, at_ms=3000)], [], "moved"),
        (promise(updates=moved(Said.NOTHING)), [got()], [], None),
        (promise(updates=moved(Said.NOTHING)), [got(3001, at_ms=3000)], [], None),
        (promise(), [got(4001, at_ms=4000)], [], "moved"),
        # Ids.
        (promise(), [got(webhook_id="v"), got(9000, webhook_id="w", attempt=2)], [HIT], "ids"),
        # Twice.
        (promise(), [got(), got(1500)], [], "twice"),
        (promise(), [got(), got(9000, attempt=2)], [HIT], None),
        (promise(), [got(), got(1500, attempt=2)], [HIT], "twice"),
        (promise(), [got(), got(9000, attempt=2)], [MISSED], "twice"),
        (promise(), [got(1500), got(9000, attempt=2)], [AWAY], None),
        (promise(), [got(3900), got(9000, attempt=2)], [AWAY], None),
        (promise(), [got(4100), got(9000, attempt=2)], [AWAY], "twice"),
        (promise(), [got(1001), got(1900, attempt=2)], [AWAY], "twice"),
        # The receiver's response names another time.
        (promise(firings=2), [got(next_ms=2000), got(2005, at_ms=2001, webhook_id="v")], [], None),
        (promise(firings=2), [got(next_ms=2000)], [], "lost"),
        (promise(firings=2), [got(next_ms=2000), got(2005, at_ms=1999, webhook_id="v")], [], "moved"),
        (promise(firings=2), [got(next_ms=2000), got(1999, at_ms=2000, webhook_id="v")], [], "early"),
    ],
)
def test_checker_finds_the_violation_of_a_timer(
    promised: Promise, callbacks: list[Callback], faults: list[Fault], kind: str | None
) -> None:
    verdict = judge(Ledger({"a": promised}, callbacks, faults))
    assert dict(verdict.found) == ({} if kind is None else {kind: 1}), verdict.violations
    assert len(verdict.violations) == (kind is not None)
    assert kind is None or kind in KINDS


def test_two_firings_with_one_delivery_id() -> None:
    callbacks = [got(next_ms=2000), got(2005, at_ms=2000)]
    found = judge(Ledger({"a": promise(firings=2)}, callbacks)).found
    assert found["ids"] == 1


def test_callback_for_an_unknown_timer_is_a_violation() -> None:
    assert judge(Ledger({}, [got()])).found == {"unasked": 1}


@pytest.mark.parametrize(
    ("faults", "given_up", "lost"), [([HIT] * 3, True, False), ([HIT] * 2, True, True), ([HIT] * 3, False, True)]
)
def test_a_timer_failed_after_three_faults_does_not_count_as_lost(
    faults: list[Fault], given_up: bool, lost: bool
) -> None:
    verdict = judge(Ledger({"a": promise()}, [], faults, given_up={"a"} if given_up else set()))
    assert verdict.found["lost"] == lost
    assert verdict.given_up == (not lost)


def test_invalid_response_is_a_violation() -> None:
    assert judge(Ledger(odd=["create was answered with 500"])).found == {"answers": 1}


def test_report_counts_promises_and_callbacks() -> None:
    ledger = Ledger({"a": promise(updates=moved())}, [got(3000, at_ms=3000), got(9000, at_ms=3000, attempt=2)], [HIT])
    ledger.add([Promise("b", 1, created(), cancels=canceled()), Promise("c", 1, created(Said.NO))])
    ledger.faults.append(Fault("stop", 3000 * MS, 3000 * MS, frozenset({"a"})))
    verdict = judge(ledger)
    counts = verdict.acknowledged, verdict.canceled, verdict.updated, verdict.received, verdict.duplicates
    assert counts == (2, 1, 1, 2, 1)
    assert not verdict.violations


def test_lateness_is_separated_by_affected_shards() -> None:
    fault = Fault("kill", 900 * MS, 1000 * MS, shards=frozenset({5}))
    promises = {id: Promise(id, shard, created()) for id, shard in (("a", 5), ("b", 6), ("c", 5), ("d", 5))}
    callbacks = [
        got(4000),
        Callback("b", 1000, "b", 1, 1020 * MS, 1020 * MS),
        Callback("c", 1000, "c", 2, 9000 * MS, 9000 * MS),  # its first attempt was lost: it waits for the deadline
        Callback("d", 1000, "d", 1, 5000 * MS, 5000 * MS),
        Callback("d", 1000, "d", 2, 9000 * MS, 9000 * MS),  # a duplicate is not late
    ]
    promises["d"].created = asked(from_ms=0, to_ms=4990, at_ms=1000)  # written long after it was due
    lateness = Lateness(Ledger(promises, callbacks))
    window = {"from_ns": 900 * MS, "until_ns": 6000 * MS}
    assert lateness.of(fault, whose=Whose.HIT, **window).seconds == 3.0
    assert lateness.of(fault, whose=Whose.HIT, **window).timers == 2
    assert lateness.of(fault, whose=Whose.HIT, since_ns=3500 * MS, **window).seconds == 0.5
    stricken = Fault("kill", 900 * MS, 1000 * MS, frozenset({"c"}), frozenset({5}), coming=frozenset({6}))
    assert lateness.of(stricken, whose=Whose.IN_FLIGHT, **window).seconds == 8.0
    assert lateness.of(stricken, whose=Whose.COMING, **window).seconds == 0.02
    assert lateness.of(fault, whose=Whose.OTHERS, **window).seconds == 0.02
    assert lateness.of(fault, whose=Whose.OTHERS, from_ns=0, until_ns=900 * MS).timers == 0
