"""Copies one pending timer very many times inside the database: millions of puts would take longer than the bench.

Each copy has its own identity, shard and time, spread over a year that begins tomorrow. Only their number matters; no
measurement fires them.
"""

from __future__ import annotations

from pathlib import Path

import apsw
import asyncpg

from bench.timers import DAY_MS, SHARDS, now_ms
from duetime.stores.postgres.schema import SCHEMA

STATEMENT_SECONDS_MAX = 3_600
YEAR_MS = 365 * DAY_MS


def _statement(columns: list[str], own: dict[str, str], series: str) -> str:
    """Copies of the only row; ``own`` has the expressions that differ, by the number ``n`` and the time ``due``."""
    values = ", ".join(own.get(column, f"one.{column}") for column in columns)
    return f"INSERT INTO timers ({', '.join(columns)}) SELECT {values} FROM timers AS one, {series}"


def _own(uuid: str, id: str) -> dict[str, str]:
    times = {"execute_at": "due", "fire_at": "due"}
    return {"seq": "one.seq + n", "uuid": uuid, "id": id, "shard": f"n % {SHARDS}", **times}


def clone_sqlite(file: Path, count: int) -> None:
    """Into a file with one timer that is not open elsewhere; the indexes grow as in normal use."""
    connection = apsw.Connection(str(file))
    connection.execute("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -2000000")
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('timers')")]
    series = (
        "(WITH RECURSIVE numbers (n, due) AS (SELECT 1, ?1 UNION ALL"
        f" SELECT n + 1, ?1 + abs(random() % {YEAR_MS}) FROM numbers WHERE n < ?2) SELECT n, due FROM numbers)"
    )
    with connection:
        statement = _statement(columns, _own("randomblob(16)", "lower(hex(randomblob(16)))"), series)
        connection.execute(statement, (now_ms() + DAY_MS, count))
        connection.execute("UPDATE tallies SET timers = timers + ?", (count,))
    connection.execute("PRAGMA synchronous = FULL; PRAGMA journal_mode = WAL")
    connection.close()


async def clone_postgres(url: str, count: int) -> None:
    """Into a database with one timer; the indexes are created afterwards, with PostgreSQL's normal fill factor."""
    connection = await asyncpg.connect(
        url, server_settings={"search_path": SCHEMA}, command_timeout=STATEMENT_SECONDS_MAX
    )
    try:
        await connection.execute("SET maintenance_work_mem = '512MB'")
        columns = [
            name
            for (name,) in await connection.fetch(
                "SELECT column_name FROM information_schema.columns WHERE table_schema = $1 AND table_name = 'timers'",
                SCHEMA,
            )
        ]
        indexes = await connection.fetch(
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = $1 AND tablename = 'timers'", SCHEMA
        )
        for name, _ in indexes:
            await connection.execute(f"DROP INDEX {name}")
        series = (
            f"(SELECT n, {now_ms() + DAY_MS} + (random() * {YEAR_MS})::bigint AS due, gen_random_uuid() AS id"
            f" FROM generate_series(1, {count}) AS n) AS numbers"
        )
        own = _own("decode(md5(numbers.id::text), 'hex')", "replace(numbers.id::text, '-', '')")
        await connection.execute(_statement(columns, own, series))
        for _, definition in indexes:
            await connection.execute(definition)
        await connection.execute("SELECT setval('timer_seq', max(seq)) FROM timers")
        await connection.execute(f"UPDATE tallies SET timers = timers + {count}")
        await connection.execute("VACUUM (ANALYZE)")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()
