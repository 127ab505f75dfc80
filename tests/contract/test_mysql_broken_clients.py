"""Guarantees of the MySQL store: what a client that breaks or is suspended in the middle of a packet must not cause."""

from __future__ import annotations

from typing import Any

import asyncmy
import pytest

from duetime.errors import StoreUnavailable
from duetime.model import Status
from duetime.stores.mysql.pool import connect_arguments
from duetime.stores.mysql.store import MysqlStore
from tests.clocks import ManualClock
from tests.contract.stores import SHARDS, mysql
from tests.contract.timers import ALICE, BOB, LEASE_MS, another, timer, with_timers
from tests.mysql import MysqlServer


@pytest.fixture(params=["mariadb", "mysql9"])
def url(request: pytest.FixtureRequest) -> Any:
    server: MysqlServer = request.getfixturevalue(request.param)
    yield (url := server.fresh())
    server.give_back(url)


async def test_counts_stay_exact_if_the_client_breaks_during_a_put(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on with the packet, but ``ROW_COUNT()`` can be -1 from then on."""
    store = await mysql(url, clock)
    try:
        await with_timers(store, there := timer("there"))
        write = store._pool.write

        async def broken(*statements: str, **more: Any) -> Any:
            second = [place for place, text in enumerate(statements) if "ROW_COUNT()" in text][1:]
            changed = [
                text.replace("ROW_COUNT()", "-1") if place in second else text for place, text in enumerate(statements)
            ]
            assert not second or changed != list(statements)
            return await write(*changed, **more)

        monkeypatch.setattr(store._pool, "write", broken)
        await store.put_many([timer("one"), timer("two")])
        await store.put_many([timer("three"), another(there)])
        assert (await store.tally())[Status.PENDING] == 4
    finally:
        await store.close()


async def test_locked_shard_does_not_stop_claims_of_others(url: str, clock: ManualClock) -> None:
    """A client that is suspended after an error in a packet keeps its locks until the server closes its connection."""
    store = await mysql(url, clock)
    suspended = await asyncmy.connect(**connect_arguments(url))
    try:
        async with suspended.cursor() as cursor:
            await cursor.execute("START TRANSACTION")
            await cursor.execute("SELECT * FROM shards WHERE shard = 3 FOR UPDATE")
            others = set(range(SHARDS)) - {3}
            assert (await store.claim(ALICE, range(SHARDS), LEASE_MS)).keys() == others
            await cursor.execute("ROLLBACK")
        assert (await store.claim(ALICE, range(SHARDS), LEASE_MS)).keys() == {3, *others}
        assert await store.claim(BOB, range(SHARDS), LEASE_MS) == {}
    finally:
        suspended.close()
        await store.close()


async def test_failed_quarantine_is_retried_by_the_next_begin(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await mysql(url, clock)
    try:
        held = await store.claim(ALICE, range(SHARDS), LEASE_MS)
        await with_timers(store, timer("bad", at=clock.now() - 1_000))
        await store._pool.write("UPDATE timers SET definition = '{bad'")
        write = store._pool.write

        async def failing(*statements: str, **more: Any) -> Any:
            if any("INTO quarantine" in text for text in statements):
                raise StoreUnavailable("planted")
            return await write(*statements, **more)

        with monkeypatch.context() as patch:
            patch.setattr(store._pool, "write", failing)
            assert (await store.begin(ALICE, held, 10)).timers == []
        assert (await store.quarantine()).timers == 0
        await store.begin(ALICE, held, 10)
        assert (await store.quarantine()).timers == 1
    finally:
        await store.close()


async def test_existing_timer_is_reported_only_once_it_is_on_disk(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a binary log, a server shows a commit before it is flushed. The flush of a later commit includes it."""
    store: MysqlStore = await mysql(url, clock)
    try:
        await with_timers(store, there := timer("there"))
        done = []
        write, read = store._pool.write, store._pool.read

        async def written(*statements: str, **more: Any) -> Any:
            result = await write(*statements, **more)
            done.append("commit")
            return result

        async def was_read(*statements: str) -> Any:
            result = await read(*statements)
            done.append("read")
            return result

        monkeypatch.setattr(store._pool, "write", written)
        monkeypatch.setattr(store._pool, "read", was_read)
        assert await store.put(another(there)) == there
        assert "read" in done and done[-1] == "commit"
        done.clear()
        assert await store.put(timer("new")) is None
        assert done == ["commit"], "a new timer costs nothing more"
    finally:
        await store.close()
