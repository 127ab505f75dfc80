"""Puts of timers that are final from the start, which PostgreSQL keeps in a table where no index sees a live one."""

from __future__ import annotations

import asyncio

import pytest

from duetime.model import Status
from duetime.stores.postgres import PostgresStore
from tests.contract.timers import ended, timer, with_timers


@pytest.fixture
def store(runner: asyncio.Runner, opened, database: str) -> PostgresStore:
    store: PostgresStore = runner.run(opened(database))
    return store


async def test_a_batch_of_all_kinds_says_what_was_written(store: PostgresStore) -> None:
    await with_timers(store, taken := ended("c", Status.COMPLETED))
    assert await store.put_many([timer("a"), ended("b", Status.FAILED), timer("c")]) == [None, None, taken]
