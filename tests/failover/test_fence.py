"""Owners whose last writes were lost in a failover, step by step: direct calls to the store, on a manual clock.

Without the owner in the fence, an instance that claimed a shard just before the failover could still write afterwards,
under a version that another instance has by then. Without new versions for all shards after a failover, a lost record
would leave its timer executing forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from duetime.errors import StoreError
from duetime.lifecycle import ATTEMPT_GRACE_MS
from duetime.model import Status
from duetime.stores.mysql.store import MysqlStore
from duetime.stores.postgres import statements as sql
from duetime.stores.postgres.store import PostgresStore
from tests.chaos.bugs import BUGS
from tests.clocks import ManualClock
from tests.contract.timers import ALICE, BOB, CAROL, LEASE_MS, completed, timer, with_timers
from tests.failover.pairs import DATABASE, MariadbPair, Pair, PostgresPair
from tests.postgres import Missing
from tests.skips import skip

pytestmark = pytest.mark.alone

PAIRS: dict[str, Callable[[], Pair[Any]]] = {
    "postgres18": lambda: PostgresPair(18, waits=False),
    "mariadb": lambda: MariadbPair(waits=False),
}


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair[Any]]:
    """An asynchronous standby."""
    try:
        made = PAIRS[request.param]()
    except Missing as missing:
        skip(missing)
    with made:
        if isinstance(made, MariadbPair):
            made.primary.sql(f"CREATE DATABASE {DATABASE}")
            made.primary.sql("CREATE USER owner@localhost", f"GRANT ALL ON {DATABASE}.* TO owner@localhost")
        else:
            made.primary.sql("CREATE ROLE owner SUPERUSER LOGIN")
        yield made


def store_at(pair: Pair[Any], clock: ManualClock) -> Any:
    store = MysqlStore if isinstance(pair, MariadbPair) else PostgresStore
    return store(pair.url("owner"), shards=8, virtual_clock=clock)


async def fail_over(pair: Pair[Any], lost: Callable[[], Awaitable[None]]) -> None:
    """The primary acknowledges the writes of ``lost``, but they do not reach the standby."""
    assert pair.link is not None
    await asyncio.to_thread(pair.wait_in_step)
    pair.link.hang()
    await lost()
    pair.primary.kill()
    await asyncio.to_thread(pair.promote)


async def again(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Retry a call of the store until it has found the new primary."""
    while True:
        try:
            return await ask()
        except StoreError:
            await asyncio.sleep(0.05)


async def stale_writes(pair: Pair[Any]) -> list[str]:
    """What Bob can still write, whose claim was lost, after Carol has claimed the same shards under the same version.

    A record of Alice is lost, too, and with it the only trace of her attempt's outcome.
    """
    clock, wrong, bobs = ManualClock(), [], dict[int, int]()
    store = store_at(pair, clock)
    await store.open()
    await asyncio.to_thread(pair.attach)
    try:
        renewal = await store.renew(ALICE, LEASE_MS)
        held = await store.claim(ALICE, range(8), LEASE_MS)
        await with_timers(store, timer("begun"))
        [begun] = (await store.begin(ALICE, held, 10)).timers
        await with_timers(store, timer("due"))

        async def lost() -> None:
            assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
            clock.advance(LEASE_MS + 1)
            await store.renew(BOB, LEASE_MS)
            bobs.update(await store.claim(BOB, range(8), LEASE_MS))

        await fail_over(pair, lost)
        after = await again(lambda: store.renew(ALICE, LEASE_MS))
        assert (after.failovers, after.held) == (renewal.failovers + 1, held)
        executing = await store.get("default", "begun")
        assert executing is not None and executing.status is Status.EXECUTING

        clock.advance(LEASE_MS + 1)
        await store.renew(CAROL, LEASE_MS)
        carols = await store.claim(CAROL, range(8), LEASE_MS)
        assert carols == bobs
        if (await store.begin(BOB, bobs, 1)).timers:
            wrong.append("begin")
        clock.advance(begun.definition.timeout_ms + ATTEMPT_GRACE_MS + 1)
        timers = (await store.begin(CAROL, carols, 10)).timers
        if any(await store.record(BOB, [(timer, completed(timer)) for timer in timers])):
            wrong.append("record")
        [second] = [timer for timer in timers if timer.id == "begun"]
        assert (second.delivery_id, second.attempt) == (begun.delivery_id, begun.attempt + 1)
        return wrong
    finally:
        await store.close()


@pytest.mark.parametrize("pair", PAIRS, indirect=True)
def test_owner_whose_claim_was_lost_can_not_write(pair: Pair[Any]) -> None:
    assert asyncio.run(stale_writes(pair)) == []


@pytest.mark.parametrize("pair", ["postgres18"], indirect=True)
def test_fence_without_the_owner_lets_a_stale_owner_write(pair: Pair[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEGIN", "BEGIN_LANES", "RECORD"):
        monkeypatch.setattr(sql, name, getattr(sql, name))  # so that it is restored
    BUGS["version-only"]()
    assert asyncio.run(stale_writes(pair)) == ["begin", "record"]
