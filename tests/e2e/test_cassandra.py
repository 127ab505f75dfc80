"""The service on Cassandra: two instances share the work, and what the database can't do is rejected with a message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cassandra import Cassandra
from tests.servers import Duetime, Receiver, until, unused_port

pytestmark = pytest.mark.cassandra
LEASE: dict[str, Any] = {"DUETIME_LEASE_TTL": "5s"}


@pytest.fixture
def url(cassandra: Cassandra) -> Iterator[str]:
    yield (url := cassandra.fresh())
    cassandra.give_back(url)


def shares(service: Duetime) -> list[int]:
    """The number of shards per instance, once each shard has an owner and each instance a fair share."""
    answer = service.request("GET", "/api/v1/cluster").body
    owned = sorted(len(instance["shards"]) for instance in answer["instances"])
    return [] if answer["unowned"] or owned[0] < 10 else owned


def status(service: Duetime, id: str) -> str:
    found: str = service.request("GET", f"/api/v1/timers/default/{id}").body["status"]
    return found


def create(service: Duetime, receiver: Receiver, id: str, delay: str) -> None:
    asked = {"id": id, "delay": delay, "callbackUrl": receiver.url(f"/{id}"), "responseProtocol": "status"}
    assert service.request("POST", "/api/v1/timers", json=asked).status == 200


def test_instances_share_the_work_and_take_over(tmp_path: Path, url: str) -> None:
    with Receiver() as receiver, Duetime(tmp_path / "a", DATABASE_URL=url, **LEASE) as first:
        until("one owns all", lambda: shares(first) == [64])
        with Duetime(tmp_path / "b", DATABASE_URL=url, **LEASE) as second:
            until("both own something", lambda: len(shares(first)) == 2)
            for n in range(20):
                create((first, second)[n % 2], receiver, f"shared-{n}", "200ms")
            for n in range(20):
                receiver.wait(f"/shared-{n}")
            create(first, receiver, "canceled", "2s")
            assert second.request("POST", "/api/v1/timers/default/canceled/cancel").status == 200
            create(second, receiver, "later", "3s")
            second.kill()
        receiver.wait("/later")
        until("one owns all again", lambda: shares(first) == [64])
        assert all(len(receiver.at(f"/shared-{n}")) == 1 for n in range(20))
        assert not receiver.at("/canceled")
        until("it is recorded", lambda: status(first, "later") == "completed")


def test_lists_are_rejected_and_counts_are_estimates(tmp_path: Path, url: str) -> None:
    with Receiver() as receiver, Duetime(tmp_path, DATABASE_URL=url, **LEASE) as service:
        create(service, receiver, "once", "0s")
        receiver.wait("/once")
        rejected = service.request("GET", "/api/v1/timers")
        assert rejected.status == 400 and "this database can't list" in rejected.body["message"]
        assert service.request("GET", "/api/v1/overview").status == 200
        assert service.request("GET", "/metrics").status == 200
        assert service.request("GET", "/health").status == 200


def test_acknowledged_timers_survive_a_kill_of_the_node(tmp_path: Path) -> None:
    with Cassandra() as own, Receiver() as receiver, Duetime(tmp_path, DATABASE_URL=own.fresh(), **LEASE) as service:
        for n in range(50):
            create(service, receiver, f"kept-{n}", "2s")
        own.nodes[0].kill()
        until("no failure is reported", lambda: service.request("GET", "/health").status == 500)
        own.nodes[0].start()
        for n in range(50):
            receiver.wait(f"/kept-{n}")
        until("all are recorded", lambda: all(status(service, f"kept-{n}") == "completed" for n in range(50)))


def test_missing_keyspace_is_named(tmp_path: Path, url: str) -> None:
    with Duetime(tmp_path, start=False, DATABASE_URL=f"{url}_none") as service:
        service.spawn()
        assert service.wait() == 2
        assert "the cluster has no keyspace 'test_" in service.stderr and "CREATE KEYSPACE" in service.stderr


def test_service_waits_for_its_database(tmp_path: Path) -> None:
    with (
        unused_port() as port,
        Duetime(tmp_path, start=False, DATABASE_URL=f"cassandra://127.0.0.1:{port}/x") as service,
    ):
        service.spawn()
        until("no message", lambda: "waiting for the database" in service.stderr)
        assert service.terminate() == 0
