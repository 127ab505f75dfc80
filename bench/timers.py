"""The timers of the bench, as requests and as rows, and the store files that hold them before a server starts."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from msgspec import Raw

from duetime.clock import SystemClock
from duetime.identity import new_ids
from duetime.instants import CreatedAt, ExecuteAt, FireAt, Instant
from duetime.model import (
    DEFAULT_NAMESPACE,
    SINGLE_ATTEMPT,
    BodyFormat,
    Definition,
    HttpTarget,
    ResponseProtocol,
    Timer,
)
from duetime.sharding import shard_of
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sqlite.store import SqliteStore

SHARDS = 64
BATCH = 1_000
BATCHES_AT_ONCE, BATCHES_AT_ONCE_POSTGRES = 100, 4
DAY_MS = 86_400_000
HEADERS = {"X-Tenant": "acme"}
_PAYLOAD = '{"due":%s,"order":"8f14e45f-ceea-467f","note":"remind the customer that the basket is still there"}'
_CREATE = (
    '{"execute_at":"{at}","callback_url":"%s","callback_method":"POST","callback_headers":{"X-Tenant":"acme"},'
    '"callback_payload":%s,"metadata":{"source":"bench"}}'
)
_DURABLE = '{"executeAt":"{at}","callbackUrl":"%s","callbackHeaders":{"X-Tenant":"acme"},"payload":%s}'


_ids = new_ids(SystemClock())


def now_ms() -> int:
    return SystemClock().now()


def create_body(url: str) -> str:
    """A create request of about 300 bytes; the load generator fills in ``{at}`` and ``{due}``."""
    return _CREATE % (url, _PAYLOAD % "{due}")


def durable_body(url: str) -> str:
    """The same for the HTTP v1 API."""
    return _DURABLE % (url, _PAYLOAD % "{due}")


def batch_body(url: str, count: int) -> str:
    """A batch of the same; the load generator fills in one instant for all of them."""
    return '{"timers":[' + ",".join([durable_body(url)] * count) + "]}"


def callback_body() -> str:
    """The payload of a callback, without a particular due time."""
    return _PAYLOAD % (10**12)


def timer(url: str, execute_at: int, due: int | None = None) -> Timer:
    """A pending timer as the HTTP platform API would have created it."""
    id = next(_ids)
    revision = random.getrandbits(48)
    definition = Definition(
        target=HttpTarget(url=url, headers=HEADERS),
        payload=Raw((_PAYLOAD % (execute_at if due is None else due)).encode()),
        metadata=Raw(b'{"source":"bench"}'),
        retry=SINGLE_ATTEMPT,
        body=BodyFormat.PAYLOAD,
        protocol=ResponseProtocol.STATUS,
    )
    now = now_ms()
    return Timer(
        namespace=DEFAULT_NAMESPACE,
        id=id,
        shard=shard_of(DEFAULT_NAMESPACE, id, namespace_shards=SHARDS, shards=SHARDS),
        definition=definition,
        execute_at=ExecuteAt(execute_at),
        fire_at=FireAt(execute_at),
        created_at=CreatedAt(now),
        updated_at=Instant(now),
        revision=revision,
        firing=revision,
    )


def at_once(url: str, count: int, due: int) -> Iterator[Timer]:
    return (timer(url, due) for _ in range(count))


def evenly(url: str, per_second: int, seconds: int, first: int) -> Iterator[Timer]:
    return (timer(url, first + n * 1000 // per_second) for n in range(per_second * seconds))


def far_ahead(url: str, count: int) -> Iterator[Timer]:
    """Spread over a year that begins tomorrow, in random order."""
    tomorrow = now_ms() + DAY_MS
    return (timer(url, tomorrow + random.randrange(365 * DAY_MS)) for _ in range(count))


async def fill_store(store: SqliteStore | PostgresStore, timers: Iterable[Timer]) -> None:
    """Open the store, put the timers into it, and write everything to disk."""
    await store.open()
    try:
        rest = iter(timers)
        # Asked at once they share a commit on SQLite; on PostgreSQL they share its few connections.
        at_once = BATCHES_AT_ONCE if isinstance(store, SqliteStore) else BATCHES_AT_ONCE_POSTGRES
        while some := list(islice(rest, BATCH * at_once)):
            some.sort(key=lambda one: one.uuid)  # so they come to each page of the random index once
            await asyncio.gather(*(store.put_many(some[at : at + BATCH]) for at in range(0, len(some), BATCH)))
    finally:
        await store.close()


async def fill(path: Path, timers: Iterable[Timer]) -> None:
    """Put the timers into the file, which is created if necessary."""
    await fill_store(SqliteStore(path, SystemClock(), shards=SHARDS), timers)


def copy(source: Path, to: Path) -> None:
    """Copy a file and sync it to disk, so that no measurement pays for the writeback of the copy."""
    shutil.copy(source, to)
    handle = os.open(to, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def bytes_of(path: Path) -> int:
    """The disk space of the file and its journal."""
    return sum(p.stat().st_size for p in (path, path.with_name(f"{path.name}-wal")) if p.exists())


def remove(path: Path) -> None:
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm", f"{path.name}.lock"):
        path.with_name(name).unlink(missing_ok=True)
