"""Several instances on one database: they share the work, hand it over without firing twice, and see each other."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.openmetrics import families
from tests.servers import Duetime, Receiver, Reply, until

LEASE: dict[str, Any] = {"DUETIME_LEASE_TTL": "3s"}


@pytest.fixture(params=["postgres18", "mariadb"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server = request.getfixturevalue(request.param)
    yield (url := server.fresh())
    server.give_back(url)


def cluster(service: Duetime) -> list[dict[str, Any]]:
    instances: list[dict[str, Any]] = service.request("GET", "/api/v1/cluster").body["instances"]
    return instances


def shares(service: Duetime) -> list[int]:
    """The number of shards per instance, once each shard has an owner and each instance a fair share; otherwise
    None."""
    answer = service.request("GET", "/api/v1/cluster").body
    owned = sorted(len(instance["shards"]) for instance in answer["instances"])
    return [] if answer["unowned"] or owned[0] < 10 else owned


def soon(service: Duetime, receiver: Receiver, id: str, *, delay: str = "200ms") -> None:
    asked = {"id": id, "delay": delay, "callbackUrl": receiver.url(f"/{id}"), "responseProtocol": "status"}
    assert service.request("POST", "/api/v1/timers", json=asked).status == 200


def test_a_second_instance_takes_its_share_and_gives_it_back(tmp_path: Path, database: str) -> None:
    with Receiver() as receiver, Duetime(tmp_path / "a", DATABASE_URL=database, **LEASE) as first:
        until("one owns all", lambda: shares(first) == [64])
        with Duetime(tmp_path / "b", DATABASE_URL=database, **LEASE) as second:
            until("both own something", lambda: len(shares(first)) == 2)
            until("the same is seen by both", lambda: cluster(first) == cluster(second))
            # Whichever instance gets the request, the owner fires at once.
            for n in range(40):
                soon((first, second)[n % 2], receiver, f"shared-{n}")
            for n in range(40):
                receiver.wait(f"/shared-{n}")
            assert second.terminate() == 0
        until("one owns all again", lambda: shares(first) == [64])
        soon(first, receiver, "alone")
        receiver.wait("/alone")
        assert all(len(receiver.at(f"/shared-{n}")) == 1 for n in range(40))


def test_a_shard_moves_only_when_its_attempts_are_done(tmp_path: Path, database: str) -> None:
    with Receiver() as receiver, Duetime(tmp_path / "a", DATABASE_URL=database, **LEASE) as first:
        url = receiver.reply("/slow", Reply(hang=True))
        for n in range(30):
            asked = {"id": f"slow-{n}", "delay": "0s", "callbackUrl": url, "responseProtocol": "status"}
            assert first.request("POST", "/api/v1/timers", json=asked).status == 200
        receiver.wait("/slow", 30)
        with Duetime(tmp_path / "b", DATABASE_URL=database, **LEASE) as second:
            until("the second owns what was idle", lambda: sum(len(i["shards"]) > 5 for i in cluster(second)) == 2)
            receiver.release()
            until("both own something", lambda: len(shares(first)) == 2)
            until("all are recorded", lambda: second.total("completed") == 30)
    assert len(receiver.at("/slow")) == 30


def test_changes_of_namespaces_reach_the_other_instance(tmp_path: Path, database: str) -> None:
    with (
        Receiver() as receiver,
        Duetime(tmp_path / "a", DATABASE_URL=database, **LEASE) as first,
        Duetime(tmp_path / "b", DATABASE_URL=database, **LEASE) as second,
    ):
        assert first.request("POST", "/api/v1/namespaces", json={"name": "shop"}).status == 201
        assert second.request("GET", "/api/v1/namespaces/shop").status == 200
        assert first.request("PATCH", "/api/v1/namespaces/shop", json={"paused": True}).status == 200
        asked = {"namespace": "shop", "id": "held", "delay": "0s", "callbackUrl": receiver.url("/held")}
        assert second.request("POST", "/api/v1/timers", json=asked).status == 200
        until("it is known", lambda: second.request("GET", "/api/v1/namespaces/shop").body["paused"])
        assert second.request("PATCH", "/api/v1/namespaces/shop", json={"paused": False}).status == 200
        receiver.wait("/held")


# DUETIME_WORKERS.


def workers(service: Duetime) -> list[psutil.Process]:
    assert service.process is not None
    children: list[psutil.Process] = psutil.Process(service.process.pid).children()
    return children


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_share_a_port_and_stop_together(tmp_path: Path, database: str, number: int) -> None:
    with Receiver() as receiver, Duetime(tmp_path, DATABASE_URL=database, DUETIME_WORKERS="2", **LEASE) as service:
        until("both take part", lambda: len(shares(service)) == 2)
        assert {instance["name"].rpartition(":")[2] for instance in cluster(service)} == {
            str(worker.pid) for worker in workers(service)
        }
        for n in range(20):
            soon(service, receiver, f"worker-{n}")
            service.disconnect()  # the next connection may be the other worker's
        for n in range(20):
            receiver.wait(f"/worker-{n}")
        service.signal(number)
        assert service.wait() == 0
        assert service.stderr.count("all outcomes are recorded") == 2 and "Traceback" not in service.stderr


def metric(service: Duetime, name: str) -> dict[str, float]:
    """A metric by its labels, from whichever worker gets the next connection."""
    service.disconnect()
    page = service.request("GET", "/metrics").body.decode()
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (.*)$", page, re.MULTILINE)}


def test_metrics_include_all_workers(tmp_path: Path, database: str) -> None:
    with Receiver() as receiver, Duetime(tmp_path, DATABASE_URL=database, DUETIME_WORKERS="2", **LEASE) as service:
        until("both take part", lambda: len(shares(service)) == 2)
        for n in range(20):
            soon(service, receiver, f"counted-{n}")
            service.disconnect()
        until("all are recorded", lambda: metric(service, "duetime_timers")['status="completed"'] == 20)
        for name in ("timer_commands_received_total", "duetime_lateness_seconds_count"):
            for _ in range(5):
                counted = metric(service, name)
                assert (list(counted), sum(counted.values())) == (['worker="1"', 'worker="2"'], 20)
        headers = {"Accept": "application/openmetrics-text", "X-API-Key": service.key or ""}
        page = families(service.request("GET", "/metrics", headers=headers).body)
        assert sum(sample.value for sample in page["timer_commands_received"].samples) == 20
        one, other = workers(service)
        one.suspend()
        try:
            assert len(metric(service, "duetime_owned_shards")) == 1
        finally:
            one.resume()
        other.kill()
        until("another is there", lambda: other not in workers(service) and len(workers(service)) == 2)
        until("it answers, too", lambda: len(metric(service, "duetime_owned_shards")) == 2)


def test_a_worker_that_dies_is_restarted(tmp_path: Path, database: str) -> None:
    with Receiver() as receiver, Duetime(tmp_path, DATABASE_URL=database, DUETIME_WORKERS="2", **LEASE) as service:
        until("both take part", lambda: len(shares(service)) == 2)
        victim = workers(service)[0]
        victim.kill()
        service.disconnect()
        until("another is there", lambda: len(workers(service)) == 2 and victim not in workers(service))
        until("both take part", lambda: len(shares(service)) == 2 and len(cluster(service)) == 2)
        soon(service, receiver, "after")
        receiver.wait("/after")
        assert "exited with code -9: restarting it" in service.stderr


def test_workers_stop_when_the_parent_process_is_killed(tmp_path: Path, database: str) -> None:
    with Duetime(tmp_path, DATABASE_URL=database, DUETIME_WORKERS="2", **LEASE) as service:
        until("both take part", lambda: len(shares(service)) == 2)
        orphans = workers(service)
        service.kill()
        until("they are gone", lambda: not any(_lives(orphan) for orphan in orphans))
        assert "is gone: finishing attempts in flight" in service.stderr


def test_workers_that_cannot_start_log_the_reason_once_and_exit(tmp_path: Path, database: str) -> None:
    with Duetime(tmp_path / "first", DATABASE_URL=database):
        pass
    service = Duetime(tmp_path, DATABASE_URL=database, DUETIME_WORKERS="2", DUETIME_SHARDS="8", start=False)
    service.spawn()
    assert service.wait() == 2
    assert "the number of shards is fixed, set it to 64" in service.stderr


def test_workers_may_end_at_the_same_instant(tmp_path: Path, database: str) -> None:
    with Duetime(tmp_path / "first", DATABASE_URL=database):
        pass
    few: dict[str, Any] = {"DUETIME_WORKERS": "4", "DUETIME_SHARDS": "8"}
    with Duetime(tmp_path, DATABASE_URL=database, start=False, **few) as service:
        service.spawn()
        until("all are started", lambda: len(workers(service)) == 4)
        service.signal(signal.SIGSTOP)  # so that it notices all exits at once
        until("all have ended", lambda: not any(_lives(worker) for worker in workers(service)))
        service.signal(signal.SIGCONT)
        assert service.wait() == 2
        assert "Traceback" not in service.stderr


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_workers_share_one_generated_key(tmp_path: Path, database: str) -> None:
    with Duetime(tmp_path, bare=True, DATABASE_URL=database, DUETIME_WORKERS="3", start=False) as service:
        service.spawn()
        until("the port is open", lambda: service.stderr.count("is listening on") == 3)
        assert os.stat(tmp_path / "duetime.key").st_mode & 0o777 == 0o600
        assert service.terminate() == 0
