"""Servers that the tests of all folders share. Each is started when a test first asks for it, once per session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.postgres import Missing, Postgres


@pytest.fixture(scope="session")
def postgres15() -> Iterator[Postgres]:
    """PostgreSQL 15, the oldest that is supported. A test leaves it running."""
    yield from _postgres(15)


@pytest.fixture(scope="session")
def postgres18() -> Iterator[Postgres]:
    """PostgreSQL 18. A test leaves it running."""
    yield from _postgres(18)


def _postgres(version: int) -> Iterator[Postgres]:
    try:
        server = Postgres(version)
    except Missing as missing:
        # Elsewhere a machine may lack a server; where nobody looks at skips, lacking one is a failure.
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(missing))
    with server:
        yield server
