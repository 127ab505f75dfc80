"""The size of a begin's result in PostgreSQL: small enough that a suspended client does not block its successor.

The server sends the result while the statement is still open, with its share lock on the shards. It can complete the
statement only if the result fits the network buffers.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec import Raw

from duetime.model import Attempt, OutcomeKind, Status, Timer
from duetime.store import Portion
from duetime.stores.postgres import pool as postgres_pool
from duetime.stores.postgres import statements as postgres_statements
from duetime.stores.postgres.store import PostgresStore
from tests.clocks import START, ManualClock
from tests.contract.stores import SHARDS, Opened
from tests.contract.timers import ALICE, BOB, EVERYTHING, LEASE_MS, changed, definition, holding, timer, with_timers

ETHERNET, LOOPBACK = 1448, None
"""Segment sizes: small between two machines, 64 KiB on one; the buffers grow with it."""


def big(id: str, size: int, **changes: Any) -> Timer:
    """A timer with a payload that does not compress."""
    payload = bytes(random.Random(id).choices(b"0123456789abcdefghijklmnopqrstuvwxyz", k=size))
    return timer(id, at=START - 1, definition=definition(Raw(b'"' + payload + b'"')), **changes)


async def test_begin_stops_near_its_byte_limit_and_reports_more(opened: Opened, database: str) -> None:
    store = await opened(database)
    await with_timers(store, *(big(f"b{n}", 200_000, shard=n % SHARDS) for n in range(20)))
    held = await holding(store)
    rounds = []
    while (answer := await store.begin(ALICE, held, EVERYTHING)).timers:
        rounds.append(len(answer.timers))
        assert answer.next_at == (START if sum(rounds) < 20 else None)
    assert sum(rounds) == 20
    limit = postgres_statements.BEGIN_BYTES_MAX // 200_000 + 1
    assert max(rounds) <= limit
    assert answer.next_at is None


async def test_begin_lanes_stops_near_its_byte_limit_and_reports_what_is_left(opened: Opened, database: str) -> None:
    store = await opened(database)
    timers = [changed(big(f"b{n}", 200_000, shard=n % SHARDS), fire_at=START - 20 + n) for n in range(6)]
    await with_timers(store, *timers)
    held = await holding(store)
    number = postgres_statements.BEGIN_BYTES_MAX // 200_000 + 1
    for first in range(0, 6, number):
        answer = await store.begin_lanes(ALICE, held, EVERYTHING, [Portion(timers[0].lane, 100)])
        assert [t.id for t in answer.timers] == [t.id for t in timers[first : first + number]]
        assert answer.lanes == {t.lane: t.fire_at for t in timers[first + number :][:1]}


async def test_timer_larger_than_the_limit_is_begun_alone(opened: Opened, database: str) -> None:
    store = await opened(database)
    size = 2 * postgres_statements.BEGIN_BYTES_MAX
    await with_timers(store, big("x", size), big("y", size), timer("small"))
    held = await holding(store)
    answers = [await store.begin(ALICE, held, EVERYTHING) for _ in range(4)]
    assert [[t.id for t in answer.timers] for answer in answers] == [["x"], ["y"], ["small"], []]
    assert [answer.next_at for answer in answers] == [START, START, None, None]


class Stopped:
    """A client that sends a statement and then reads nothing, like a suspended process."""

    def __init__(self, url: str, segment: int | None) -> None:
        parts = urlsplit(url)
        self._socket = socket.socket()
        if segment is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        self._socket.connect((parts.hostname, parts.port))
        settings = postgres_pool._SESSION | {"user": "postgres", "database": parts.path[1:]}
        words = b"".join(f"{name}\0{value}\0".encode() for name, value in settings.items())
        self._send(b"", b"\0\3\0\0" + words + b"\0")
        self._until_ready()

    def prepare(self, sql: str) -> None:
        self.ask(f"PREPARE it AS {sql}")
        self._until_ready()

    def ask(self, sql: str) -> None:
        self._send(b"Q", sql.encode() + b"\0")

    def close(self) -> None:
        self._socket.close()

    def _send(self, kind: bytes, body: bytes) -> None:
        self._socket.sendall(kind + struct.pack("!I", len(body) + 4) + body)

    def _until_ready(self) -> None:
        received = b""
        while not received.endswith((b"Z\0\0\0\5I", b"Z\0\0\0\5E")):
            received += self._socket.recv(65536)
        assert received.endswith(b"I"), received


BEGINS = {"BEGIN": "NULL, '{}'", "BEGIN_LANES": f"ARRAY[{timer().lane}], ARRAY[1000], ARRAY[1]"}
"""Each begin statement with its further arguments: all timers here are in one lane."""


@contextmanager
def suspended_in_a_begin(url: str, segment: int | None, way: str) -> Iterator[None]:
    """Alice begins all that she can, with version 1 of every shard, and is suspended before she reads the result."""
    with closing(Stopped(url, segment)) as client:
        client.prepare(getattr(postgres_statements, way))
        versions = ", ".join(["1"] * SHARDS)
        client.ask(f"EXECUTE it ('\\x{ALICE.hex()}', ARRAY[{versions}], 1000, {START}, false, '{{}}', {BEGINS[way]})")
        yield


KEPT = tuple(Attempt(n, START, 4, OutcomeKind.ANSWERED, 500, "e" * 500, "a" * 200) for n in range(10))


@pytest.mark.parametrize("way", BEGINS)
@pytest.mark.parametrize(
    ("timers", "segment"),
    [
        ([big(f"b{n}", 200_000, shard=n % SHARDS) for n in range(10)], LOOPBACK),
        ([big(f"b{n}", 200, shard=n % SHARDS) for n in range(1000)], ETHERNET),
        ([big(f"b{n}", 200_000, shard=n % SHARDS) for n in range(10)], ETHERNET),
        ([big(f"b{n}", 10, shard=n % SHARDS, attempts=KEPT) for n in range(1000)], LOOPBACK),
    ],
    ids=["large, nearby", "many, over Ethernet", "large, over Ethernet", "with many attempts, nearby"],
)
async def test_owner_suspended_in_a_begin_does_not_block_its_successor(
    opened: Opened,
    database: str,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    timers: list[Timer],
    segment: int | None,
    way: str,
) -> None:
    monkeypatch.setitem(postgres_pool._SESSION, "statement_timeout", "8000")
    store = await opened(database)
    await with_timers(store, *timers)
    assert set((await store.claim(ALICE, range(SHARDS), 1)).values()) == {1}
    clock.advance(1)
    with suspended_in_a_begin(database, segment, way):
        await begun(store)
        assert await store.claim(BOB, range(SHARDS), LEASE_MS) == dict.fromkeys(range(SHARDS), 2)
    assert (await store.tally())[Status.EXECUTING] > 0


async def begun(store: PostgresStore) -> None:
    """Wait until the begin is committed or has been sending for a while."""
    busy = "SELECT FROM pg_stat_activity WHERE query LIKE 'EXECUTE it%' AND state = 'active'"
    for _ in range(50):
        await asyncio.sleep(0.02)
        if not await store._pool.read(busy + " AND datname = current_database()"):
            return
