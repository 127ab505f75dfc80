"""Lanes: the timers of one namespace for one destination, which are begun, listed and counted separately."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from duetime import lifecycle
from duetime.model import Definition, HttpTarget, NatsTarget, Status, Target, Timer, destination_of, lane_of
from duetime.store import Lane, Overdue, Portion, Store
from duetime.stores.postgres.store import PostgresStore
from tests.clocks import START, ManualClock
from tests.contract.stores import Opened, Reopen
from tests.contract.timers import (
    ALICE,
    BOB,
    BROKEN,
    EVERYTHING,
    completed,
    everything,
    holding,
    ids,
    switch,
    timer,
    with_namespace,
    with_timers,
)

A, B, C, D, E = "a.example", "b.example", "c.example", "d.example", "e.example"


def origin(host: str) -> str:
    return f"https://{host}:443"


def lane(host: str, namespace: str = "default") -> int:
    return lane_of(namespace, origin(host))


def definition(host: str, **changes: Any) -> Definition:
    return Definition(target=HttpTarget(url=f"https://{host}/due"), **changes)


def one(host: str, id: str = "", *, at: int = START, **changes: Any) -> Timer:
    """A timer in the lane of this host."""
    return timer(id or host, at=at, **({"definition": definition(host)} | changes))


def several(host: str, number: int, *, at: int = START - 100, step_ms: int = 1, **changes: Any) -> list[Timer]:
    """Timers of one lane, one after another in time, round robin over the shards."""
    return [one(host, f"{host} {n}", at=at + n * step_ms, **{"shard": n % 8} | changes) for n in range(number)]


def first_ids(host: str, number: int) -> list[str]:
    return [f"{host} {n}" for n in range(number)]


def begun_of(timers: Sequence[Timer]) -> Counter[int]:
    """The number of begun timers per lane."""
    return Counter(timer.lane for timer in timers)


async def left_in(store: Store, *lanes: int) -> dict[int, int]:
    """The earliest pending timer of each of these lanes, if any."""
    left: dict[int, int] = {}
    for each in (await everything(store)).values():
        if each.status is Status.PENDING and each.lane in lanes:
            left[each.lane] = min(each.fire_at, left.get(each.lane, each.fire_at))
    return left


# begin: the limit per lane.


async def test_begin_takes_the_oldest_within_the_limit_per_lane(store: Store) -> None:
    await with_timers(store, *several(A, 10), *several(B, 3, at=START - 50))
    held = await holding(store)
    begun = await store.begin(ALICE, held, 10, lane_max=4)
    assert ids(begun.timers) == first_ids(A, 4) + first_ids(B, 3)
    assert (begun.more, begun.next_at) == (False, None), "timers beyond the limit of their lane do not count as more"
    assert ids((await store.begin(ALICE, held, 10, lane_max=4)).timers) == [f"{A} {n}" for n in range(4, 8)]


async def test_lane_can_have_a_limit_of_its_own(store: Store) -> None:
    await with_timers(store, *several(A, 10), *several(B, 10), *several(C, 10))
    limits = {lane(A): 6, lane(B): 0, lane("elsewhere"): 9}
    begun = (await store.begin(ALICE, await holding(store), EVERYTHING, lane_max=2, lane_limits=limits)).timers
    assert begun_of(begun) == {lane(A): 6, lane(C): 2}
    assert begun == sorted(begun, key=lambda t: t.fire_at)


async def test_lanes_differ_by_namespace_scheme_host_and_port(store: Store) -> None:
    await with_namespace(store, "elsewhere")
    urls = ["https://h", "https://h:443/x", "https://h:444", "http://h:443", "https://i"]
    targets: list[Target] = [*(HttpTarget(url=url) for url in urls), NatsTarget(subject="a"), NatsTarget(subject="b")]
    timers = [
        timer(f"{n}", namespace=namespace, definition=Definition(target=target))
        for namespace in ("default", "elsewhere")
        for n, target in enumerate(targets)
    ]
    await with_timers(store, *timers)
    begun = (await store.begin(ALICE, await holding(store), EVERYTHING, lane_max=1)).timers
    assert len(begun) == 2 * 5
    assert len({t.lane for t in begun}) == 2 * 5


async def test_begin_reports_whether_more_is_due(store: Store) -> None:
    await with_timers(store, *several(A, 5), one(B, at=START + 9))
    held = await holding(store)
    for limit, number, more in ((3, 3, True), (3, 2, False), (3, 0, False)):
        begun = await store.begin(ALICE, held, limit)
        assert (len(begun.timers), begun.more) == (number, more)
        assert begun.next_at == (START if more else START + 9)


async def test_begin_reports_more_if_both_limits_are_reached(store: Store) -> None:
    await with_timers(store, *several(A, 5), *several(B, 5, at=START - 50))
    begun = await store.begin(ALICE, await holding(store), 3, lane_max=2)
    assert begun_of(begun.timers) == {lane(A): 2, lane(B): 1}
    assert (begun.more, begun.next_at) == (True, START)


async def test_paused_timers_do_not_count_as_more(store: Store) -> None:
    await with_namespace(store, "paused", paused=True)
    await with_timers(store, *several(A, 5, namespace="paused"), one(A))
    begun = await store.begin(ALICE, await holding(store), 5)
    assert (ids(begun.timers), begun.more, begun.next_at) == ([A], False, None)


async def test_begin_reports_more_if_held_back_timers_fill_what_it_reads(store: Store) -> None:
    await with_namespace(store, "paused", paused=True)
    await with_timers(store, *several(A, 1_500, at=START - 9_000, namespace="paused"), one(B))
    held = await holding(store)
    begun = await store.begin(ALICE, held, 5)
    assert begun.timers or begun.more
    found = begun.timers or (await store.begin_lanes(ALICE, held, 5, [Portion(lane(B), 5)])).timers
    assert ids(found) == [B]


# begin_lanes: which timers are begun.


async def test_begin_lanes_takes_only_the_oldest_of_each_requested_lane(store: Store) -> None:
    await with_timers(store, *several(A, 10), *several(B, 10, step_ms=2), *several(C, 10, at=START - 900))
    held = await holding(store)
    begun = (await store.begin_lanes(ALICE, held, EVERYTHING, [Portion(lane(A), 3), Portion(lane(B), 4)])).timers
    assert [t.id for t in begun if t.lane == lane(A)] == first_ids(A, 3)
    assert [t.id for t in begun if t.lane == lane(B)] == first_ids(B, 4)
    assert begun_of(begun) == {lane(A): 3, lane(B): 4}
    assert begun == sorted(begun, key=lambda t: t.fire_at)


async def test_timer_begun_by_lane_equals_lifecycle_begin_and_is_stored(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    fresh, retried = one(A, shard=3), one(B, "retried", shard=5, fire_at=START, attempt=2, failures=1, started_at=START)
    await with_timers(store, fresh, retried)
    clock.advance(40)
    begun = await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5), Portion(lane(B), 5)])
    expected = {t.id: lifecycle.begin(t, now=START + 40, version=held[t.shard]) for t in (fresh, retried)}
    assert {t.id: t for t in begun.timers} == expected
    assert {id: t for (_, id), t in (await everything(store)).items()} == expected
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.EXECUTING: 2}
    assert await store.record(ALICE, [(t, completed(t)) for t in begun.timers]) == [True, True]


async def test_begin_lanes_begins_no_timer_early(store: Store, clock: ManualClock) -> None:
    await with_timers(store, one(A, at=START + 1), one(A, "later", at=START + 2))
    held = await holding(store)
    for id in (A, "later"):
        begun = await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])
        assert (begun.timers, begun.lanes) == ([], {lane(A): clock.now() + 1})
        clock.advance(1)
        assert ids((await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])).timers) == [id]


async def test_begin_lanes_skips_a_namespace_paused_after_lanes_were_listed(store: Store) -> None:
    namespace = await with_namespace(store, "elsewhere")
    await with_timers(
        store, *several(A, 5, namespace="elsewhere"), one(A, "ahead", at=START + 5, namespace="elsewhere")
    )
    await with_timers(store, *several(A, 5))
    held = await holding(store)
    portions = [Portion(found.lane, 3) for found in (await store.lanes(START)).lanes]
    assert {portion.lane for portion in portions} == {lane(A), lane(A, "elsewhere")}
    namespace = await switch(store, namespace, paused=True)
    begun = await store.begin_lanes(ALICE, held, EVERYTHING, portions)
    assert begun_of(begun.timers) == {lane(A): 3}
    assert begun.lanes == {lane(A): START - 97}
    await switch(store, namespace, paused=False)
    begun = await store.begin_lanes(ALICE, held, EVERYTHING, portions)
    assert begun_of(begun.timers) == {lane(A): 2, lane(A, "elsewhere"): 3}


async def test_begin_lanes_takes_only_from_held_shards(store: Store) -> None:
    await with_timers(store, *several(A, 16))
    await with_timers(store, one(A, "ahead", at=START + 7, shard=0), one(A, "ahead, mine", at=START + 9, shard=3))
    held = await holding(store, ALICE, 3, 5)
    others = await holding(store, BOB, 0, 1)
    begun = await store.begin_lanes(ALICE, held, EVERYTHING, [Portion(lane(A), 50)])
    assert ids(begun.timers) == [f"{A} {n}" for n in (3, 5, 11, 13)]
    assert begun.lanes == {lane(A): START + 9}
    assert begun.refused == frozenset()
    # Only the requested shards, although more are held; a shard of another owner is refused.
    begun = await store.begin_lanes(BOB, {1: others[1], 5: held[5]}, EVERYTHING, [Portion(lane(A), 50)])
    assert ids(begun.timers) == [f"{A} {n}" for n in (1, 9)]
    assert (begun.refused, begun.lanes) == (frozenset({5}), {})


async def test_timers_of_refused_shards_do_not_hide_others_in_their_lane(store: Store) -> None:
    await with_timers(store, *several(A, 50, shard=0), one(A, "mine", shard=1))
    held = await holding(store, ALICE, 1)
    begun = await store.begin_lanes(ALICE, held | {0: 7}, 3, [Portion(lane(A), 3)])
    assert (ids(begun.timers), begun.refused) == (["mine"], frozenset({0}))


async def test_empty_lane_does_not_affect_others(store: Store) -> None:
    await with_timers(store, *several(A, 5))
    portions = [Portion(lane(B), 5), Portion(lane(A), 2), Portion(lane_of("nowhere", "nats"), 5)]
    begun = await store.begin_lanes(ALICE, await holding(store), EVERYTHING, portions)
    assert (ids(begun.timers), begun.lanes) == (first_ids(A, 2), {lane(A): START - 98})


# begin_lanes: the share of each lane.


@pytest.mark.parametrize(
    ("shares", "limit"),
    [((1, 3), 40), ((1, 1), 41), ((1, 1, 2), 30), ((0.25, 2.5), 22), ((1, 100), 30), ((1, 1, 1), 2)],
    ids=str,
)
async def test_scarce_limit_is_divided_by_share(store: Store, shares: tuple[float, ...], limit: int) -> None:
    hosts = [A, B, C][: len(shares)]
    for host in hosts:
        await with_timers(store, *several(host, 50))
    portions = [Portion(lane(host), 50, share) for host, share in zip(hosts, shares, strict=True)]
    begun = await store.begin_lanes(ALICE, await holding(store), limit, portions)
    counts = begun_of(begun.timers)
    assert len(begun.timers) == limit
    for host, share in zip(hosts, shares, strict=True):
        assert abs(counts[lane(host)] - limit * share / sum(shares)) <= 1, "a part is rounded up or down"
        assert sorted(t.id for t in begun.timers if t.lane == lane(host)) == sorted(first_ids(host, counts[lane(host)]))
    assert begun.lanes == await left_in(store, *map(lane, hosts))


async def test_unneeded_share_goes_to_other_lanes(store: Store) -> None:
    await with_timers(store, *several(A, 2), *several(B, 50), *several(C, 50))
    portions = [Portion(lane(A), 50, 8), Portion(lane(B), 5, 8), Portion(lane(C), 50, 1)]
    begun = await store.begin_lanes(ALICE, await holding(store), 30, portions)
    assert begun_of(begun.timers) == {lane(A): 2, lane(B): 5, lane(C): 23}
    assert begun.lanes == await left_in(store, lane(B), lane(C))


async def test_all_due_timers_are_taken_if_the_limit_suffices(store: Store) -> None:
    await with_timers(store, *several(A, 20), *several(B, 5))
    portions = [Portion(lane(A), 20, 0.01), Portion(lane(B), 5, 99)]
    begun = await store.begin_lanes(ALICE, await holding(store), 25, portions)
    assert (len(begun.timers), begun.lanes, begun.next_at) == (25, {}, None)


async def test_limit_below_the_number_of_lanes_reaches_every_lane_in_turn(store: Store) -> None:
    hosts = [f"h{n}.example" for n in range(64)]
    await with_timers(store, *(t for host in hosts for t in several(host, 2)))
    held = await holding(store)
    taken: Counter[int] = Counter()
    for _ in range(13):
        begun = await store.begin_lanes(ALICE, held, 10, [Portion(lane(host), 16) for host in hosts])
        assert max(begun_of(begun.timers).values(), default=0) <= 2
        assert begun.lanes == await left_in(store, *map(lane, hosts))
        taken += begun_of(begun.timers)
    assert taken == dict.fromkeys(map(lane, hosts), 2)


async def test_limit_is_used_up_and_never_exceeded(store: Store) -> None:
    held = await holding(store)
    for seed in range(20):
        rng = random.Random(seed)
        hosts = {f"h{n}.{seed}.example": rng.choice([0, 1, 3, 20]) for n in range(rng.randrange(1, 9))}
        await with_timers(store, *(t for host, number in hosts.items() for t in several(host, number)))
        portions = [Portion(lane(host), rng.choice([0, 1, 4, 50]), rng.choice([0.1, 1, 1, 7])) for host in hosts]
        wanted = {p.lane: min(p.most, number) for p, number in zip(portions, hosts.values(), strict=True)}
        limit = rng.randrange(1, 40)
        begun = await store.begin_lanes(ALICE, held, limit, portions)
        counts = begun_of(begun.timers)
        assert all(counts[each] <= most for each, most in wanted.items()), seed
        assert len(begun.timers) == min(limit, sum(wanted.values())), seed
        assert begun.lanes == await left_in(store, *wanted), seed
        assert begun.next_at == min(begun.lanes.values(), default=None), seed


# begin_lanes: the remaining timers.


async def test_begin_lanes_reports_the_earliest_remaining_timer_of_each_lane(store: Store) -> None:
    await with_timers(store, *several(A, 3))  # all due timers are begun
    await with_timers(store, *several(B, 5), one(B, "ahead", at=START + 5))  # more is due than requested
    await with_timers(store, *several(C, 2), one(C, "ahead c", at=START + 6))  # all due timers are begun
    await with_timers(store, one(D, at=START + 7), one(D, "last", at=START + 9))  # nothing is due
    portions = [Portion(lane(host), 3) for host in (A, B, C, D, E)]
    begun = await store.begin_lanes(ALICE, await holding(store), EVERYTHING, portions)
    assert begun.lanes == {lane(B): START - 97, lane(C): START + 6, lane(D): START + 7}
    assert begun.next_at == START - 97


async def test_remaining_timers_include_those_beyond_the_limit(store: Store) -> None:
    await with_timers(store, *several(A, 4), *several(B, 4), one(B, "ahead", at=START + 5))
    portions = [Portion(lane(A), 4), Portion(lane(B), 4)]
    held = await holding(store)
    while (begun := await store.begin_lanes(ALICE, held, 3, portions)).timers:
        assert begun.lanes == await left_in(store, lane(A), lane(B))
    assert begun.lanes == {lane(B): START + 5}


async def test_portion_of_zero_reports_the_earliest_timer(store: Store) -> None:
    await with_timers(store, *several(A, 3))
    begun = await store.begin_lanes(ALICE, await holding(store), 5, [Portion(lane(A), 0)])
    assert (begun.timers, begun.lanes) == ([], {lane(A): START - 100})


# Lost attempts.


async def lose(store: Store, *timers: Timer) -> list[Timer]:
    """Let Alice begin these timers and then disappear."""
    held = await holding(store, ALICE)
    await with_timers(store, *timers)
    begun = (await store.begin(ALICE, held, EVERYTHING)).timers
    assert len(begun) == len(timers)
    await store.release(ALICE, held)
    return begun


async def test_lost_attempt_is_begun_with_its_lane_at_its_deadline(store: Store, clock: ManualClock) -> None:
    lost, other = await lose(store, one(A, at=START - 1), one(B))
    held = await holding(store, BOB)
    assert lost.deadline_at is not None
    clock.advance(lost.deadline_at - START - 1)
    assert (await store.begin_lanes(BOB, held, 5, [Portion(lane(A), 5)])).timers == []
    clock.advance(1)
    [again] = (await store.begin_lanes(BOB, held, 5, [Portion(lane(A), 5)])).timers
    assert again == lifecycle.begin(lost, now=clock.now(), version=held[0])
    assert await store.get("default", B) == other, "not from another lane"
    assert (await store.tally())[Status.EXECUTING] == 2
    assert (await store.begin_lanes(BOB, held, 5, [Portion(lane(A), 5)])).timers == [], "it is Bob's now"


async def test_lane_with_a_lost_attempt_is_listed(store: Store, clock: ManualClock) -> None:
    lost, _ = await lose(store, one(A, at=START - 1), one(B))
    held = await holding(store, BOB)
    assert (await store.lanes(START)).lanes == []
    assert lost.deadline_at is not None
    clock.advance(lost.deadline_at - START)
    found = (await store.lanes(clock.now())).lanes
    assert Lane(lane(A), "default", origin(A), START - 1) in found
    begun = await store.begin_lanes(BOB, held, 5, [Portion(each.lane, 5) for each in found])
    assert ids(begun.timers) == [A, B]


async def test_lost_attempts_count_as_due(store: Store, clock: ManualClock) -> None:
    await lose(store, *several(A, 4, at=START - 100, step_ms=10))
    await with_timers(store, *(one(A, f"due {n}", at=START - 95 + n * 10, shard=n) for n in range(4)))
    held = await holding(store, BOB)
    clock.advance(60_000)
    rounds = [await store.begin_lanes(BOB, held, 5, [Portion(lane(A), 3)]) for _ in range(4)]
    order = [f"{A} 0", "due 0", f"{A} 1", "due 1", f"{A} 2", "due 2", f"{A} 3", "due 3"]
    assert [ids(begun.timers) for begun in rounds] == [order[:3], order[3:6], order[6:], []]
    assert [begun.lanes for begun in rounds] == [{lane(A): START - 85}, {lane(A): START - 70}, {}, {}]
    assert (await store.tally())[Status.EXECUTING] == 8


async def test_lost_attempts_that_must_not_begin(store: Store, clock: ManualClock) -> None:
    namespace = await with_namespace(store, "elsewhere")
    await lose(store, one(A, shard=1), one(A, "theirs", shard=2), one(A, "held back", shard=1, namespace="elsewhere"))
    held = await holding(store, BOB, 1)
    namespace = await switch(store, namespace, paused=True)
    clock.advance(60_000)
    portions = [Portion(lane(A), 5), Portion(lane(A, "elsewhere"), 5)]
    assert {found.namespace for found in (await store.lanes(clock.now())).lanes} == {"default"}
    begun = await store.begin_lanes(BOB, held, 5, portions)
    assert (ids(begun.timers), begun.lanes) == ([A], {})
    clock.advance(10**9)
    await store.renew(BOB, 10**9)
    await switch(store, namespace, paused=False)
    begun = await store.begin_lanes(BOB, held, 5, portions)
    assert ids(begun.timers) == ["held back"], "and not the attempt that Bob has begun"


async def test_takeover_now_lists_a_lost_attempt_at_once(opened: Opened, database: str, clock: ManualClock) -> None:
    """With ``takeover_now``, the claimer of a shard is the only instance that is left."""
    await lose(await opened(database), one(A), one(B))
    store = PostgresStore(database, shards=8, takeover_now=True, virtual_clock=clock)
    await store.open()
    try:
        assert (await store.lanes(START)).lanes == [], "their version is still the latest"
        held = await holding(store, BOB)
        assert {each.destination for each in (await store.lanes(START)).lanes} == {origin(A), origin(B)}
        assert ids((await store.begin_lanes(BOB, held, 5, [Portion(lane(A), 5)])).timers) == [A]
        assert [each.destination for each in (await store.lanes(START)).lanes] == [origin(B)]
        begun = await store.begin(BOB, held, 5)
        assert (ids(begun.timers), begun.next_at) == ([B], None), "and no poll at its deadline"
    finally:
        await store.close()


# lanes.


async def test_lane_is_listed_with_its_earliest_timer(store: Store) -> None:
    await with_namespace(store, "elsewhere")
    await with_timers(store, *several(A, 3), *several(A, 3, at=START - 7, namespace="elsewhere"))
    await with_timers(store, timer("n", definition=Definition(target=NatsTarget(subject="s"))))
    await with_timers(store, timer("p", definition=Definition(target=HttpTarget(url="HTTP://User-Host:8080?x=1"))))
    found = await store.lanes(START)
    assert sorted(found.lanes, key=lambda each: (each.namespace, each.destination)) == [
        Lane(lane_of("default", "http://user-host:8080"), "default", "http://user-host:8080", START),
        Lane(lane(A), "default", origin(A), START - 100),
        Lane(lane_of("default", "nats"), "default", "nats", START),
        Lane(lane(A, "elsewhere"), "elsewhere", origin(A), START - 7),
    ]
    assert found.next is None


async def test_lane_is_listed_if_a_timer_is_due_by_the_given_time(store: Store) -> None:
    await with_timers(store, one(A, at=START + 5), one(A, "later", at=START + 9))
    assert (await store.lanes(START + 4)).lanes == []
    assert [each.fire_at for each in (await store.lanes(START + 5)).lanes] == [START + 5]
    assert [each.fire_at for each in (await store.lanes(START + 100)).lanes] == [START + 5]


async def test_lanes_counts_due_timers_up_to_a_limit(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "paused", paused=True)
    await with_timers(store, *several(A, 5), *several(B, 4, namespace="paused"), one(C, at=START + 1))
    assert [(await store.lanes(START, due_max=most)).due for most in (0, 1, 8, 9, 10, 99)] == [0, 1, 8, 9, 9, 9]
    clock.advance(1)
    assert (await store.lanes(START, due_max=99)).due == 10, "by the store's clock, not by ``until``"


async def test_lanes_of_a_paused_namespace_are_not_listed(store: Store) -> None:
    namespace = await with_namespace(store, "elsewhere")
    await with_timers(store, one(A), one(A, namespace="elsewhere"))
    assert len((await store.lanes(START)).lanes) == 2
    namespace = await switch(store, namespace, paused=True)
    assert [each.namespace for each in (await store.lanes(START)).lanes] == ["default"]
    await switch(store, namespace, paused=False)
    assert len((await store.lanes(START)).lanes) == 2


async def test_lanes_are_returned_in_pages(store: Store) -> None:
    await with_namespace(store, "paused", paused=True)
    listed = [f"h{n}.example" for n in range(7)]
    await with_timers(store, *(t for host in listed for t in several(host, 3)))
    # Lanes that are not listed count towards the size of a page.
    await with_timers(store, one(A, namespace="paused"), one(B, namespace="paused"), one(C, at=START + 10**6))
    for size in (1, 2, 3, 7, 10, 11, 50):
        found: list[int] = []
        page = await store.lanes(START, limit=size)
        while True:
            lanes = sorted(each.lane for each in page.lanes)
            assert len(lanes) <= size
            assert not found or not lanes or lanes[0] > found[-1]
            found += lanes
            if page.next is None:
                break
            assert not lanes or page.next >= lanes[-1]
            page = await store.lanes(START, after=page.next, limit=size)
        assert found == sorted(map(lane, listed)), size


async def test_begun_timer_leaves_its_lane_and_returns_for_its_retry(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    await with_timers(store, one(A))
    assert len((await store.lanes(START)).lanes) == 1
    [begun] = (await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])).timers
    assert (await store.lanes(START + 10**9)).lanes == []
    retry = lifecycle.settle(begun, BROKEN, sent_at=START, now=START, uniform=lambda low, high: 500)
    assert await store.record(ALICE, [(begun, retry)]) == [True]
    assert (await store.lanes(START + 499)).lanes == []
    assert [each.fire_at for each in (await store.lanes(START + 500)).lanes] == [START + 500]
    assert (await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])).lanes == {lane(A): START + 500}
    clock.advance(500)
    [again] = (await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])).timers
    assert again == lifecycle.begin(retry, now=START + 500, version=held[0])
    assert await store.record(ALICE, [(again, completed(again, START + 500))]) == [True]
    assert (await store.lanes(START + 10**9)).lanes == []


async def test_lanes_survive_reopening(store: Store, reopened: Reopen) -> None:
    await with_timers(store, *several(A, 3), *several(B, 3))
    before = await store.lanes(START, due_max=9)
    again = await reopened(store)
    try:
        assert await again.lanes(START, due_max=9) == before
        begun = await again.begin_lanes(BOB, await holding(again, BOB), 9, [Portion(lane(B), 9)])
        assert sorted(ids(begun.timers)) == first_ids(B, 3)
    finally:
        await again.close()


ODD_PAYLOADS = {
    "a NUL": Raw(rb'"\u0000"'),
    "deep": Raw(b"[" * 400 + b"]" * 400),
    "the same key twice": Raw(b'{"target":{"type":"nats"},"target":{"url":"http://elsewhere.example"}}'),
    "a number too large for a float": Raw(b"1e999"),
    "large": Raw(b'"' + b"x" * 200_000 + b'"'),
}


@pytest.mark.parametrize("payload", ODD_PAYLOADS)
async def test_payload_that_the_database_can_not_parse_does_not_hide_lanes(store: Store, payload: str) -> None:
    """A client's payload must not break queries over all lanes."""
    await with_timers(store, one(A, definition=definition(A, payload=ODD_PAYLOADS[payload])), one(B))
    assert {each.destination for each in (await store.lanes(START)).lanes} == {origin(A), origin(B)}
    assert {each.destination for each in await store.overdue(range(8), START + 1, 9)} == {origin(A), origin(B)}


