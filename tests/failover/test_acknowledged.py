"""A client gets a response only after a synchronous standby has the write, even if the primary has it already."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from duetime.stores.postgres.store import PostgresStore
from tests.contract.timers import timer
from tests.failover.pairs import PostgresPair
from tests.postgres import Missing
from tests.servers import PATIENCE_SECONDS
from tests.skips import skip

pytestmark = pytest.mark.alone

WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' ORDER BY pid"


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    """A synchronous standby."""
    try:
        made = PostgresPair(18, waits=True)
    except Missing as missing:
        skip(missing)
    with made:
        yield made


async def waits(pair: PostgresPair, put: asyncio.Task[object], but: str = "") -> str:
    """The connection that waits for the standby, other than ``but``; empty once the put has returned."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not put.done():
            pids = await asyncio.to_thread(pair.primary.sql, WAITING)
            for pid in pids.split():
                if pid != but:
                    return pid
    return ""


async def cut_off(pair: PostgresPair) -> None:
    store = PostgresStore(pair.url("postgres"), shards=8)
    await store.open()
    await asyncio.to_thread(pair.attach)
    assert pair.link is not None
    pair.link.hang()
    try:
        put = asyncio.create_task(store.put(timer("cut off")))
        first = await waits(pair, put)
        # It has committed on the primary but gets no response: the store checks for its own write.
        await asyncio.to_thread(pair.primary.sql, f"SELECT pg_terminate_backend({first})")
        assert await waits(pair, put, but=first), f"told without the standby: {put}"
        repeated = asyncio.create_task(store.put(timer("cut off")))
        assert await waits(pair, repeated), f"told without the standby: {repeated}"
        pair.link.pass_on()
        assert await put is None
        there = await repeated
        assert there is not None and there.id == "cut off"
    finally:
        pair.link.pass_on()
        await store.close()


def test_a_create_is_acknowledged_only_after_the_standby_has_it(pair: PostgresPair) -> None:
    asyncio.run(cut_off(pair))
