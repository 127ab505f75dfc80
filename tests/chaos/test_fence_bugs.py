"""Two bugs of the fence, each in the one interleaving in which it lets a stale owner write.

Without the share lock, the fence and the write see different moments: a claim in between succeeds, and the old owner
still writes after it. Without the owner in the condition, two owners can have the same version: after a failover to a
replica that lost the last claim, another instance claims that number again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from duetime.model import Timer
from duetime.stores.postgres import statements as sql
from duetime.stores.postgres.store import PostgresStore
from tests.chaos.bugs import BUGS
from tests.clocks import ManualClock
from tests.contract.timers import ALICE, BOB, LEASE_MS, completed, holding, timer, with_timers
from tests.postgres import Postgres

PATIENCE_SECONDS = 20.0


@pytest.fixture
def url(postgres18: Postgres) -> Iterator[str]:
    yield (url := postgres18.fresh())
    postgres18.give_back(url)


@pytest.fixture(params=[None, "no-share-lock", "version-only"])
def bug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """A bug, planted in this process for the duration of a test."""
    for name in ("BEGIN", "BEGIN_LANES", "RECORD"):
        monkeypatch.setattr(sql, name, getattr(sql, name))  # so that it is restored
    if request.param is not None:
        BUGS[request.param]()
    planted: str | None = request.param
    return planted


async def alices(store: PostgresStore) -> tuple[dict[int, int], Timer]:
    """Alice owns everything and has begun one timer; another one is due."""
    held = await holding(store, ALICE)
    await with_timers(store, timer("begun"))
    [begun] = (await store.begin(ALICE, held, 1)).timers
    await with_timers(store, timer("due"))
    return held, begun


async def wait_for_locks(connection: Any, wanted: int, unless: asyncio.Task[Any] | None = None) -> None:
    """Wait until this many statements wait for a lock, or a task is done."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (unless and unless.done()):
            if await connection.fetchval(waiting) >= wanted:
                break
            await asyncio.sleep(0.005)


async def overtaken(url: str, verb: str) -> bool:
    """Whether Alice writes a timer although Bob's claim has succeeded before.

    Her statement has passed the fence and waits for the timer's row, which another transaction has locked. Now Bob
    claims.
    """
    clock = ManualClock()
    store = PostgresStore(url, shards=8, virtual_clock=clock)
    await store.open()
    holder, looker = await asyncpg.connect(url), await asyncpg.connect(url)
    try:
        held, begun = await alices(store)
        clock.advance(LEASE_MS)
        async with asyncio.TaskGroup() as tasks:
            async with holder.transaction():
                await holder.execute("SELECT FROM duetime.timers FOR UPDATE")
                writing: asyncio.Task[Any]
                if verb == "begin":
                    writing = tasks.create_task(store.begin(ALICE, held, 10))
                else:
                    writing = tasks.create_task(store.record(ALICE, [(begun, completed(begun))]))
                await wait_for_locks(looker, 1)
                claiming = tasks.create_task(store.claim(BOB, held, LEASE_MS))
                await wait_for_locks(looker, 2, unless=claiming)
                claimed_first = claiming.done()
            written: Any = await writing
            assert await claiming == {shard: 2 for shard in held}
        return claimed_first and bool(written.timers if verb == "begin" else written[0])
    finally:
        await holder.close()
        await looker.close()
        await store.close()


@pytest.mark.parametrize("verb", ["begin", "record"])
def test_former_owner_can_write_during_a_claim_only_without_the_share_lock(
    url: str, verb: str, bug: str | None
) -> None:
    assert asyncio.run(overtaken(url, verb)) is (bug == "no-share-lock")


async def accepted(url: str, verb: str) -> bool:
    """Whether Alice writes a timer of Bob's shard, under the version that she had."""
    store = PostgresStore(url, shards=8, virtual_clock=ManualClock())
    await store.open()
    connection = await asyncpg.connect(url)
    try:
        held, begun = await alices(store)
        await connection.execute("UPDATE duetime.shards SET owner_id = $1", BOB)
        if verb == "begin":
            return bool((await store.begin(ALICE, held, 10)).timers)
        return (await store.record(ALICE, [(begun, completed(begun))]))[0]
    finally:
        await connection.close()
        await store.close()


@pytest.mark.parametrize("verb", ["begin", "record"])
def test_former_owner_can_write_only_if_the_fence_ignores_the_owner(url: str, verb: str, bug: str | None) -> None:
    assert asyncio.run(accepted(url, verb)) is (bug == "version-only")
