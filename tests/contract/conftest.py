"""What the contract's tests stand on: a loop that runs coroutine tests, a clock that stands still, and each store."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from duetime.store import Store
from duetime.stores.postgres import PostgresStore
from tests.clocks import ManualClock
from tests.contract.stores import STORES, Contender, postgres
from tests.postgres import Postgres


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    yield runner
    # Closing uvloop hangs when a warning about a transport that a failed test left open becomes an error.
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        runner.close()
    assert not left_open, f"left open: {[str(warning.message) for warning in left_open]}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in the loop that its fixtures used."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}
    pyfuncitem.funcargs["runner"].run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=STORES)
def contender(request: pytest.FixtureRequest) -> Contender:
    return STORES[request.param]


@pytest.fixture
def place(contender: Contender, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """Where the store is to live: an empty folder or an empty database."""
    if contender.server is None:
        yield tmp_path
        return
    server = request.getfixturevalue(contender.server)
    yield (url := server.fresh())
    server.give_back(url)


@pytest.fixture
def store(contender: Contender, runner: asyncio.Runner, place: Path | str, clock: ManualClock) -> Iterator[Store]:
    store = runner.run(contender.opened(place, clock))
    yield store
    runner.run(store.close())


@pytest.fixture
def reopened(contender: Contender, place: Path | str, clock: ManualClock) -> Callable[[Store], Awaitable[Store]]:
    """Closes a store and opens another one on what it left; for stores that leave something."""
    if not contender.reopens:
        pytest.skip("nothing survives this store")

    async def reopen(store: Any) -> Store:
        await store.close()
        return await contender.opened(place, clock)

    return reopen


@pytest.fixture(params=["postgres15", "postgres18"])
def server(request: pytest.FixtureRequest) -> Postgres:
    """Each PostgreSQL, for what only PostgreSQL promises."""
    server: Postgres = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def database(server: Postgres) -> Iterator[str]:
    """The URL of an empty database."""
    yield (url := server.fresh())
    server.give_back(url)


@pytest.fixture
def opened(runner: asyncio.Runner, clock: ManualClock) -> Iterator[Callable[[str], Awaitable[PostgresStore]]]:
    """Opens stores on a database, and closes them after the test, however it ended."""
    stores: list[PostgresStore] = []

    async def open(url: str) -> PostgresStore:
        stores.append(store := await postgres(url, clock))
        return store

    async def close() -> None:
        for store in stores:
            await store.close()

    yield open
    runner.run(close())
