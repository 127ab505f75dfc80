"""Ended sessions: every instance sees them, expired ones are deleted, and none becomes valid again."""

from __future__ import annotations

import asyncio
import os
import random
import sys

import pytest

from duetime.instants import EPOCH, Instant
from duetime.store import ENDED_SESSIONS_MAX, Store
from duetime.stores import memory
from duetime.stores.mysql import sessions as mysql_sessions
from duetime.stores.postgres import sessions as postgres_sessions
from duetime.stores.sqlite import sessions as sqlite_sessions

HOUR = Instant(3_600_000)


def set_maximum(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    cassandra_sessions = sys.modules.get("duetime.stores.cassandra.sessions")
    for module in (memory, mysql_sessions, postgres_sessions, sqlite_sessions, cassandra_sessions):
        if module is not None:
            monkeypatch.setattr(module, "ENDED_SESSIONS_MAX", most)


async def test_ended_session_stays_ended_and_others_remain_valid(store: Store) -> None:
    mine, other = os.urandom(16), os.urandom(16)
    assert not await store.session_ended(mine, HOUR)
    for _ in range(2):
        await store.end_session(mine, HOUR, forget_before=EPOCH)
        assert await store.session_ended(mine, HOUR)
        assert not await store.session_ended(other, HOUR)


async def test_records_of_expired_sessions_are_deleted(store: Store) -> None:
    old, young, new = (os.urandom(16) for _ in range(3))
    await store.end_session(old, HOUR, forget_before=EPOCH)
    await store.end_session(young, Instant(2 * HOUR), forget_before=HOUR)
    assert await store.session_ended(old, HOUR)
    await store.end_session(new, Instant(3 * HOUR), forget_before=Instant(HOUR + 1))
    assert [await store.session_ended(id, HOUR) for id in (old, young, new)] == [False, True, True]


async def test_reaching_the_maximum_ends_all_sessions_with_an_earlier_expiry(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ENDED_SESSIONS_MAX >= 1000
    set_maximum(monkeypatch, 10)
    ids = [os.urandom(16) for _ in range(25)]
    for n, id in enumerate(ids):
        await store.end_session(id, Instant(HOUR + n), forget_before=EPOCH)
        assert all([await store.session_ended(id, Instant(HOUR + m)) for m, id in enumerate(ids[: n + 1])])
    bystander = os.urandom(16)
    assert await store.session_ended(bystander, HOUR)  # which started before the limit was reached
    assert not await store.session_ended(bystander, Instant(HOUR + 25))
    await store.end_session(ids[0], Instant(3 * HOUR), forget_before=Instant(2 * HOUR))
    assert not await store.session_ended(bystander, HOUR)


async def test_sessions_can_be_ended_concurrently(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    set_maximum(monkeypatch, 3)
    for n in range(10):
        ids = [os.urandom(16) for _ in range(40)]
        ends = [Instant(HOUR + 60 * n + random.randrange(60)) for _ in ids]
        forgotten = Instant(HOUR + 60 * (n - 1))  # deletes rows of the round before
        await asyncio.gather(
            *(store.end_session(*ended, forget_before=forgotten) for ended in zip(ids, ends, strict=True))
        )
        assert all(await asyncio.gather(*(store.session_ended(*ended) for ended in zip(ids, ends, strict=True))))
