"""Overdue timers by reason: in ``/readyz``, in the overview and in the metrics of a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import Postgres
from tests.proxy import Proxy
from tests.servers import Duetime, Receiver, Reply, until

PAUSED = 40
HANGING = 60


@pytest.fixture
def database(postgres18: Postgres) -> Iterator[str]:
    yield (url := postgres18.fresh())
    postgres18.give_back(url)


def make(service: Duetime, count: int, **fields: Any) -> None:
    asked = {"delay": "0s", "callbackUrl": "http://127.0.0.1:9/", "callbackTimeout": "1h", **fields}
    answer = service.request("POST", "/api/v1/timers/batch", json={"timers": [asked] * count})
    assert answer.status == 200 and not any("error" in result for result in answer.body["results"]), answer


def pause(service: Duetime, namespace: str, paused: bool = True) -> None:
    answer = service.request("PATCH", f"/api/v1/namespaces/{namespace}", json={"paused": paused})
    assert answer.status == 200, answer


def ready(service: Duetime) -> dict[str, Any]:
    answer = service.request("GET", "/readyz")
    assert (answer.status == 200) == (answer.body["status"] == "ready"), answer
    body: dict[str, Any] = answer.body
    return body


def overdue(service: Duetime) -> dict[str, int]:
    """The overdue timers of all instances, by reason."""
    reasons: dict[str, int] = service.request("GET", "/api/v1/overview").body["overdueReasons"]
    return reasons


def advancing_until(what: str, service: Duetime, condition: Callable[[], object]) -> None:
    """Advance the time second by second until a condition holds."""

    def advanced() -> object:
        service.advance("1s")
        return condition()

    until(what, advanced)


def metric(service: Duetime, reason: str) -> str:
    page = service.request("GET", "/metrics").body.decode()
    [line] = [line for line in page.splitlines() if line.startswith(f'duetime_overdue_timers{{reason="{reason}"')]
    return str(line.rpartition(" ")[2])


def test_a_pause_is_reported(tmp_path: Path) -> None:
    with Duetime(tmp_path, virtual_clock=True) as service:
        assert ready(service) == {"status": "ready"} and overdue(service) == {}
        pause(service, "default")
        make(service, PAUSED)

        def told() -> bool:
            service.advance("2s")
            return ready(service) == {"status": "ready", "overdue": {"paused": PAUSED}}

        until("the pause is named", told)
        advancing_until("the heartbeat has it", service, lambda: overdue(service) == {"paused": PAUSED})
        assert (metric(service, "paused"), metric(service, "behind")) == (f"{PAUSED}.0", "0.0")
        pause(service, "default", False)
        advancing_until("nothing is paused", service, lambda: "paused" not in ready(service).get("overdue", {}))


def test_a_hanging_destination_is_reported_and_the_service_is_ready(tmp_path: Path) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, DUETIME_MAX_PER_DESTINATION="5") as service:
        make(service, HANGING, callbackUrl=receiver.reply("/hang", Reply(hang=True)))
        receiver.wait("/hang")

        def told() -> dict[str, Any] | None:
            service.advance("2s")
            body = ready(service)
            return body if "overdue" in body else None

        body = until("the destination is named", told)
        assert body["status"] == "ready" and set(body["overdue"]) == {"destination"}

        def all_told() -> bool:
            service.advance("1s")
            return overdue(service) == {"destination": HANGING - len(receiver.at("/hang"))}

        until("the heartbeat has it", all_told)
        receiver.release()


def test_the_reports_of_all_instances_are_added_up(tmp_path: Path, database: str) -> None:
    lease: dict[str, Any] = {"DUETIME_LEASE_TTL": "3s"}
    with (
        Duetime(tmp_path / "a", DATABASE_URL=database, **lease) as first,
        Duetime(tmp_path / "b", DATABASE_URL=database, **lease) as second,
    ):
        pause(first, "default")
        make(first, PAUSED)
        until("all are counted", lambda: overdue(first) == overdue(second) == {"paused": PAUSED})
        own = [ready(service)["overdue"]["paused"] for service in (first, second)]
        assert sum(own) == PAUSED and all(own)


def test_an_instance_that_has_lost_its_store_is_not_ready(tmp_path: Path, postgres18: Postgres, database: str) -> None:
    with (
        Proxy("127.0.0.1", postgres18.port) as proxy,
        Duetime(tmp_path, virtual_clock=True, DATABASE_URL=proxy.url(database)) as service,
    ):
        proxy.refuse()
        proxy.cut()

        def problem() -> str | None:
            service.advance("2s")
            reason: str | None = ready(service).get("reason")
            return reason

        assert until("it says so", problem) == "the store is slow or does not respond"
        proxy.allow()
        advancing_until("it is ready again", service, lambda: ready(service)["status"] == "ready")
