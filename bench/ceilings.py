"""The ceilings below HTTP, each a process that runs once: the bare store, raw SQLite, the delivery client, a bare loop.

Reads one line of JSON from stdin, ``{"what": NAME, ...}``, and writes one line with the figures to stdout.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec
import nats
import uvloop
from nats.aio.msg import Msg

from bench.timers import SHARDS, evenly, timer
from duetime.brokers.nats import ASK_SECONDS, TAKEN_MAX
from duetime.clock import SystemClock
from duetime.deliverers.bodies import body_of
from duetime.deliverers.client import HttpClient
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.model import OutcomeKind
from duetime.node import prepare_interpreter
from duetime.secret_rotation import new_key
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sqlite.store import SqliteStore
from duetime.urls import parse_url

LOOK_SECONDS = 0.01
LOOKS_MAX = 6_000
Figures = dict[str, float]


def _figures(count: int, started: float, cpu: float) -> Figures:
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"per_second": count / took, "per_cpu_second": count / cpu if cpu else 0.0}


async def store(address: str, url: str, callers: int, seconds: float) -> Figures:
    """``put`` from many coroutines, one timer at a time, into a file or the database of a URL."""
    opened: SqliteStore | PostgresStore
    if "://" in address:
        opened = PostgresStore(address, shards=SHARDS)
    else:
        opened = SqliteStore(Path(address), SystemClock(), shards=SHARDS)
    await opened.open()
    ahead = SystemClock().now() + 86_400_000
    made = [timer(url, ahead) for _ in range(round(60_000 * seconds))]
    prepare_interpreter()
    count, cpu, started = 0, time.process_time(), time.perf_counter()

    async def call() -> None:
        nonlocal count
        while made and time.perf_counter() - started < seconds:
            await opened.put(made.pop())
            count += 1

    await asyncio.gather(*(call() for _ in range(callers)))
    figures = _figures(count, started, cpu)
    await opened.close()
    return figures


async def raw(address: str, batch: int, seconds: float) -> Figures:
    """Inserts of rows of the same size into a table with a random key and an index on the time."""
    connection = apsw.Connection(address)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS raw (seq INTEGER PRIMARY KEY, uuid BLOB, at INTEGER, body TEXT)")
    connection.execute("CREATE UNIQUE INDEX IF NOT EXISTS raw_uuid ON raw (uuid)")
    connection.execute("CREATE INDEX IF NOT EXISTS raw_at ON raw (at)")
    body = "x" * 500
    count, cpu, started = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        rows = [(random.randbytes(16), random.randrange(1 << 40), body) for _ in range(batch)]
        with connection:
            connection.executemany("INSERT INTO raw (uuid, at, body) VALUES (?, ?, ?)", rows)
        count += batch
    figures = _figures(count, started, cpu)
    connection.close()
    return figures


async def client(url: str, callers: int, seconds: float, keys: int) -> Figures:
    """The deliverer as in the server, without the engine and the store, signing with this many keys."""
    clock = SystemClock()
    egress = Egress(clock, allow_all=True)
    secrets = [new_key() for _ in range(keys)]
    deliverer = HttpDeliverer(egress=egress, clock=clock, keys_of=lambda namespace: secrets, version="bench")
    made = [timer(url, 0, due=10**12) for _ in range(5_000)]
    prepare_interpreter()
    count, failed, cpu, started = 0, 0, time.process_time(), time.perf_counter()

    async def call() -> None:
        nonlocal count, failed
        while time.perf_counter() - started < seconds:
            outcome = await deliverer.deliver(made[count % len(made)], 30_000)
            count += 1
            failed += outcome.kind is not OutcomeKind.ANSWERED

    await asyncio.gather(*(call() for _ in range(callers)))
    figures = _figures(count, started, cpu)
    await deliverer.close()
    return {**figures, "failed": failed}


async def loop(url: str, per_second: int, seconds: int) -> Figures:
    """Sends callbacks from memory at the instants at which timers would be due."""
    parsed = parse_url(url)
    sender = HttpClient()
    first = SystemClock().now() + 1_000
    messages: list[tuple[int, bytes]] = []
    for made in evenly(url, per_second, seconds, first):
        body = body_of(made, made.fire_at)
        head = f"POST {parsed.target} HTTP/1.1\r\nHost: {parsed.authority}\r\nContent-Type: application/json\r\n"
        messages.append((made.fire_at, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body))
    prepare_interpreter()
    cpu, started = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for due, message in messages:
            ahead = due / 1000 - time.time()
            if ahead > 0:
                await asyncio.sleep(ahead)
            tasks.create_task(sender.request(parsed, [parsed.host], message))
    figures = _figures(len(messages), started, cpu)
    await sender.close()
    return figures


async def acks(url: str, stream: str, consumer: str, count: int) -> Figures:
    """Receives commands with the client of the broker's adapter, with the same limit on concurrency, and only acks
    them."""
    client = await nats.connect(url)
    inbox = client.new_inbox()
    request = msgspec.json.encode({"batch": TAKEN_MAX, "expires": int(ASK_SECONDS * 1e9)})
    came, asked = 0, 0
    over = asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += TAKEN_MAX
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, reply=inbox)

    async def on_message(message: Msg) -> None:
        nonlocal came
        if not message.reply:
            return
        await client.publish(message.reply, b"+ACK")
        came += 1
        if came == count:
            over.set()
        elif asked - came <= TAKEN_MAX // 2:
            await ask()

    await client.subscribe(inbox, cb=on_message)
    prepare_interpreter()
    cpu, started = time.process_time(), time.perf_counter()
    await ask()
    await over.wait()
    for _ in range(LOOKS_MAX):  # The server may be behind with the acks.
        if not (await client.jetstream().stream_info(stream)).state.messages:
            break
        await asyncio.sleep(LOOK_SECONDS)
    figures = _figures(count, started, cpu)
    await client.close()
    return figures


WHAT: dict[str, Callable[..., Awaitable[Figures]]] = {
    "store": store,
    "raw": raw,
    "client": client,
    "loop": loop,
    "acks": acks,
}


async def _run(plan: dict[str, Any]) -> Figures:
    return await WHAT[plan.pop("what")](**plan)


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.readline())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(_run(plan))
    os.write(1, msgspec.json.encode(figures) + b"\n")


if __name__ == "__main__":
    main()
