"""Single durable inserts by pgbench, PostgreSQL's own load generator: rows like ours, one commit each."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from bench.processes import BenchError
from tests.postgres import Postgres, home

_TABLE = """
CREATE TABLE raw (seq bigserial PRIMARY KEY, uuid uuid NOT NULL, at bigint NOT NULL, body text NOT NULL);
CREATE UNIQUE INDEX raw_uuid ON raw (uuid);
CREATE INDEX raw_at ON raw (at);
"""
_INSERT = r"""
\set at random(1, 1099511627776)
INSERT INTO raw (uuid, at, body) VALUES (gen_random_uuid(), :at, repeat('x', 500));
"""


async def inserts(postgres: Postgres, *, clients: int, seconds: int, directory: Path) -> dict[str, float]:
    script = directory / "pgbench.sql"
    script.write_text(_INSERT)
    url = await asyncio.to_thread(postgres.create_database, "pgbench")
    try:
        await asyncio.to_thread(postgres.sql, _TABLE, url)
        return {"per_second": await _run(url, script, clients, seconds)}
    finally:
        await asyncio.to_thread(postgres.sql, "DROP DATABASE pgbench WITH (FORCE)")


async def _run(url: str, script: Path, clients: int, seconds: int) -> float:
    program = home(18) / "bin/pgbench"
    if not program.exists():
        raise BenchError("this PostgreSQL comes without pgbench")
    options = ("-n", "-M", "prepared", "-c", str(clients), "-j", "1", "-T", str(seconds), "-f", str(script), url)
    process = await asyncio.create_subprocess_exec(str(program), *options, stdout=asyncio.subprocess.PIPE)
    said = (await process.communicate())[0].decode()
    found = re.search(r"^tps = ([0-9.]+)", said, re.MULTILINE)
    if found is None:
        raise BenchError(f"pgbench said something else than expected: {said}")
    return float(found[1])
