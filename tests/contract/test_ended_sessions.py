"""Sessions that were signed out: every instance sees them, they are forgotten in time, and none is good again."""

from __future__ import annotations

import asyncio
import os

import pytest

from duetime.store import ENDED_SESSIONS_MAX
from duetime.stores import memory, postgres_sessions, sqlite_sessions

HOUR = 3_600_000


async def test_one_that_was_ended_stays_so_and_others_go_on(store) -> None:
    mine, other = os.urandom(16), os.urandom(16)
    assert not await store.session_ended(mine, HOUR)
    for _ in range(2):
        await store.end_session(mine, HOUR, forget_before=0)
        assert await store.session_ended(mine, HOUR)
        assert not await store.session_ended(other, HOUR)


async def test_those_that_ended_by_themselves_are_forgotten(store) -> None:
    old, young, new = (os.urandom(16) for _ in range(3))
    await store.end_session(old, HOUR, forget_before=0)
    await store.end_session(young, 2 * HOUR, forget_before=HOUR)
    assert await store.session_ended(old, HOUR)
    await store.end_session(new, 3 * HOUR, forget_before=HOUR + 1)
    assert [await store.session_ended(id, HOUR) for id in (old, young, new)] == [False, True, True]


async def test_too_many_end_all_that_would_have_ended_with_them(store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENDED_SESSIONS_MAX >= 1000
    for module in (memory, postgres_sessions, sqlite_sessions):
        monkeypatch.setattr(module, "ENDED_SESSIONS_MAX", 10)
    ids = [os.urandom(16) for _ in range(25)]
    for n, id in enumerate(ids):
        await store.end_session(id, HOUR + n, forget_before=0)
        assert all([await store.session_ended(id, HOUR + m) for m, id in enumerate(ids[: n + 1])])
    bystander = os.urandom(16)
    assert await store.session_ended(bystander, HOUR)  # which began before those that were too many
    assert not await store.session_ended(bystander, HOUR + 25)
    await store.end_session(ids[0], 3 * HOUR, forget_before=2 * HOUR)
    assert not await store.session_ended(bystander, HOUR)


async def test_many_at_the_same_time(store, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, postgres_sessions, sqlite_sessions):
        monkeypatch.setattr(module, "ENDED_SESSIONS_MAX", 10)
    ids = [os.urandom(16) for _ in range(40)]
    await asyncio.gather(*(store.end_session(id, HOUR, forget_before=0) for id in ids))
    assert all(await asyncio.gather(*(store.session_ended(id, HOUR) for id in ids)))
