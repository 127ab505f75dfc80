"""PostgreSQL behind PgBouncer: session mode works; other modes are rejected with one line of advice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from duetime.errors import SettingsError
from duetime.model import Status
from duetime.store import Hint
from duetime.stores.postgres import pool as postgres_pool
from duetime.stores.postgres.store import PostgresStore
from tests.contract.timers import ALICE, completed, existing, holding, timer, with_timers
from tests.pgbouncer import PgBouncer
from tests.postgres import Missing, Postgres
from tests.servers import Duetime, NotStarted
from tests.skips import skip

PATIENCE_SECONDS = 20.0
REFUSED = "this is a connection pooler in transaction mode.*connect to PostgreSQL directly, or set pool_mode=session"


@pytest.fixture
def database(postgres18: Postgres) -> Iterator[str]:
    yield (url := postgres18.fresh())
    postgres18.give_back(url)


def pooler(server: Postgres, mode: str, **settings: str) -> PgBouncer:
    try:
        return PgBouncer(server, pool_mode=mode, **settings)
    except Missing as missing:
        skip(missing)


async def shown(url: str, setting: str) -> str:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        async with connection.transaction():
            value: str = await connection.fetchval(f"SHOW {setting}")
            return value
    finally:
        await connection.close()


async def test_session_mode_supports_the_whole_store(postgres18: Postgres, database: str) -> None:
    with pooler(postgres18, "session") as bouncer:
        url = bouncer.url(database)
        before = await shown(url, "search_path")
        store, other = PostgresStore(url, shards=8), PostgresStore(url, shards=8)
        heard = asyncio.Event()
        other.on_hint(lambda _: heard.set())
        await store.open()
        await other.open()
        held = await holding(store, ALICE)
        due = timer("due", at=1)
        await with_timers(store, due, *(timer(f"later {number}") for number in range(20)))
        [begun] = (await store.begin(ALICE, held, 10)).timers
        assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
        assert (await existing(other, "due")).status is Status.COMPLETED
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not heard.is_set():
                store.hint(Hint(shards=True))
                await asyncio.sleep(0.05)
        async with store._pool.connection() as connection:
            for name, value in postgres_pool._SESSION.items():
                assert await connection.fetchval("SELECT setting FROM pg_settings WHERE name = $1", name) == value
        await store.close()
        await other.close()
        assert await shown(url, "search_path") == before


@pytest.mark.parametrize("size", ["1", "20"])
async def test_transaction_mode_is_rejected_and_leaves_no_trace(postgres18: Postgres, database: str, size: str) -> None:
    with pooler(postgres18, "transaction", default_pool_size=size) as bouncer:
        url = bouncer.url(database)
        before = await shown(url, "search_path")
        for _ in range(5):
            with pytest.raises(SettingsError, match=REFUSED):
                await PostgresStore(url).open()
        assert await shown(url, "search_path") == before
        assert postgres18.sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'duetime'", database) == "0"


async def test_transaction_mode_is_rejected_while_others_use_the_pooler(postgres18: Postgres, database: str) -> None:
    with pooler(postgres18, "transaction") as bouncer:
        url = bouncer.url(database)

        async def use() -> None:
            connection = await asyncpg.connect(url, statement_cache_size=0)
            try:
                while True:
                    await connection.execute("SELECT pg_sleep(0.001)")
            finally:
                connection.terminate()

        others = [asyncio.create_task(use()) for _ in range(8)]
        try:
            for _ in range(10):
                with pytest.raises(SettingsError, match=REFUSED):
                    await PostgresStore(url).open()
        finally:
            for other in others:
                other.cancel()
            await asyncio.wait(others)


def test_start_with_a_transaction_pooler_fails_with_one_line(
    postgres18: Postgres, database: str, tmp_path: Path
) -> None:
    with pooler(postgres18, "transaction") as bouncer, pytest.raises(NotStarted) as ended:
        Duetime(tmp_path, DATABASE_URL=bouncer.url(database))
    [line] = [line for line in str(ended.value).splitlines() if "pooler" in line]
    assert "DATABASE_URL" in line and "pool_mode=session" in line and "Traceback" not in str(ended.value)