async def test_invalid_url_has_a_lane(store: Store) -> None:
    for n, url in enumerate(["http://", "http://a b/", "ftp://x", "", 'http://"x"/', "http://" + "x" * 3_000]):
        odd = timer(f"{n}", at=START - n, definition=Definition(target=HttpTarget(url=url)))
        await with_timers(store, odd)
        [found] = (await store.lanes(START)).lanes
        assert (found.lane, found.fire_at) == (odd.lane, START - n)
        assert found.destination.startswith("invalid: ")
        assert len((await store.begin_lanes(ALICE, await holding(store), 5, [Portion(odd.lane, 5)])).timers) == 1


# overdue.


async def test_overdue_counts_timers_that_should_have_begun(store: Store) -> None:
    held = await holding(store)
    await with_namespace(store, "paused", paused=True)
    await with_timers(store, *several(A, 12), *several(B, 3, at=START - 50, namespace="paused"), one(C))
    expected = {
        Overdue("default", origin(A), False, START - 100, 12),
        Overdue("paused", origin(B), True, START - 50, 3),
    }
    assert set(await store.overdue(range(8), START, EVERYTHING)) == expected
    assert {each.timers for each in await store.overdue(range(8), START, 2)} == {2}
    [found] = await store.overdue(range(8), START - 95, 99)
    assert (found.destination, found.timers) == (origin(A), 5)
    assert await store.overdue(range(8), START - 100, 99) == []
    # Executing timers are not overdue.
    await store.begin(ALICE, held, 12)
    assert {each.namespace for each in await store.overdue(range(8), START, 99)} == {"paused"}


