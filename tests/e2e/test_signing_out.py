"""Signing out with several processes on one database: all of them refuse the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import Postgres
from tests.servers import KEY, Duetime, until, unused_address

TRIES = 12


@pytest.fixture
def database(postgres18: Postgres) -> Iterator[str]:
    yield (url := postgres18.fresh())
    postgres18.give_back(url)


def sign_in(service: Duetime) -> str:
    answer = service.request("POST", "/session", json={"apiKey": KEY}, headers={}, source=unused_address())
    cookie: str = answer.headers["set-cookie"].split(";")[0]
    return cookie


def status(service: Duetime, cookie: str) -> int:
    """Uses a new connection each time, so that each worker gets requests."""
    return service.request("GET", "/api/v1/timers", headers={"Cookie": cookie}, source=unused_address()).status


def sign_out(service: Duetime, cookie: str) -> None:
    headers = {"Cookie": cookie, "Sec-Fetch-Site": "same-origin"}
    assert service.request("DELETE", "/session", headers=headers, source=unused_address()).status == 204


def test_another_instance_rejects_the_session_at_once(tmp_path: Path, database: str) -> None:
    with (
        Duetime(tmp_path / "a", DATABASE_URL=database) as first,
        Duetime(tmp_path / "b", DATABASE_URL=database) as second,
    ):
        mine, other = sign_in(first), sign_in(second)
        assert {status(service, cookie) for service in (first, second) for cookie in (mine, other)} == {200}
        sign_out(first, mine)
        assert [status(service, mine) for service in (second, first)] == [401, 401]
        assert [status(service, other) for service in (second, first)] == [200, 200]


def test_every_worker_rejects_the_session_at_once(tmp_path: Path, database: str) -> None:
    with Duetime(tmp_path, DATABASE_URL=database, DUETIME_WORKERS="2") as service:
        until("both workers serve", lambda: len(service.request("GET", "/api/v1/cluster").body["instances"]) == 2)
        mine, other = sign_in(service), sign_in(service)
        assert {status(service, mine) for _ in range(TRIES)} == {200}
        sign_out(service, mine)
        assert {status(service, mine) for _ in range(TRIES)} == {401}
        assert {status(service, other) for _ in range(TRIES)} == {200}
