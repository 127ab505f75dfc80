"""Procrastinate on PostgreSQL: deferred tasks with ``schedule_at``, done by its asynchronous worker with concurrency.

A connection pool as large as the work in flight needs, and a short polling interval: its notifications tell of new jobs
and not of jobs that come due.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import aiohttp
import procrastinate
from program import HEADERS, Timer, async_client, body_of, due_at, working

CONCURRENT = 100
CONNECTIONS = 20
POLL_SECONDS = 0.2

role, url = sys.argv[1:]
connector = procrastinate.PsycopgConnector(conninfo=url, min_size=CONNECTIONS, max_size=CONNECTIONS)
app = procrastinate.App(connector=connector)
http: aiohttp.ClientSession


@app.task(name="post")
async def post(url: str, payload: dict[str, object]) -> None:
    async with http.post(url, data=body_of({"payload": payload}), headers=HEADERS) as answer:
        answer.raise_for_status()
        await answer.read()


async def schedule(timer: Timer) -> None:
    await post.configure(schedule_at=datetime.fromtimestamp(due_at(timer), UTC)).defer_async(**timer)


async def schedule_many(timers: Sequence[Timer]) -> None:
    due = datetime.fromtimestamp(due_at(timers[0]), UTC)  # one for all of them: a batch has one
    await post.configure(schedule_at=due).batch_defer_async(*timers)


async def left() -> int:
    rows = await connector.execute_query_all_async(
        "SELECT count(*) AS number FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
    )
    return int(rows[0]["number"])


async def main() -> None:
    global http
    async with app.open_async():
        if role == "client":
            if not await app.check_connection_async():
                await app.schema_manager.apply_schema_async()
            await async_client(procrastinate.__version__, schedule=schedule, schedule_many=schedule_many, left=left)
        else:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENT)) as http:
                asyncio.get_running_loop().call_later(1.0, working)
                await app.run_worker_async(concurrency=CONCURRENT, fetch_job_polling_interval=POLL_SECONDS)


asyncio.run(main())
