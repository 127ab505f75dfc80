"""Lists in the platform API: filters, order, pages and an exact total."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.platform import CREATED, URL, refused, success
from tests.servers import Duetime, Receiver, Reply

COUNT = 230


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Duetime, list[str]]]:
    """A service with many pending timers and one in each other status; and the timers' ids, oldest first."""
    with Duetime(tmp_path_factory.mktemp("listed"), virtual_clock=True) as service, Receiver() as receiver:
        ids = [
            service.create(receiver.url("/completed"), seconds=8),
            service.create(receiver.reply("/failed", Reply(500)), seconds=8),
            service.create(receiver.reply("/executing", Reply(hang=True)), seconds=3600),
        ]
        service.advance()
        for id in ids[:2]:
            service.finished(id)
        ids.append(service.create(URL, seconds=100))
        service.request("DELETE", f"/timers/{ids[3]}")
        # Timers created later are due earlier; groups of three have the same time.
        ids += [service.create(URL, seconds=10**6 - n // 3 * 1000) for n in range(COUNT - len(ids))]
        service.advance("1h")
        receiver.wait("/executing")  # started last, because it times out after thirty seconds
        yield service, ids


def page(service: Duetime, query: str = "") -> dict[str, Any]:
    data: dict[str, Any] = success(service.request("GET", f"/timers{query}"), 200, "success")
    assert set(data) == {"timers", "total", "limit", "offset"}
    assert all(set(timer) == CREATED for timer in data["timers"])
    return data


def ids_of(data: dict[str, Any]) -> list[str]:
    return [timer["id"] for timer in data["timers"]]


def test_default_page_has_the_50_newest_timers(listed: tuple[Duetime, list[str]]) -> None:
    service, ids = listed
    data = page(service)
    assert (data["total"], data["limit"], data["offset"]) == (COUNT, 50, 0)
    assert ids_of(data) == ids[::-1][:50]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("size", [1, 7, 50, 200])
def test_pages_contain_every_timer_once(listed: tuple[Duetime, list[str]], order: str, size: int) -> None:
    service, ids = listed
    wanted = ids if order == "asc" else ids[::-1]
    step = size if size > 1 else 23
    for offset in range(0, COUNT + step, step):
        data = page(service, f"?limit={size}&offset={offset}&order={order}")
        assert (data["total"], data["limit"], data["offset"]) == (COUNT, size, offset)
        assert ids_of(data) == wanted[offset : offset + size]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_list_can_be_sorted_by_execute_at(listed: tuple[Duetime, list[str]], order: str) -> None:
    service, ids = listed
    seen: list[dict[str, Any]] = []
    for offset in (0, 100, 200):
        seen += page(service, f"?sort=execute_at&order={order}&limit=100&offset={offset}")["timers"]
    assert sorted(timer["id"] for timer in seen) == sorted(ids)
    times = [timer["execute_at"] for timer in seen]
    assert times == sorted(times, reverse=order == "desc") != sorted(times, reverse=order == "asc")


def test_list_can_be_sorted_by_created_at(listed: tuple[Duetime, list[str]]) -> None:
    service, ids = listed
    assert ids_of(page(service, "?sort=created_at&order=asc&limit=200")) == ids[:200]


@pytest.mark.parametrize(
    ("status", "place"), [("completed", 0), ("failed", 1), ("executing", 2), ("canceled", 3), ("pending", None)]
)
def test_list_can_be_filtered_by_status(listed: tuple[Duetime, list[str]], status: str, place: int | None) -> None:
    service, ids = listed
    data = page(service, f"?status={status}&limit=200&order=asc")
    wanted = ids[4:] if place is None else [ids[place]]
    assert data["total"] == len(wanted) and ids_of(data) == wanted[:200]
    assert {timer["status"] for timer in data["timers"]} == {status}
    assert ids_of(page(service, f"?status={status}&offset={len(wanted)}")) == []


def test_all_parameters_can_be_combined(listed: tuple[Duetime, list[str]]) -> None:
    service, ids = listed
    data = page(service, "?status=pending&limit=20&offset=1&sort=execute_at&order=desc")
    assert (data["total"], data["limit"], data["offset"], len(data["timers"])) == (COUNT - 4, 20, 1, 20)
    assert set(ids_of(data)) <= set(ids[4:])


def test_limits_and_offsets_include_their_bounds(listed: tuple[Duetime, list[str]]) -> None:
    service, _ = listed
    assert len(page(service, "?limit=200")["timers"]) == 200
    assert len(page(service, "?limit=1")["timers"]) == 1
    assert page(service, "?offset=1000000000")["timers"] == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        *((f"?limit={text}", "limit") for text in ("0", "201", "-1", "x", "", "1.5", "1e2", "%31%30x", "9" * 30, "٣")),
        *((f"?offset={text}", "offset") for text in ("-1", "x", "", "1.0", "99999999999999999999", "+1")),
        *((f"?status={text}", "status") for text in ("", "PENDING", "done", "pending,failed", "pending%00")),
        *((f"?sort={text}", "sort") for text in ("", "id", "updated_at", "created_at;drop")),
        *((f"?order={text}", "order") for text in ("", "up", "ASC")),
        ("?limit=1&limit=2", "limit"),
        ("?status=pending&status=failed", "status"),
        ("?status=%ff", "query"),
        ("?" + "&".join(f"a{n}=1" for n in range(65)), "query"),
    ],
)
def test_invalid_parameters_are_rejected(listed: tuple[Duetime, list[str]], query: str, field: str) -> None:
    service, _ = listed
    path = "/timers" + "".join(c if ord(c) < 128 else "%D9%A3" for c in query)
    refused(service.request("GET", path), 400, 2, f"^{field} ")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?page=3&limit=2", "^page is not a known query parameter; known: "),
        ("?limit=2&_=1", "^_ is not a known query parameter; known: "),
        ("?sortOrder=asc", r"^sortOrder is not a known query parameter; did you mean order\?$"),
        ("?Limit=1", r"^Limit is not a known query parameter; did you mean limit\?$"),
        ("?" + "x" * 300, '^"x{63}…" is not a known query parameter; known: '),
        ("?%0a=1", r'^"\\n" is not a known query parameter; known: '),
    ],
)
def test_unknown_parameters_are_rejected(listed: tuple[Duetime, list[str]], query: str, message: str) -> None:
    service, _ = listed
    refused(service.request("GET", f"/timers{query}"), 400, 2, message)


def test_total_follows_every_change(listed: tuple[Duetime, list[str]], tmp_path: Any) -> None:
    with Duetime(tmp_path, virtual_clock=True) as service, Receiver() as receiver:
        assert page(service) == {"timers": [], "total": 0, "limit": 50, "offset": 0}
        ids = [service.create(receiver.url("/total"), seconds=8) for _ in range(3)]
        assert (service.total(), service.total("pending")) == (3, 3)
        service.request("DELETE", f"/timers/{ids[0]}")
        assert (service.total(), service.total("pending"), service.total("canceled")) == (3, 2, 1)
        service.advance()
        service.finished(ids[1])
        service.finished(ids[2])
        assert (service.total(), service.total("pending"), service.total("completed")) == (3, 0, 2)
        service.kill()
        service.start()
        assert (service.total(), service.total("canceled"), service.total("completed")) == (3, 1, 2)
