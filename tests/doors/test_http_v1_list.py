"""Lists of the HTTP v1 API: filters, orders, and pages that stay complete while timers are created and deleted."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from tests.doors.http_v1 import ONCE, URL, HttpV1, failure, success
from tests.servers import Receiver, Reply, instant, printed


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-list"), DUETIME_RETENTION="forever") as service:
        yield service
        assert "Traceback" not in service.stderr or "RecursionError" in service.stderr, service.stderr


def filled(service: HttpV1, namespace: str, count: int, **fields: Any) -> list[str]:
    """Create timers with shuffled times in a new namespace; returns their ids, oldest first."""
    service.namespace(namespace)
    start = service.at(50_000)
    items = [
        {
            "namespace": namespace,
            "id": f"{n:04d}",
            "callbackUrl": URL,
            "executeAt": printed(start + timedelta(seconds=n * 7919 % count)),
            **fields,
        }
        for n in range(count)
    ]
    assert {result["status"] for result in service.batch(items)} == {200}
    return [item["id"] for item in items]


def ids(timers: list[dict[str, Any]]) -> list[str]:
    return [timer["id"] for timer in timers]


class TestOrder:
    def test_list_is_newest_first(self, service: HttpV1) -> None:
        made = filled(service, "newest", 25)
        assert ids(service.pages("namespace=newest", 1000)) == made[::-1]
        assert ids(service.pages("namespace=newest", 7)) == made[::-1]
        everywhere = [timer for timer in service.pages("", 500) if timer["namespace"] == "newest"]
        assert ids(everywhere) == made[::-1]

    def test_pending_timers_are_ordered_by_due_time(self, service: HttpV1) -> None:
        filled(service, "pending", 25)
        timers = service.pages("namespace=pending&status=pending", 4)
        times = [timer["executeAt"] for timer in timers]
        assert len(set(ids(timers))) == 25 and times == sorted(times)

    def test_waiting_retry_is_ordered_by_its_next_attempt(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("waiting")
        policy = {"initialInterval": "1h", "maxInterval": "1h", "jitter": False}
        url = receiver.reply("/list-waiting", Reply(500))
        waits = service.attempt(service.make(url, namespace="waiting", delay="0s", retryPolicy=policy))
        soon, late = (service.make(namespace="waiting", delay=delay) for delay in ("30m", "2h"))
        assert ids(service.pages("namespace=waiting&status=pending", 10)) == ids([soon, waits, late])

    def test_finished_timers_are_ordered_by_their_finish_newest_first(
        self, service: HttpV1, receiver: Receiver
    ) -> None:
        service.namespace("finished")
        url, bad = receiver.url("/list-finished"), receiver.reply("/list-failed", Reply(500))
        done = []
        for n in range(6):
            timer = service.run(bad if n % 2 else url, namespace="finished", retryPolicy=ONCE)
            done.append(timer["id"])
            service.advance("1s")
        assert ids(service.pages("namespace=finished&status=completed", 2)) == done[4::-2]
        assert ids(service.pages("namespace=finished&status=failed", 2)) == done[5::-2]
        everywhere = [t for t in service.pages("status=failed", 2) if t["namespace"] == "finished"]
        assert ids(everywhere) == done[5::-2]
        success(service.api("POST", f"/timers/finished/{done[0]}/replay"))
        service.final({"namespace": "finished", "id": done[0]})
        assert ids(service.pages("namespace=finished&status=completed", 2))[0] == done[0]

    def test_executing_timers_are_listed_until_they_finish(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("executing")
        url = receiver.reply("/list-executing", Reply(hang=True))
        made = [service.make(url, namespace="executing", delay="0s") for _ in range(5)]
        receiver.wait("/list-executing", 5)
        assert sorted(ids(service.pages("namespace=executing&status=executing", 2))) == sorted(ids(made))
        assert sorted(ids(service.pages("status=executing", 2))) == sorted(ids(made))
        receiver.release()
        for timer in made:
            service.final(timer)
        assert service.pages("status=executing", 2) == []

    def test_time_window_is_soonest_first(self, service: HttpV1) -> None:
        filled(service, "window", 20)
        timers = sorted(service.pages("namespace=window", 100), key=lambda timer: instant(timer["executeAt"]))
        after, before = timers[5]["executeAt"], timers[15]["executeAt"]
        query = "namespace=window&executeAfter={}&executeBefore={}".format
        assert ids(service.pages(query(after, before), 3)) == ids(timers[5:15])  # includes the start, excludes the end
        assert ids(service.pages(f"namespace=window&executeAfter={after}", 3)) == ids(timers[5:])
        assert ids(service.pages(f"namespace=window&executeBefore={before}", 3)) == ids(timers[:15])
        assert ids(service.pages(query(after, before) + "&status=pending", 3)) == ids(timers[5:15])
        assert service.pages(query(after, before) + "&status=failed", 3) == service.pages(query(after, after), 3) == []
        offset = quote(instant(after).isoformat())
        assert ids(service.pages(query(offset, before), 3)) == ids(timers[5:15])


class TestFilters:
    def test_filter_by_correlation_id(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("together")
        names = ("together", "default", "together")
        made = [service.make(namespace=name, correlationId="a b&c=ü", delay="1h") for name in names]
        service.make(correlationId="a b&c=ü2")
        done = service.run(receiver.url("/correlated"), namespace="together", correlationId="a b&c=ü")
        filters = f"correlationId={quote('a b&c=ü')}"
        assert ids(service.pages(filters, 2)) == ids([done, *made[::-1]])
        assert ids(service.pages(filters + "&namespace=together", 2)) == ids([done, made[2], made[0]])
        assert ids(service.pages(filters + "&namespace=together&status=completed", 2)) == [done["id"]]
        assert ids(service.pages(filters + f"&executeBefore={service.ahead(5)}", 2)) == [done["id"]]
        assert service.pages("correlationId=nobody", 2) == service.pages("correlationId=", 2) == []

    def test_id_filter_finds_timers_in_all_namespaces(self, service: HttpV1) -> None:
        names = ("mine", "yours", "default")
        for name in names[:2]:
            service.namespace(name)
        made = [service.make(namespace=name, id="a b/c&ü", correlationId=name) for name in names]
        service.make(namespace="mine", id="a b/c&ü2")
        filters = f"id={quote('a b/c&ü')}"
        assert ids(service.pages(filters, 2)) == ids(made)
        assert [timer["namespace"] for timer in service.pages(filters, 2)] == ["default", "yours", "mine"]
        assert service.pages(filters + "&namespace=yours", 2) == [made[1]]
        assert service.pages(filters + "&correlationId=mine&status=pending", 2) == [made[0]]
        assert service.pages(filters + "&status=failed", 2) == service.pages("id=nobody", 2) == []
        assert success(service.api("GET", f"/timers/count?{filters}")) == {"timers": 3, "more": False}

    def test_list_and_get_show_the_same_timer(self, service: HttpV1) -> None:
        service.namespace("shown")
        made = service.make(namespace="shown", payload={"a": "ü"}, metadata=[None], callbackHeaders={"A": "b"})
        assert service.pages("namespace=shown", 1) == [made] == [service.current(made)]

    def test_list_of_an_unknown_namespace_is_empty(self, service: HttpV1) -> None:
        assert service.pages("namespace=nowhere", 5) == []

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            *((f"limit={limit}", "limit") for limit in ("0", "-1", "1001", "x", "", "1.5", "%2B5", "9" * 30)),
            *((f"status={status}", "status") for status in ("", "done", "PENDING", "pending,failed")),
            *((f"namespace={name}", "namespace") for name in ("", "a%20b", "x" * 65, "%00", "%C3%BC")),
            *((f"id={id}", "id") for id in ("", "%00", "%0A", "x" * 256)),
            *((f"executeAfter={at}", "executeAfter") for at in ("", "now", "2030-01-01T00:00:00", "1")),
            *((f"executeBefore={at}", "executeBefore") for at in ("", "30s", "2030-02-30T00:00:00Z")),
            ("limit=5&limit=6", "limit"),
            ("correlationId=%ff", "query"),
            ("&".join(f"a{n}=1" for n in range(100)), "query"),
        ],
    )
    def test_invalid_filters_are_rejected(self, service: HttpV1, query: str, field: str) -> None:
        failure(service.api("GET", f"/timers?{query}"), 400, "INVALID_INPUT", field)
        if field != "limit" or query.count("limit") > 1:  # a count has no limit
            failure(service.api("GET", f"/timers/count?{query}"), 400, "INVALID_INPUT", field)

    @pytest.mark.parametrize(
        ("sent", "hint"),
        [
            *(("2026-01-01T00:00:00+01:00", True), ("2026-01-01T00:00:00.5+0100", True)),
            *(("2026-01-01T00:00:00", False), ("2026-01-01+00:00:00Z", False), ("now", False)),
        ],
    )
    @pytest.mark.parametrize("name", ["executeAfter", "executeBefore"])
    def test_error_for_an_unescaped_plus_says_how_to_write_it(
        self, service: HttpV1, name: str, sent: str, hint: bool
    ) -> None:
        message = failure(service.api("GET", f"/timers?{name}={sent}"), 400, "INVALID_INPUT", name)["message"]
        assert message.endswith("; in a URL, write + as %2B") is hint
        success(service.api("GET", f"/timers?{name}=2026-01-01T00:00:00%2B01:00&limit=1"))

    def test_limit_is_50_by_default_and_1000_at_most(self, service: HttpV1) -> None:
        filled(service, "limits", 60)
        page = success(service.api("GET", "/timers?namespace=limits"))
        assert len(page["timers"]) == 50 and page["nextCursor"]
        for limit in (1, 59):
            page = success(service.api("GET", f"/timers?namespace=limits&limit={limit}"))
            assert len(page["timers"]) == limit and page["nextCursor"]
        for limit in (60, 1000):
            page = success(service.api("GET", f"/timers?namespace=limits&limit={limit}"))
            assert len(page["timers"]) == 60 and page["nextCursor"] is None


class TestCounts:
    @pytest.mark.parametrize(
        "query",
        [
            "namespace=counted",
            "namespace=counted&status=pending",
            "namespace=counted&status=failed",
            "namespace=counted&status=executing",
            "correlationId=counted",
            "correlationId=counted&namespace=default",
            "namespace=counted&id=0007",
            "executeAfter={}&namespace=counted",
            "executeBefore={}&namespace=counted&status=pending",
            "executeBefore={}&namespace=counted&status=canceled",
        ],
    )
    def test_count_equals_the_length_of_the_list(self, service: HttpV1, query: str) -> None:
        made = service.pages("namespace=counted", 100)
        if not made:
            filled(service, "counted", 40, correlationId="counted")
            made = service.pages("namespace=counted", 100)
        filters = query.format(made[17]["executeAt"])
        listed = len(service.pages(filters, 100))
        assert success(service.api("GET", f"/timers/count?{filters}")) == {"timers": listed, "more": False}

    def test_count_without_filters_counts_all_timers(self, service: HttpV1) -> None:
        counted = success(service.api("GET", "/timers/count"))
        assert counted == {"timers": len(service.pages("", 1000)), "more": False}

    def test_filtered_count_stops_at_10000(self, service: HttpV1) -> None:
        """Counts from the tallies, such as those by namespace, have no limit."""
        items = [{"namespace": "crowd", "delay": "10h", "callbackUrl": URL, "correlationId": "crowd"}] * 1000
        service.namespace("crowd")
        for _ in range(10):
            service.batch(items)
        by_correlation = "/timers/count?correlationId=crowd"
        assert success(service.api("GET", by_correlation)) == {"timers": 10_000, "more": False}
        service.batch(items[:1])
        assert success(service.api("GET", by_correlation)) == {"timers": 10_000, "more": True}
        assert success(service.api("GET", "/timers/count?namespace=crowd")) == {"timers": 10_001, "more": False}


class TestCursors:
    @pytest.mark.parametrize("way", ["newest", "pending", "window", "correlation", "completed"])
    def test_pages_are_complete_while_timers_are_created_and_deleted(
        self, service: HttpV1, receiver: Receiver, way: str
    ) -> None:
        name = f"pages-{way}"
        more = {"executeAt": None, "delay": "0s", "callbackUrl": receiver.url("/pages")} if way == "completed" else {}
        made = filled(service, name, 300, correlationId=name, **more)
        query = {
            "newest": f"namespace={name}",
            "pending": f"namespace={name}&status=pending",
            "window": f"namespace={name}&executeAfter=2000-01-01T00:00:00Z",
            "correlation": f"correlationId={name}",
            "completed": f"namespace={name}&status=completed",
        }[way]
        if way == "completed":
            for id in made:
                service.final({"namespace": name, "id": id})
        gone = set(made[::10])
        seen: list[str] = []
        cursor, round = "", 0
        while True:
            page = success(service.api("GET", f"/timers?{query}&limit=23{cursor}"))
            seen += ids(page["timers"])
            if page["nextCursor"] is None:
                break
            cursor = f"&cursor={page['nextCursor']}"
            for n in range(3):  # create some, at both ends of every order
                fields = {"namespace": name, "id": f"new {round} {n}", "correlationId": name}
                if way == "completed":
                    service.run(receiver.url("/pages"), **fields)
                else:
                    service.make(**fields, delay=("9s", "300h", "50300s")[n])
            for id in sorted(gone)[round * 3 : round * 3 + 3]:  # delete some
                success(service.api("DELETE", f"/timers/{name}/{id}"), 204)
            round += 1
        assert round >= 12
        stayed = [id for id in seen if id in set(made) - gone]
        assert len(stayed) == len(set(stayed)) and set(stayed) == set(made) - gone
        assert len(seen) == len(set(seen))

    def test_cursor_can_be_used_again(self, service: HttpV1) -> None:
        filled(service, "again", 9)
        first = success(service.api("GET", "/timers?namespace=again&limit=4"))
        path = f"/timers?namespace=again&limit=4&cursor={first['nextCursor']}"
        assert success(service.api("GET", path)) == success(service.api("GET", path))

    def test_cursor_needs_no_escaping_in_urls(self, service: HttpV1) -> None:
        filled(service, "urls", 3)
        cursor = success(service.api("GET", "/timers?namespace=urls&limit=1"))["nextCursor"]
        assert quote(cursor, safe="") == cursor

    @pytest.mark.parametrize(
        "cursor",
        [
            *("", "x", "====", "%00", "null", "%C3%BC", "A" * 5000, "W10", "e30", "MQ", "bnVsbA", "-_-_"),
            *(
                base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")
                for place in (
                    ["newest"],
                    ["newest", 1],
                    ["newest", "1", 1],
                    ["newest", 1.5, 1],
                    ["newest", None, 1],
                    ["newest", True, 1],
                    ["newest", 2**63, 1],
                    ["newest", 1, 2**64],
                    ["newest", 10**300, 1],
                    ["newest", 1, -(2**63)],
                    ["newest", 1, "1"],
                    ["newest", 1, "of another store"],
                    ["newest", 1, None],
                    ["oldest", 1, 1],
                    ["due", 1, 1],
                    {"order": "newest", "value": 1, "mark": 1},
                )
            ),
        ],
    )
    def test_invalid_cursors_are_rejected(self, service: HttpV1, cursor: str) -> None:
        failure(service.api("GET", f"/timers?cursor={cursor}"), 400, "INVALID_INPUT", "cursor")

    def test_cursor_of_another_list_is_rejected(self, service: HttpV1) -> None:
        filled(service, "another", 3)
        cursor = success(service.api("GET", "/timers?namespace=another&limit=1"))["nextCursor"]
        for other in ("status=pending", "status=failed", "executeAfter=2030-01-01T00:00:00Z"):
            answer = service.api("GET", f"/timers?namespace=another&limit=1&{other}&cursor={cursor}")
            failure(answer, 400, "INVALID_INPUT", "cursor")

    def test_deeply_nested_cursor_is_rejected(self, service: HttpV1) -> None:
        deep = b'["newest",1,1,' + b"[" * 3000 + b"]" * 3000 + b"]"
        cursor = base64.urlsafe_b64encode(deep).decode().rstrip("=")
        failure(service.api("GET", f"/timers?cursor={cursor}"), 400, "INVALID_INPUT", "cursor")