async def test_overdue_covers_only_the_given_shards(store: Store) -> None:
    await with_timers(store, *several(A, 16), *several(B, 4, shard=2))
    found = await store.overdue([2, 5], START, EVERYTHING)
    assert {(each.destination, each.oldest_at, each.timers) for each in found} == {
        *((origin(A), START - 98, 4), (origin(B), START - 100, 4)),
    }
    assert [each.timers for each in await store.overdue({5}, START, 1)] == [1]
    assert await store.overdue([], START, EVERYTHING) == []


# The lane of a timer after a change.


async def assert_only_in(store: Store, host: str, id: str) -> None:
    assert [each.destination for each in (await store.lanes(START)).lanes] == [origin(host)]
    held = await holding(store)
    others = [Portion(lane(other), 5) for other in (A, B, C) if other != host]
    assert (await store.begin_lanes(ALICE, held, 5, others)).timers == []
    assert ids((await store.begin_lanes(ALICE, held, 5, [Portion(lane(host), 5)])).timers) == [id]


async def test_changed_destination_moves_a_timer_to_another_lane(store: Store) -> None:
    await with_timers(store, before := one(A))
    assert await store.swap(before, lifecycle.amend(before, now=START, definition=definition(B)))
    await assert_only_in(store, B, A)


async def test_changed_path_keeps_the_lane(store: Store) -> None:
    await with_timers(store, before := one(A))
    elsewhere = Definition(target=HttpTarget(url=f"https://{A}:443/elsewhere"))
    assert await store.swap(before, lifecycle.amend(before, now=START, definition=elsewhere))
    await assert_only_in(store, A, A)


