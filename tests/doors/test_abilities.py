"""A store with few abilities: both APIs reject what it can't do, name the alternatives, and mark estimates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duetime.store import Abilities, Order, TimeSource
from tests.doors.http_v1 import BASE, URL, failure, success
from tests.doors.test_overview import Listening
from tests.few_abilities import FewAbilities, without
from tests.servers import Duetime

Make = Callable[[Abilities], Duetime]

ORDERS = {
    "": Order.NEWEST,
    "namespace=default": Order.NEWEST,
    "id=a": Order.NEWEST,
    "correlationId=a": Order.NEWEST,
    "executeAfter=2030-01-01T00:00:00Z": Order.SOONEST,
    "executeBefore=2030-01-01T00:00:00Z&status=failed": Order.SOONEST,
    "status=pending": Order.DUE,
    "status=executing": Order.DEADLINE,
    **{f"status={status}": Order.FINISHED for status in ("completed", "failed", "canceled")},
}
"""The order that a list needs, by its query."""
FEW = Abilities(
    orders=frozenset({Order.NEWEST, Order.DUE}),
    offset_max=10,
    counts_exactly=False,
    expires_history=True,
    time_source=TimeSource.MACHINE,
)


@pytest.fixture(scope="module")
def with_abilities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Starts one service for each set of abilities."""
    started: dict[str, FewAbilities] = {}

    def make(abilities: Abilities) -> Duetime:
        name = repr((sorted(abilities.orders), abilities.offset_max, abilities.counts_exactly))
        if name not in started:
            started[name] = FewAbilities(tmp_path_factory.mktemp("few-abilities"), abilities)
            success(started[name].request("POST", BASE + "/timers", json={"delay": "1h", "callbackUrl": URL}))
        return started[name]

    yield make
    for service in started.values():
        assert "Traceback" not in service.stderr, service.stderr
        service.kill()


@pytest.mark.parametrize("missing", Order)
def test_only_lists_that_need_the_missing_order_are_rejected(with_abilities: Make, missing: Order) -> None:
    service = with_abilities(without(missing))
    for query, order in ORDERS.items():
        answer = service.request("GET", f"{BASE}/timers?{query}")
        if order is not missing:
            success(answer)
            continue
        field = next((name for name in ("id", "correlationId", "executeAfter", "executeBefore") if name in query), "")
        error = failure(answer, 400, "UNSUPPORTED", field or "status")
        assert "It can list: " in error["message"], error
    tallied = {"", "namespace=default", *(f"status={status}" for status in ("pending", "executing", "failed"))}
    for query, order in ORDERS.items():
        refused = order is missing and query not in tallied and not query.startswith("status=")
        answer = service.request("GET", f"{BASE}/timers/count?{query}")
        assert answer.status == (400 if refused else 200), (query, answer)


@pytest.mark.parametrize("missing", Order)
def test_error_of_a_rejected_list_names_all_other_lists(with_abilities: Make, missing: Order) -> None:
    query = next(query for query, order in ORDERS.items() if order is missing)
    message = with_abilities(without(missing)).request("GET", f"{BASE}/timers?{query}").body["message"]
    refused, _, instead = message.partition("It can list: ")
    assert instead.count("; ") == len(Order) - 2
    assert refused.partition("can't list ")[2].strip(". ") not in instead


def test_error_names_a_filter_as_the_request_body_spells_it(with_abilities: Make) -> None:
    service = with_abilities(without(Order.SOONEST))
    body = {"executeBefore": "2030-01-01T00:00:00Z"}
    for verb in ("cancel", "replay"):
        answer = service.request("POST", f"{BASE}/timers/{verb}", json=body)
        failure(answer, 400, "UNSUPPORTED", "executeBefore")
    # A change by filter counts what it has changed, so this count is exact.
    assert success(service.request("POST", BASE + "/timers/replay", json={})) == {"replayed": 0, "more": False}


def test_cancel_and_replay_without_the_order_they_need_are_rejected(with_abilities: Make) -> None:
    for missing, verb in ((Order.DUE, "cancel"), (Order.FINISHED, "replay")):
        answer = with_abilities(without(missing)).request("POST", f"{BASE}/timers/{verb}", json={"namespace": "*"})
        failure(answer, 400, "UNSUPPORTED", "status")


@pytest.mark.parametrize(
    ("missing", "sort", "instead"),
    [(Order.NEWEST, "created_at", "use 'execute_at'"), (Order.SOONEST, "execute_at", "use 'created_at'")],
)
def test_platform_api_rejects_a_sort_without_its_order_and_names_the_other(
    with_abilities: Make, missing: Order, sort: str, instead: str
) -> None:
    service = with_abilities(without(missing))
    other = {"created_at": "execute_at", "execute_at": "created_at"}[sort]
    assert service.request("GET", f"/timers?sort={other}").body["data"]["total"] == 1
    answer = service.request("GET", f"/timers?sort={sort}")
    assert (answer.status, answer.body["code"], answer.body["data"]) == (400, 5, {"field": "sort"})
    assert answer.body["message"].startswith(f"sort can't be '{sort}'") and instead in answer.body["message"]


def test_offset_above_the_stores_maximum_is_rejected(with_abilities: Make) -> None:
    service = with_abilities(FEW)
    assert service.request("GET", "/timers?offset=10").status == 200
    answer = service.request("GET", "/timers?offset=11")
    assert (answer.status, answer.body["code"], answer.body["data"]) == (400, 5, {"field": "offset"})
    assert "at most 10" in answer.body["message"]


def counts(service: Duetime) -> list[dict[str, Any]]:
    """Every response object that contains counts."""
    overview = success(service.request("GET", BASE + "/overview"))
    with Listening(service) as listening:
        pulse = listening.pulse()
    return [
        success(service.request("GET", BASE + "/timers/count")),
        success(service.request("GET", BASE + "/timers/count?correlationId=a")),
        service.request("GET", "/timers").body["data"],
        *(overview, overview["overdue"], *overview["forecast"]["hour"], *overview["forecast"]["day"]),
        pulse,
    ]


def test_estimates_are_marked(with_abilities: Make) -> None:
    assert {json.dumps(count.get("estimated")) for count in counts(with_abilities(FEW))} == {"true"}


def test_exact_counts_are_not_marked(with_abilities: Make) -> None:
    assert not any("estimated" in count for count in counts(with_abilities(Abilities())))


def test_failures_that_can_not_be_listed_are_left_out_of_the_overview(with_abilities: Make) -> None:
    assert success(with_abilities(FEW).request("GET", BASE + "/overview"))["failures"] is None


def test_cluster_and_session_show_the_abilities_of_the_store(with_abilities: Make) -> None:
    service = with_abilities(FEW)
    abilities = {
        "orders": ["newest", "due"],
        "offsetMax": 10,
        "countsExactly": False,
        "expiresHistory": True,
        "timeSource": "machine",
    }
    assert success(service.request("GET", BASE + "/cluster"))["abilities"] == abilities
    key = {"X-API-Key": service.key or ""}
    assert success(service.request("GET", "/session", headers=key))["abilities"] == abilities
    assert "abilities" not in success(service.request("GET", "/session", headers={}))


def test_help_text_of_the_metric_marks_estimates(with_abilities: Make) -> None:
    def help_of(service: Duetime) -> str:
        page: str = service.request("GET", "/metrics").body.decode()
        return next(line for line in page.splitlines() if line.startswith("# HELP duetime_timers "))

    assert "Estimate" in help_of(with_abilities(FEW))
    assert "Estimate" not in help_of(with_abilities(Abilities()))
