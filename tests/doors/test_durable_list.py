"""Lists of the durable door: filters, orders, and pages that stay right while timers come and go."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from tests.doors.durable import ONCE, URL, Durable, failure, success
from tests.servers import Receiver, Reply, instant, printed


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-list"), DUETIME_RETENTION="forever") as door:
        yield door
        assert "Traceback" not in door.stderr or "RecursionError" in door.stderr, door.stderr


def filled(door: Durable, namespace: str, count: int, **fields: Any) -> list[str]:
    """Make so many timers in a namespace of their own, their times all mixed up; their ids, oldest first."""
    door.namespace(namespace)
    start = door.at(50_000)
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
    assert {result["status"] for result in door.batch(items)} == {200}
    return [item["id"] for item in items]


def ids(timers: list[dict[str, Any]]) -> list[str]:
    return [timer["id"] for timer in timers]


class TestOrder:
    def test_newest_first(self, door: Durable) -> None:
        made = filled(door, "newest", 25)
        assert ids(door.pages("namespace=newest", 1000)) == made[::-1]
        assert ids(door.pages("namespace=newest", 7)) == made[::-1]
        everywhere = [timer for timer in door.pages("", 500) if timer["namespace"] == "newest"]
        assert ids(everywhere) == made[::-1]

    def test_pending_ones_by_when_they_are_due(self, door: Durable) -> None:
        filled(door, "pending", 25)
        timers = door.pages("namespace=pending&status=pending", 4)
        times = [timer["executeAt"] for timer in timers]
        assert len(set(ids(timers))) == 25 and times == sorted(times)

    def test_a_retry_that_waits_is_due_when_it_is_due(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("waiting")
        policy = {"initialInterval": "1h", "maxInterval": "1h", "jitter": False}
        url = receiver.reply("/list-waiting", Reply(500))
        waits = door.attempt(door.make(url, namespace="waiting", delay="0s", retryPolicy=policy))
        soon, late = (door.make(namespace="waiting", delay=delay) for delay in ("30m", "2h"))
        assert ids(door.pages("namespace=waiting&status=pending", 10)) == ids([soon, waits, late])

    def test_finished_ones_by_when_they_were(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("finished")
        url, bad = receiver.url("/list-finished"), receiver.reply("/list-failed", Reply(500))
        done = []
        for n in range(6):
            timer = door.run(bad if n % 2 else url, namespace="finished", retryPolicy=ONCE)
            done.append(timer["id"])
            door.advance("1s")
        assert ids(door.pages("namespace=finished&status=completed", 2)) == done[4::-2]
        assert ids(door.pages("namespace=finished&status=failed", 2)) == done[5::-2]
        everywhere = [t for t in door.pages("status=failed", 2) if t["namespace"] == "finished"]
        assert ids(everywhere) == done[5::-2]
        success(door.api("POST", f"/timers/finished/{done[0]}/replay"))
        door.final({"namespace": "finished", "id": done[0]})
        assert ids(door.pages("namespace=finished&status=completed", 2))[0] == done[0]

    def test_executing_ones(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("executing")
        url = receiver.reply("/list-executing", Reply(hang=True))
        made = [door.make(url, namespace="executing", delay="0s") for _ in range(5)]
        receiver.wait("/list-executing", 5)
        assert sorted(ids(door.pages("namespace=executing&status=executing", 2))) == sorted(ids(made))
        assert sorted(ids(door.pages("status=executing", 2))) == sorted(ids(made))
        receiver.release()
        for timer in made:
            door.final(timer)
        assert door.pages("status=executing", 2) == []

    def test_a_time_window_soonest_first(self, door: Durable) -> None:
        filled(door, "window", 20)
        timers = sorted(door.pages("namespace=window", 100), key=lambda timer: instant(timer["executeAt"]))
        after, before = timers[5]["executeAt"], timers[15]["executeAt"]
        query = "namespace=window&executeAfter={}&executeBefore={}".format
        assert ids(door.pages(query(after, before), 3)) == ids(timers[5:15])  # from this one on, up to that one
        assert ids(door.pages(f"namespace=window&executeAfter={after}", 3)) == ids(timers[5:])
        assert ids(door.pages(f"namespace=window&executeBefore={before}", 3)) == ids(timers[:15])
        assert ids(door.pages(query(after, before) + "&status=pending", 3)) == ids(timers[5:15])
        assert door.pages(query(after, before) + "&status=failed", 3) == door.pages(query(after, after), 3) == []
        offset = quote(instant(after).isoformat())
        assert ids(door.pages(query(offset, before), 3)) == ids(timers[5:15])


class TestFilters:
    def test_a_correlation_id(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("together")
        names = ("together", "default", "together")
        made = [door.make(namespace=name, correlationId="a b&c=ü", delay="1h") for name in names]
        door.make(correlationId="a b&c=ü2")
        done = door.run(receiver.url("/correlated"), namespace="together", correlationId="a b&c=ü")
        asked = f"correlationId={quote('a b&c=ü')}"
        assert ids(door.pages(asked, 2)) == ids([done, *made[::-1]])
        assert ids(door.pages(asked + "&namespace=together", 2)) == ids([done, made[2], made[0]])
        assert ids(door.pages(asked + "&namespace=together&status=completed", 2)) == [done["id"]]
        assert ids(door.pages(asked + f"&executeBefore={door.ahead(5)}", 2)) == [done["id"]]
        assert door.pages("correlationId=nobody", 2) == door.pages("correlationId=", 2) == []

    def test_an_id(self, door: Durable) -> None:
        names = ("mine", "yours", "default")
        for name in names[:2]:
            door.namespace(name)
        made = [door.make(namespace=name, id="a b/c&ü", correlationId=name) for name in names]
        door.make(namespace="mine", id="a b/c&ü2")
        asked = f"id={quote('a b/c&ü')}"
        assert ids(door.pages(asked, 2)) == ids(made)
        assert [timer["namespace"] for timer in door.pages(asked, 2)] == ["default", "yours", "mine"]
        assert door.pages(asked + "&namespace=yours", 2) == [made[1]]
        assert door.pages(asked + "&correlationId=mine&status=pending", 2) == [made[0]]
        assert door.pages(asked + "&status=failed", 2) == door.pages("id=nobody", 2) == []
        assert success(door.api("GET", f"/timers/count?{asked}")) == {"timers": 3, "more": False}

    def test_a_list_shows_what_a_get_shows(self, door: Durable) -> None:
        door.namespace("shown")
        made = door.make(namespace="shown", payload={"a": "ü"}, metadata=[None], callbackHeaders={"A": "b"})
        assert door.pages("namespace=shown", 1) == [made] == [door.see(made)]

    def test_an_unknown_namespace_is_empty(self, door: Durable) -> None:
        assert door.pages("namespace=nowhere", 5) == []

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
    def test_bad_ones(self, door: Durable, query: str, field: str) -> None:
        failure(door.api("GET", f"/timers?{query}"), 400, "INVALID_INPUT", field)
        if field != "limit" or query.count("limit") > 1:  # which a count does not have
            failure(door.api("GET", f"/timers/count?{query}"), 400, "INVALID_INPUT", field)

    def test_limits(self, door: Durable) -> None:
        filled(door, "limits", 60)
        page = success(door.api("GET", "/timers?namespace=limits"))
        assert len(page["timers"]) == 50 and page["nextCursor"]
        for limit in (1, 59):
            page = success(door.api("GET", f"/timers?namespace=limits&limit={limit}"))
            assert len(page["timers"]) == limit and page["nextCursor"]
        for limit in (60, 1000):
            page = success(door.api("GET", f"/timers?namespace=limits&limit={limit}"))
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
    def test_as_many_as_the_list_has(self, door: Durable, query: str) -> None:
        made = door.pages("namespace=counted", 100)
        if not made:
            filled(door, "counted", 40, correlationId="counted")
            made = door.pages("namespace=counted", 100)
        asked = query.format(made[17]["executeAt"])
        listed = len(door.pages(asked, 100))
        assert success(door.api("GET", f"/timers/count?{asked}")) == {"timers": listed, "more": False}

    def test_of_all(self, door: Durable) -> None:
        counted = success(door.api("GET", "/timers/count"))
        assert counted == {"timers": len(door.pages("", 1000)), "more": False}

    def test_beyond_what_is_counted(self, door: Durable) -> None:
        """What the tallies know is exact however much it is; what has to be counted is counted up to a bound."""
        items = [{"namespace": "crowd", "delay": "10h", "callbackUrl": URL, "correlationId": "crowd"}] * 1000
        door.namespace("crowd")
        for _ in range(10):
            door.batch(items)
        by_correlation = "/timers/count?correlationId=crowd"
        assert success(door.api("GET", by_correlation)) == {"timers": 10_000, "more": False}
        door.batch(items[:1])
        assert success(door.api("GET", by_correlation)) == {"timers": 10_000, "more": True}
        assert success(door.api("GET", "/timers/count?namespace=crowd")) == {"timers": 10_001, "more": False}


class TestCursors:
    @pytest.mark.parametrize("way", ["newest", "pending", "window", "correlation", "completed"])
    def test_three_hundred_while_others_come_and_go(self, door: Durable, receiver: Receiver, way: str) -> None:
        name = f"pages-{way}"
        more = {"executeAt": None, "delay": "0s", "callbackUrl": receiver.url("/pages")} if way == "completed" else {}
        made = filled(door, name, 300, correlationId=name, **more)
        query = {
            "newest": f"namespace={name}",
            "pending": f"namespace={name}&status=pending",
            "window": f"namespace={name}&executeAfter=2000-01-01T00:00:00Z",
            "correlation": f"correlationId={name}",
            "completed": f"namespace={name}&status=completed",
        }[way]
        if way == "completed":
            for id in made:
                door.final({"namespace": name, "id": id})
        gone = set(made[::10])
        seen: list[str] = []
        cursor, round = "", 0
        while True:
            page = success(door.api("GET", f"/timers?{query}&limit=23{cursor}"))
            seen += ids(page["timers"])
            if page["nextCursor"] is None:
                break
            cursor = f"&cursor={page['nextCursor']}"
            for n in range(3):  # some come, at both ends of every order
                fields = {"namespace": name, "id": f"new {round} {n}", "correlationId": name}
                if way == "completed":
                    door.run(receiver.url("/pages"), **fields)
                else:
                    door.make(**fields, delay=("9s", "300h", "50300s")[n])
            for id in sorted(gone)[round * 3 : round * 3 + 3]:  # some go
                success(door.api("DELETE", f"/timers/{name}/{id}"), 204)
            round += 1
        assert round >= 12
        stayed = [id for id in seen if id in set(made) - gone]
        assert len(stayed) == len(set(stayed)) and set(stayed) == set(made) - gone
        assert len(seen) == len(set(seen))

    def test_a_cursor_can_be_used_again(self, door: Durable) -> None:
        filled(door, "again", 9)
        first = success(door.api("GET", "/timers?namespace=again&limit=4"))
        path = f"/timers?namespace=again&limit=4&cursor={first['nextCursor']}"
        assert success(door.api("GET", path)) == success(door.api("GET", path))

    def test_a_cursor_is_for_urls(self, door: Durable) -> None:
        filled(door, "urls", 3)
        cursor = success(door.api("GET", "/timers?namespace=urls&limit=1"))["nextCursor"]
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
                    ["oldest", 1, 1],
                    ["due", 1, 1],
                    {"order": "newest", "value": 1, "mark": 1},
                )
            ),
        ],
    )
    def test_bad_ones(self, door: Durable, cursor: str) -> None:
        failure(door.api("GET", f"/timers?cursor={cursor}"), 400, "INVALID_INPUT", "cursor")

    def test_one_of_another_list(self, door: Durable) -> None:
        filled(door, "another", 3)
        cursor = success(door.api("GET", "/timers?namespace=another&limit=1"))["nextCursor"]
        for other in ("status=pending", "status=failed", "executeAfter=2030-01-01T00:00:00Z"):
            answer = door.api("GET", f"/timers?namespace=another&limit=1&{other}&cursor={cursor}")
            failure(answer, 400, "INVALID_INPUT", "cursor")

    def test_a_deep_one(self, door: Durable) -> None:
        deep = b'["newest",1,1,' + b"[" * 3000 + b"]" * 3000 + b"]"
        cursor = base64.urlsafe_b64encode(deep).decode().rstrip("=")
        failure(door.api("GET", f"/timers?cursor={cursor}"), 400, "INVALID_INPUT", "cursor")
