"""Single durable inserts by pgbench, PostgreSQL's own load generator: our rows into our table, one commit each."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from bench.processes import BenchError
from bench.timers import DAY_MS, SHARDS, now_ms, timer
from duetime.stores.postgres import PostgresStore
from duetime.stores.postgres_rows import FIRST, NEW, encode
from duetime.stores.postgres_schema import SCHEMA
from tests.postgres import Postgres, home


def _insert(url: str) -> str:
    """What a put writes of one timer, with an id and a key that begin with the time, as ours do."""
    made = timer(url, now_ms() + 7 * DAY_MS)
    values = {
        "uuid": "uuid_send(uuidv7())",
        "namespace": f"'{made.namespace}'",
        "id": "uuidv7()::text",
        "shard": ":shard::int",
        "definition": "'" + encode(made.definition).decode().replace("'", "''") + "'",
        "timeout_ms": str(made.definition.timeout_ms),
        "fingerprint": "''",
        "correlation_id": "NULL",
        "created_at": str(made.created_at),
        "revision": ":revision::bigint",
        "execute_at": str(made.execute_at),
    }
    row = ", ".join(f"{values[column]} AS {column}" for column in NEW)
    return f"""
\\set shard random(0, {SHARDS - 1})
\\set revision random(1, {1 << 48})
INSERT INTO {SCHEMA}.timers (seq, {", ".join((*NEW, *FIRST))})
SELECT *, {", ".join(FIRST.values())} FROM (SELECT nextval('{SCHEMA}.timer_seq'), {row}) AS new;
"""


async def inserts(postgres: Postgres, url: str, *, clients: int, seconds: int, directory: Path) -> dict[str, float]:
    """``url`` is that of a callback."""
    script = directory / "pgbench.sql"
    script.write_text(_insert(url))
    database = await asyncio.to_thread(postgres.create_database, "pgbench")
    try:
        store = PostgresStore(database, shards=SHARDS)
        await store.open()
        await store.close()
        return {"per_second": await _run(database, script, clients, seconds)}
    finally:
        await asyncio.to_thread(postgres.sql, "DROP DATABASE pgbench WITH (FORCE)")


async def _run(database: str, script: Path, clients: int, seconds: int) -> float:
    program = home(18) / "bin/pgbench"
    if not program.exists():
        raise BenchError("this PostgreSQL comes without pgbench")
    options = ("-n", "-M", "prepared", "-c", str(clients), "-j", "1", "-T", str(seconds), "-f", str(script), database)
    process = await asyncio.create_subprocess_exec(str(program), *options, stdout=asyncio.subprocess.PIPE)
    said = (await process.communicate())[0].decode()
    found = re.search(r"^tps = ([0-9.]+)", said, re.MULTILINE)
    if found is None:
        raise BenchError(f"pgbench said something else than expected: {said}")
    return float(found[1])