async def test_replacing_timer_has_its_own_lane(store: Store) -> None:
    await with_timers(store, before := one(A))
    assert await store.swap(before, lifecycle.renew(before, one(B, A)))
    await assert_only_in(store, B, A)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.CANCELED, Status.FAILED])
@pytest.mark.parametrize("way", ["replay", "renew"])
async def test_replayed_timer_is_in_its_lane(store: Store, status: Status, way: str) -> None:
    """Also if it was moved to another lane before it became final."""
    await with_timers(store, first := one(C, A))
    before = lifecycle.amend(first, now=START, definition=definition(A))
    assert await store.swap(first, before)
    if status is Status.CANCELED:
        final = lifecycle.cancel(before, now=START)
        assert await store.swap(before, final)
    else:
        [begun] = (await store.begin(ALICE, await holding(store), 5)).timers
        final = completed(begun) if status is Status.COMPLETED else lifecycle.give_up(begun, now=START)
        assert await store.record(ALICE, [(begun, final)]) == [True]
    assert final.status is status
    assert (await store.lanes(START)).lanes == []
    after = lifecycle.replay(final, now=START) if way == "replay" else lifecycle.renew(final, one(B, A))
    assert await store.swap(final, after)
    await assert_only_in(store, destination_of(after.definition.target)[8:-4], A)


async def test_deleted_timer_is_in_no_lane(store: Store) -> None:
    await with_timers(store, before := one(A))
    assert await store.swap(before, None)
    assert (await store.lanes(START)).lanes == []
    assert await store.overdue(range(8), START + 1, 9) == []


async def test_deferred_timer_returns_to_its_lane(store: Store) -> None:
    held = await holding(store)
    await with_timers(store, *several(A, 3))
    begun = (await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])).timers
    back = [lifecycle.defer(t, fire_at=t.fire_at, now=START) for t in begun]
    assert await store.record(ALICE, list(zip(begun, back, strict=True))) == [True] * 3
    assert (await store.lanes(START, due_max=9)).due == 3
    again = (await store.begin_lanes(ALICE, held, 5, [Portion(lane(A), 5)])).timers
    assert [msgspec.structs.replace(t, revision=0) for t in again] == [
        msgspec.structs.replace(t, revision=0) for t in begun
    ]
