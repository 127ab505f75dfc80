"""Single durable inserts with pgbench, PostgreSQL's own load generator: our rows into our table, one commit each."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from bench.processes import BenchError
from bench.timers import DAY_MS, SHARDS, now_ms, timer
from duetime.model import Timer
from duetime.stores.postgres.schema import SCHEMA
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sql.columns import INITIAL, NEW, new_row
from tests.postgres import Postgres, home


def row(made: Timer) -> dict[str, str]:
    """The columns of a new timer as SQL; id, key, shard and revision come from the insert."""
    values = {name: _literal(value) for name, value in zip(NEW, new_row(made), strict=True)}
    own = {"uuid": "uuid_send(uuidv7())", "id": "uuidv7()::text"}
    return values | own | {"shard": ":shard::int", "revision": ":revision::bigint"}


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def _insert(url: str) -> str:
    """The row that a put writes for one timer, with an id and a key that begin with the time, like ours."""
    values = ", ".join(f"{value} AS {name}" for name, value in row(timer(url, now_ms() + 7 * DAY_MS)).items())
    return f"""
\\set shard random(0, {SHARDS - 1})
\\set revision random(1, {1 << 48})
INSERT INTO {SCHEMA}.timers (seq, {", ".join((*NEW, *INITIAL))})
SELECT *, {", ".join(INITIAL.values())} FROM (SELECT nextval('{SCHEMA}.timer_seq'), {values}) AS new;
"""


async def inserts(postgres: Postgres, url: str, *, clients: int, seconds: int, directory: Path) -> dict[str, float]:
    """``url`` is the URL of a callback."""
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
        raise BenchError("this PostgreSQL has no pgbench")
    options = ("-n", "-M", "prepared", "-c", str(clients), "-j", "1", "-T", str(seconds), "-f", str(script), database)
    process = await asyncio.create_subprocess_exec(str(program), *options, stdout=asyncio.subprocess.PIPE)
    said = (await process.communicate())[0].decode()
    found = re.search(r"^tps = ([0-9.]+)", said, re.MULTILINE)
    if found is None:
        raise BenchError(f"unexpected output of pgbench: {said}")
    return float(found[1])
