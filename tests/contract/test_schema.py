"""Opening a server database: it is created once, kept, migrated once, and rejected if it does not match."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from duetime.errors import SettingsError
from duetime.model import DEFAULT_NAMESPACE, Status
from duetime.stores.mysql import schema as mysql_schema
from duetime.stores.postgres import schema as postgres_schema
from tests.clocks import START, ManualClock
from tests.contract import stores
from tests.contract.stores import SHARDS, Contender
from tests.contract.timers import (
    ALICE,
    LEASE_MS,
    ended,
    everything,
    holding,
    spread,
    timer,
    with_namespace,
    with_timers,
)

Opened = Callable[[], Awaitable[Any]]
MIGRATIONS: dict[Any, Sequence[object]] = {
    stores.postgres: postgres_schema.MIGRATIONS,
    stores.mysql: mysql_schema.MIGRATIONS,
}


SERVERS_ONLY = True


@pytest.fixture
def place(contender: Contender, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database."""
    assert contender.server is not None
    server = request.getfixturevalue(contender.server)
    yield (url := server.fresh())
    server.give_back(url)


@pytest.fixture
def opened(runner: asyncio.Runner, contender: Contender, place: str, clock: ManualClock) -> Iterator[Opened]:
    """Opens stores on the database, and closes them after the test."""
    made: list[Any] = []

    async def open() -> Any:
        made.append(store := await contender.opened(place, clock))
        return store

    async def close() -> None:
        for store in made:
            await store.close()

    yield open
    runner.run(close())


async def refusal(opened: Opened) -> str:
    with pytest.raises(SettingsError) as raised:
        await opened()
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def test_concurrent_opens_create_the_database_once(opened: Opened) -> None:
    made = await asyncio.gather(*(opened() for _ in range(8)))
    for n, store in enumerate(made):
        await store.put(timer(f"t{n}"))
    assert len(await everything(made[0])) == 8
    assert [n.name for n in await made[1].namespaces()] == [DEFAULT_NAMESPACE]
    assert len(await made[2].claim(ALICE, range(SHARDS), LEASE_MS)) == SHARDS


async def test_different_number_of_shards_is_rejected(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    await opened()
    with monkeypatch.context() as patch:
        patch.setattr(stores, "SHARDS", SHARDS + 1)
        message = await refusal(opened)
    assert "DUETIME_SHARDS is 9" in message
    assert "set it to 8" in message
    await opened()


async def test_newer_schema_is_rejected_and_unchanged(opened: Opened, contender: Contender) -> None:
    store = await opened()
    newer = len(MIGRATIONS[contender.opened]) + 1
    await store._pool.write(f"UPDATE meta SET value = {newer} WHERE name = 'schema'")
    for _ in range(2):
        message = await refusal(opened)
        assert "newer Duetime" in message
        assert f"schema {newer}" in message


async def test_reopening_keeps_all_data(opened: Opened) -> None:
    store = await opened()
    await with_namespace(store, "elsewhere", paused=True)
    await with_timers(store, *spread(20, at=START - 20), ended("done", Status.COMPLETED, namespace="elsewhere"))
    held = await holding(store)
    await store.begin(ALICE, held, 5)
    before = await everything(store), await store.tally(), await store.namespaces()
    await store.close()
    again = await opened()
    assert (await everything(again), await again.tally(), await again.namespaces()) == before
    assert (await again.renew(ALICE, LEASE_MS)).held == held
