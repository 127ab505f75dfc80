"""Fixtures for all tests: database servers, and scheduling of tests that run in parallel.

Each server starts on first use, once per worker. While a test marked ``alone`` runs, all other workers wait.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from duetime.stores.mysql import pool as mysql_pool
from tests.mysql import Mariadb, Mysql, MysqlServer, Tidb
from tests.postgres import Missing, Postgres
from tests.skips import skip

if TYPE_CHECKING:
    from tests.cassandra import Cassandra

S = TypeVar("S")
TIDB_SECONDS_MAX = 60.0


@pytest.fixture(scope="session")
def postgres15() -> Iterator[Postgres]:
    """PostgreSQL 15, the oldest supported version. Tests must leave it running."""
    yield from _postgres(15)


@pytest.fixture(scope="session")
def postgres18() -> Iterator[Postgres]:
    """PostgreSQL 18. Tests must leave it running."""
    yield from _postgres(18)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MysqlServer]:
    """MariaDB 10.11. Tests must leave it running."""
    with _started(Mariadb) as server:
        yield server


@pytest.fixture(scope="session")
def mysql9() -> Iterator[MysqlServer]:
    """MySQL 9. Tests must leave it running."""
    with _started(Mysql) as server:
        yield server


@pytest.fixture(scope="session")
def tidb() -> Iterator[MysqlServer]:
    """TiDB. Tests must leave it running. Its test storage is slow, so the store gets longer timeouts."""
    with _started(Tidb) as server, pytest.MonkeyPatch.context() as patch:
        for patience in ("ANSWER_SECONDS_MAX", "CONNECT_SECONDS_MAX"):
            patch.setattr(mysql_pool, patience, TIDB_SECONDS_MAX)
        yield server


@pytest.fixture(scope="session")
def cassandra() -> Iterator[Cassandra]:
    """One node of Cassandra. Tests must leave it running."""
    from tests.cassandra import Cassandra  # needs the driver, which only its own tests need

    with _started(Cassandra) as server:
        yield server


def _postgres(version: int) -> Iterator[Postgres]:
    with _started(partial(Postgres, version)) as server:
        yield server


def _started(server: Callable[[], S]) -> S:
    try:
        return server()
    except Missing as missing:
        skip(missing)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on databases that most machines lack: only ``make test-tidb`` and ``make test-cassandra`` select
    them."""
    for item in items:
        if isinstance(item, pytest.Function):
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            for name in ("tidb", "cassandra"):
                if name in item.fixturenames or name in values:
                    item.add_marker(name)


_LOCKED_BY_TESTS = Path(__file__).parent
_LOCKED_BY_WAITING_WORKERS = Path(__file__)
_held = ExitStack()
_hold_for_next = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Hold a shared lock during each test and an exclusive lock during tests marked ``alone``; the wait for a lock
    counts in no test's duration.

    A worker keeps the exclusive lock between two such tests, because a fixture of their module may run in the
    background.
    """
    global _hold_for_next
    if not hasattr(item.config, "workerinput"):  # nothing runs in parallel
        return (yield)
    if not _hold_for_next:
        tests = _held.enter_context(_locks(_LOCKED_BY_TESTS))
        # A worker that waits for the exclusive lock blocks new shared ones, so it can't wait forever.
        with _locks(_LOCKED_BY_WAITING_WORKERS) as waiting:
            fcntl.flock(waiting, fcntl.LOCK_EX)
            fcntl.flock(tests, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        _hold_for_next = _is_alone(item) and nextitem is not None and _is_alone(nextitem)
        if not _hold_for_next:
            _held.close()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextmanager
def _locks(path: Path) -> Iterator[int]:
    """A descriptor for locks on ``path``. Its end releases them, and so does the end of a worker that crashes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(descriptor)
