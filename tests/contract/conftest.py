"""Fixtures of the contract tests: an event loop for coroutine tests, a manual clock, and each store."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from duetime.store import Store
from duetime.stores.postgres.store import PostgresStore
from tests.clocks import ManualClock
from tests.contract.stores import STORES, Contender, Opened, Reopen, postgres
from tests.postgres import Postgres


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    yield runner
    # Closing uvloop hangs if the warning about a transport that a failed test left open becomes an error.
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        runner.close()
    assert not left_open, f"left open: {[str(warning.message) for warning in left_open]}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in the event loop of its fixtures."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}
    runner = pyfuncitem.funcargs["runner"]
    assert isinstance(runner, asyncio.Runner)
    runner.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Hold each test against every store, one that reopens its store against those that leave something, and those of
    a module with ``SERVERS_ONLY`` against the stores on an SQL server. Stores that lack an ability that a test needs
    are left out."""
    if "contender" in metafunc.fixturenames:
        needs_more = {"reopened", "has_rows"} & set(metafunc.fixturenames)
        needs_server = getattr(metafunc.module, "SERVERS_ONLY", False)
        needs_sql = needs_server or "has_rows" in metafunc.fixturenames
        needs = [marker.args[0] for marker in metafunc.definition.iter_markers("needs")]
        stores = [
            name
            for name, contender in STORES.items()
            if (contender.reopens or not needs_more)
            and (contender.server is not None or not needs_server)
            and (contender.sql or not needs_sql)
            and all(has(contender.abilities) for has in needs)
        ]
        metafunc.parametrize("contender", stores, indirect=True)


@pytest.fixture
def contender(request: pytest.FixtureRequest) -> Contender:
    return STORES[request.param]


_made: dict[str, list[str]] = {}
"""Databases of each server on which a store was opened and that are otherwise unchanged."""


@pytest.fixture
def place(
    contender: Contender, request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path: Path
) -> Iterator[Path | str]:
    """The location of the store: an empty folder, or a database that contains only a fresh schema."""
    if contender.server is None:
        yield tmp_path
        return
    server: Any = request.getfixturevalue(contender.server)
    made = _made.setdefault(contender.server, [])
    if made:
        url = made.pop()
    else:
        runner.run(_open_once(contender, url := server.fresh()))
        server.remember(url)
    yield url
    if server.restore(url):
        made.append(url)
    else:
        server.give_back(url)


async def _open_once(contender: Contender, url: str) -> None:
    store = await contender.opened(url, ManualClock())
    await store.close()


@pytest.fixture
def store(contender: Contender, runner: asyncio.Runner, place: Path | str, clock: ManualClock) -> Iterator[Store]:
    store = runner.run(contender.opened(place, clock))
    yield store
    runner.run(store.close())


@pytest.fixture
def reopened(contender: Contender, place: Path | str, clock: ManualClock) -> Reopen:
    """Closes a store and opens another one on its data; only for persistent stores."""

    async def reopen(store: Any) -> Store:
        await store.close()
        return await contender.opened(place, clock)

    return reopen


@pytest.fixture(params=["postgres15", "postgres18"])
def server(request: pytest.FixtureRequest) -> Postgres:
    """Each PostgreSQL version, for guarantees of PostgreSQL only."""
    server: Postgres = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def database(server: Postgres) -> Iterator[str]:
    """The URL of an empty database."""
    yield (url := server.fresh())
    server.give_back(url)


@pytest.fixture
def opened(runner: asyncio.Runner, clock: ManualClock) -> Iterator[Opened]:
    """Opens stores on a database, and closes them after the test."""
    stores: list[PostgresStore] = []

    async def open(url: str) -> PostgresStore:
        stores.append(store := await postgres(url, clock))
        return store

    async def close() -> None:
        for store in stores:
            await store.close()

    yield open
    runner.run(close())
