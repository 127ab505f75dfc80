"""Unreadable rows: the service starts, delivers all other timers, and reports the problem."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.postgres import Postgres
from tests.servers import KEY, Duetime, Receiver, until

OTHERS = 10
DAMAGE = (
    ("definition", '{"target":{"type":"pigeon","coop":"north"}}'),
    ("definition", '{"target":'),
    ("attempts", '[[1,1,1,"lost in the post"]]'),
    ("status", "napping"),
)
Run = Callable[..., None]


@pytest.fixture(params=["sqlite", "postgres15"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Run]]:
    """The URL of a store, and a function that runs SQL on it."""
    if request.param == "sqlite":
        path = tmp_path / "timers.db"

        def on_file(statement: str, *values: object) -> None:
            connection = apsw.Connection(str(path))
            connection.execute(statement, values)
            connection.close()

        yield f"sqlite:///{path}", on_file
        return
    server: Postgres = request.getfixturevalue(request.param)
    url = server.fresh()

    def on_server(statement: str, *values: object) -> None:
        for value in values:
            spelled = f"'\\x{value.hex()}'" if isinstance(value, bytes) else "'" + str(value).replace("'", "''") + "'"
            statement = statement.replace("?", spelled, 1)
        server.sql(f"SET search_path = duetime; {statement}", url)

    yield url, on_server
    server.give_back(url)


def api(service: Duetime, method: str, path: str, **more: Any) -> Any:
    answer = service.request(method, f"/api/v1{path}", **more)
    assert answer.status < 300, answer
    return answer.body


def create(service: Duetime, url: str, namespace: str = "default") -> str:
    """Create a timer that is due at once."""
    made = {"namespace": namespace, "delay": "1ms", "callbackUrl": url}
    id: str = api(service, "POST", "/timers", json=made)["id"]
    return id


def metric(service: Duetime, name: str) -> float:
    page = service.request("GET", "/metrics").body.decode()
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_an_unreadable_row_does_not_affect_other_timers(tmp_path: Path, place: tuple[str, Run]) -> None:
    url, sql = place
    with Receiver() as receiver, Duetime(tmp_path / "service", DATABASE_URL=url) as service:
        api(service, "PATCH", "/namespaces/default", json={"paused": True})
        bad = [create(service, receiver.url("/bad")) for _ in DAMAGE]
        others = [create(service, receiver.url("/good")) for _ in range(OTHERS)]
        assert service.terminate() == 0
        for id, (column, value) in zip(bad, DAMAGE, strict=True):
            sql(f"UPDATE timers SET {column} = ? WHERE id = ?", value, id)
        service.start()
        api(service, "PATCH", "/namespaces/default", json={"paused": False})
        receiver.wait("/good", OTHERS)
        until("all are quarantined", lambda: metric(service, "duetime_quarantined_timers") == len(DAMAGE))
        for id in others:
            assert service.finished(id)["status"] == "completed"
        assert not receiver.at("/bad")
        for id in bad:
            for path in (f"/timers/{id}", f"/api/v1/timers/default/{id}"):
                answer = service.request("GET", path)
                assert answer.status == 500 and "quarantined" in str(answer.body), answer
            assert service.request("DELETE", f"/timers/{id}").status == 500
            made = {"id": id, "delay": "1h", "callbackUrl": receiver.url("/bad")}
            answer = service.request("POST", "/api/v1/timers", json=made)
            assert answer.status == 500 and answer.body["error"] == "QUARANTINED", answer
            batch = api(service, "POST", "/timers/batch", json={"timers": [made, {**made, "id": f"beside-{id}"}]})
            assert [result["status"] for result in batch["results"]] == [409, 200], batch  # not the same request
            assert api(service, "GET", f"/timers/default/beside-{id}")["status"] == "pending"
            assert service.stderr.count(f"timer default/{id} can't be read and is quarantined: ") == 1
        listed = api(service, "GET", "/timers?limit=100")["timers"]
        assert {timer["id"] for timer in listed} == {*others, *(f"beside-{id}" for id in bad)}
        assert len(service.request("GET", "/timers?limit=100").body["data"]["timers"]) == OTHERS + len(bad)
        until("it is said", lambda: "quarantined" in service.request("GET", "/readyz").body)
        ready = service.request("GET", "/readyz")
        assert ready.status == 200 and ready.body["quarantined"] == {"timers": len(DAMAGE), "namespaces": 0}
        env = service._env | {"PORT": str(service.port)}
        doctor = [sys.executable, "-m", "duetime", "doctor"]
        said = subprocess.run(doctor, cwd=service.directory, env=env, capture_output=True, text=True, timeout=60)
        assert said.returncode == 1 and f"{len(DAMAGE)} timers are quarantined" in said.stdout, said

        assert service.terminate() == 0  # It can be restarted any number of times.
        service.start()
        assert metric(service, "duetime_quarantined_timers") == len(DAMAGE)
        service.finished(create(service, receiver.url("/good")))


def test_nothing_is_sent_for_an_unreadable_namespace(tmp_path: Path, place: tuple[str, Run]) -> None:
    url, sql = place
    with Receiver() as receiver, Duetime(tmp_path / "service", DATABASE_URL=url) as service:
        api(service, "POST", "/namespaces", json={"name": "odd"})
        api(service, "POST", "/namespaces/odd/secrets")
        api(service, "PATCH", "/namespaces/odd", json={"paused": True})
        timers = [create(service, receiver.url("/odd"), "odd") for _ in range(3)]
        assert service.terminate() == 0
        sql(
            "UPDATE namespaces SET paused = false, definition = ? WHERE name = 'odd'".replace("false", "1 = 0"),
            b'{"x":',
        )
        service.start()
        service.finished(create(service, receiver.url("/good")))
        assert metric(service, "duetime_quarantined_namespaces") == 1
        assert "namespace odd can't be read" in service.stderr
        made = {"namespace": "odd", "delay": "1ms", "callbackUrl": receiver.url("/odd")}
        answer = service.request("POST", "/api/v1/timers", json=made)
        assert answer.status == 500 and "namespace odd is quarantined" in answer.body["message"], answer
        assert api(service, "GET", f"/timers/odd/{timers[0]}")["status"] == "pending"
        until("it is overdue", lambda: "overdue" in service.request("GET", "/readyz").body)
        assert service.request("GET", "/readyz").body["overdue"] == {"paused": 3}
        assert service.request("GET", "/readyz", headers={"X-API-Key": KEY}).status == 200
        assert not receiver.at("/odd")
