"""The HTTP APIs without a server: the response to each error, failures of the store, and concurrent changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from duetime.deliverer import Deliverer
from duetime.doors.http import Keys, MethodNotAllowed, NotFound, Request, Response, TooBusy, Unauthorized
from duetime.doors.http_v1 import HttpV1Door
from duetime.doors.platform import PlatformDoor
from duetime.errors import (
    InvalidInput,
    NamespaceConflict,
    PayloadTooLarge,
    SecretNotFound,
    StoreFailed,
    StoreIndeterminate,
    StoreUnavailable,
    TimerConflict,
    TimerNotFinal,
    TimerNotFound,
    TimerNotPending,
    UnknownNamespace,
)
from duetime.model import SINGLE_ATTEMPT, HttpTarget, RetryPolicy, Status, Timer
from duetime.namespaces import Namespaces
from duetime.service import Service
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.timetext import format_time
from tests.clocks import START, ManualClock

URL = "http://example.com/"
ID = "123e4567-e89b-42d3-a456-426614174000"
HOUR_MS = 3_600_000


class Anything:
    """A deliverer that accepts every target."""

    async def check(self, target: object) -> None:
        pass


class Racing(MemoryStore):
    """Runs a callback after the first read of a timer, or fails."""

    behind: Callable[[], Awaitable[object]] | None = None
    fails: Exception | None = None

    async def get(self, namespace: str, id: str) -> Timer | None:
        if self.fails:
            raise self.fails
        found = await super().get(namespace, id)
        if self.behind:
            happens, self.behind = self.behind, None
            await happens()
        return found

    async def ping(self) -> None:
        if self.fails:
            raise self.fails


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Racing(self.clock, shards=8)
        deliverers: dict[Any, Deliverer] = {HttpTarget: Anything()}  # type: ignore[dict-item]
        self.namespaces = Namespaces(self.store, self.clock, lambda: None)
        self.service = Service(self.store, self.namespaces, deliverers, self.clock, lambda *timers: None)
        self.telemetry = Telemetry()
        self.http_v1 = HttpV1Door(
            *(self.service, self.namespaces, Keys(None), self.telemetry, None),  # type: ignore[arg-type]
            request_bytes_max=10_000,
            batch_bytes_max=100_000,
            shards=8,
        )
        self.platform = PlatformDoor(self.service, Keys(None), self.telemetry, request_bytes_max=10_000)

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        async def told() -> None:
            await self.store.open()
            await self.namespaces.start()
            await story()

        asyncio.run(told())

    async def put(self, **changes: Any) -> None:
        body = {"id": ID, "delay": "1h", "callbackUrl": URL, **changes}
        await self.http_v1.create(request("POST", body))

    def created(self) -> float:
        page = self.telemetry.page(dict.fromkeys(Status, 0)).decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("duetime_creates_total{"))


class Asked(Request):
    """A request whose body has arrived."""

    sent: bytes

    async def body(self, bytes_max: int) -> bytes:
        return self.sent


def request(method: str, body: object, *parameters: str) -> Request:
    asked = Asked(method, "/")
    asked.parameters = parameters
    asked.sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asked


RETRY = ("retry-after", "1")
DURABLE = [
    (PayloadTooLarge("body", "is large"), 413, "PAYLOAD_TOO_LARGE", None),
    (InvalidInput("id", "is odd"), 400, "INVALID_INPUT", None),
    (UnknownNamespace("n"), 400, "UNKNOWN_NAMESPACE", None),
    (TimerNotFound("default", "a"), 404, "TIMER_NOT_FOUND", None),
    (TimerConflict("default", "a"), 409, "TIMER_CONFLICT", None),
    (TimerNotFinal("pending"), 409, "TIMER_CONFLICT", None),
    (TimerNotPending("cancel", "failed"), 409, "TIMER_NOT_PENDING", None),
    (NamespaceConflict("taken"), 409, "NAMESPACE_CONFLICT", None),
    (SecretNotFound("default", "a"), 404, "SECRET_NOT_FOUND", None),
    (Unauthorized(), 401, "UNAUTHORIZED", ("www-authenticate", "Bearer")),
    (NotFound(), 404, "NOT_FOUND", None),
    (MethodNotAllowed(["GET", "PUT"]), 405, "METHOD_NOT_ALLOWED", ("allow", "GET, PUT")),
    (StoreUnavailable("10.0.0.7 is away"), 503, "UNAVAILABLE", RETRY),
    (StoreIndeterminate("10.0.0.7 is away"), 503, "UNAVAILABLE", RETRY),
    (StoreFailed("10.0.0.7 is away"), 503, "UNAVAILABLE", RETRY),
    (TooBusy("busy"), 503, "UNAVAILABLE", RETRY),
    (ValueError("10.0.0.7 is away"), 500, "INTERNAL_ERROR", None),
]
PLATFORM = [
    (PayloadTooLarge("body", "is large"), 413, 2, None),
    (InvalidInput("id", "is odd"), 400, 2, None),
    (TimerNotPending("cancel", "failed"), 400, 2, None),
    (TimerConflict("default", "a"), 409, 2, None),
    (TimerNotFound("default", "a"), 404, 3, None),
    (NotFound(), 404, 3, None),
    (MethodNotAllowed(["GET", "PUT"]), 405, 2, ("allow", "GET, PUT")),
    (Unauthorized(), 401, 4, None),
    (StoreUnavailable("10.0.0.7 is away"), 503, 1, RETRY),
    (StoreIndeterminate("10.0.0.7 is away"), 503, 1, RETRY),
    (ValueError("10.0.0.7 is away"), 500, 1, None),
]


def told(response: Response) -> tuple[dict[str, Any], dict[str, str]]:
    headers = {name.decode(): value.decode() for name, value in response.headers}
    assert headers.pop("content-type").startswith("application/json")
    assert b"10.0.0.7" not in response.body, "what an error says of the store is for the log"
    said: dict[str, Any] = json.loads(response.body)
    return said, headers


@pytest.mark.parametrize(("error", "status", "code", "header"), DURABLE, ids=lambda value: type(value).__name__)
def test_error_has_its_status_code_and_headers_in_the_v1_api(
    error: Exception, status: int, code: str, header: Any
) -> None:
    response = World().http_v1.refusal(error)
    said, headers = told(response)
    assert (response.status, said["error"], headers) == (status, code, dict([header] if header else []))
    assert said["details"] == ({"field": error.field} if isinstance(error, InvalidInput) else {})


@pytest.mark.parametrize(("error", "status", "code", "header"), PLATFORM, ids=lambda value: type(value).__name__)
def test_error_has_its_status_code_and_headers_in_the_platform_api(
    error: Exception, status: int, code: int, header: Any
) -> None:
    response = World().platform.refusal(error)
    said, headers = told(response)
    assert (response.status, said["code"], headers) == (status, code, dict([header] if header else []))


@pytest.mark.parametrize(
    ("error", "http_v1", "platform"),
    [
        (
            TimerConflict("default", "e1"),
            "a timer with id 'e1' already exists in namespace 'default' with different parameters",
            "this idempotency_key was used with different parameters",
        ),
        (
            TimerNotPending("update", "completed"),
            "can't update a timer with status 'completed'",
            "cannot update timer with status 'completed'",
        ),
        (
            InvalidInput("callback_subject", "must not be one of Duetime's own subjects"),
            "callbackSubject must not be one of Duetime's own subjects",
            "callback.topic must not be one of Duetime's own subjects",
        ),
    ],
)
def test_error_is_described_in_the_terms_of_each_api(error: Exception, http_v1: str, platform: str) -> None:
    world = World()
    assert told(world.http_v1.refusal(error))[0]["message"] == http_v1
    assert told(world.platform.refusal(error))[0]["message"] == platform


def test_errors_from_inner_layers_use_the_field_names_of_the_api() -> None:
    said, _ = told(World().http_v1.refusal(InvalidInput("callback_url", "leads inside")))
    assert (said["details"], said["message"]) == ({"field": "callbackUrl"}, "callbackUrl leads inside")


def test_a_batch_fails_as_a_whole_when_the_store_fails() -> None:
    """A repeat with a time in the past is looked up: if that fails, it is unknown whether it is a repeat."""
    world = World()

    async def story() -> None:
        world.store.fails = StoreUnavailable("away")
        past = {"id": "a", "executeAt": format_time(START - 1), "callbackUrl": URL}
        with pytest.raises(StoreUnavailable):
            await world.http_v1.batch(request("POST", {"timers": [past]}))

    world.run(story)


def test_every_way_to_create_a_timer_is_counted() -> None:
    world = World()

    async def story() -> None:
        body = {"delay": "1h", "callbackUrl": URL}
        await world.http_v1.create(request("POST", body))
        await world.http_v1.upsert(request("POST", body))
        await world.http_v1.batch(request("POST", {"timers": [body, body]}))
        snake = {"execute_at": format_time(START + HOUR_MS), "callback_url": URL}
        await world.platform.create(request("POST", snake))
        assert world.created() == 5

    world.run(story)


def test_every_repeated_create_with_other_parameters_names_the_timer() -> None:
    world = World()

    async def story() -> None:
        await world.put()
        other = {"id": ID, "delay": "1h", "callbackUrl": URL, "payload": "other"}
        with pytest.raises(TimerConflict) as single:
            await world.http_v1.create(request("POST", other))
        batch = await world.http_v1.batch(request("POST", {"timers": [other]}))
        [result] = json.loads(batch.body)["results"]
        expected = f"a timer with id '{ID}' already exists in namespace 'default' with different parameters"
        assert str(single.value) == result["error"]["message"] == expected

    world.run(story)


@pytest.mark.parametrize("door", ["http_v1", "platform"])
def test_an_update_applies_to_the_current_timer(door: str) -> None:
    world = World()

    async def story() -> None:
        await world.put(payload={"n": 1})

        async def happens() -> None:
            await world.http_v1.update(request("PUT", {"payload": {"n": 2}}, "default", ID))

        world.store.behind = happens
        if door == "http_v1":
            await world.http_v1.update(request("PUT", {"callbackMethod": "PUT"}, "default", ID))
        else:
            await world.platform.update(request("PUT", {"callback_method": "PUT"}, ID))
        timer = await world.service.get("default", ID)
        assert bytes(timer.definition.payload) == b'{"n": 2}'
        assert isinstance(timer.definition.target, HttpTarget) and timer.definition.target.method == "PUT"

    world.run(story)


@pytest.mark.parametrize("fails", [StoreUnavailable("away"), TimeoutError()])
def test_health_reports_an_unavailable_store(fails: Exception) -> None:
    world = World()

    async def story() -> None:
        assert (await world.platform.health(request("GET", None))).status == 200
        world.store.fails = fails
        response = await world.platform.health(request("GET", None))
        assert (response.status, json.loads(response.body)["data"]["status"]) == (500, "degraded")

    world.run(story)


@pytest.mark.parametrize(
    ("ahead_ms", "why"),
    [
        *((5_000, None), (4_999, "must be in the future by at least 5 seconds;")),
        *(
            (1, "must be in the future by at least 5 seconds;"),
            (0, "must be in the future;"),
            (-1, "must be in the future;"),
        ),
    ],
)
def test_the_platform_api_requires_a_minimum_lead_time(ahead_ms: int, why: str | None) -> None:
    world = World()

    async def story() -> None:
        asked = request("POST", {"execute_at": format_time(START + ahead_ms), "callback_url": URL})
        if why is None:
            assert (await world.platform.create(asked)).status == 201
            return
        with pytest.raises(InvalidInput) as refused:
            await world.platform.create(asked)
        assert refused.value.field == "execute_at"
        assert refused.value.reason == f"{why} the server's time is {format_time(START)}"

    world.run(story)


def test_updating_a_finished_timer_fails_before_other_validation() -> None:
    world = World()

    async def story() -> None:
        await world.put()
        await world.platform.cancel(request("DELETE", None, ID))
        with pytest.raises(TimerNotPending):
            await world.platform.update(request("PUT", {"execute_at": format_time(START - 1)}, ID))
        with pytest.raises(TimerNotPending):
            await world.http_v1.update(request("PUT", {"executeAt": format_time(START - 1)}, "default", ID))

    world.run(story)


def test_partial_retry_policy_gets_defaults_in_the_platform_api() -> None:
    """In a new timer, missing fields get the defaults of a policy, not those of a timer without one; an update keeps
    them."""
    world = World()

    async def policy(id: str) -> RetryPolicy:
        return (await world.service.get("default", id)).definition.retry

    async def story() -> None:
        body: dict[str, Any] = {"execute_at": format_time(START + HOUR_MS), "callback_url": URL}
        plain = json.loads((await world.platform.create(request("POST", body))).body)["data"]["id"]
        assert await policy(plain) == SINGLE_ATTEMPT
        body["retry_policy"] = {"initial_interval": "7s"}
        made = json.loads((await world.platform.create(request("POST", body))).body)["data"]["id"]
        assert await policy(made) == replace(RetryPolicy(), initial_interval_ms=7_000)
        await world.platform.update(request("PUT", {"retry_policy": {"max_retries": 3}}, made))
        assert await policy(made) == replace(RetryPolicy(), initial_interval_ms=7_000, max_retries=3)

    world.run(story)


def test_a_batch_read_in_parts_has_its_key_once_in_any_notation() -> None:
    world = World()

    async def story() -> None:
        large = json.dumps([{"delay": "1h", "callbackUrl": URL, "payload": "x" * 9_000}] * 2).encode()
        with pytest.raises(InvalidInput, match='"timers" twice'):
            await world.http_v1.batch(request("POST", b'{"timers": %b, "t\\u0069mers": %b}' % (large, large)))

    world.run(story)


def test_each_timer_of_a_batch_may_be_nested_as_deep_as_a_single_one() -> None:
    world = World()

    async def story() -> None:
        deep = b'{"delay": "1h", "callbackUrl": "%b", "payload": %b"\\u00e9"%b}' % (URL.encode(), b"[" * 63, b"]" * 63)
        assert (await world.http_v1.create(request("POST", deep))).status == 200
        large = b'{"delay": "1h", "callbackUrl": "%b", "payload": "%b"}' % (URL.encode(), b"x" * 9_900)
        answer = await world.http_v1.batch(request("POST", b'{"timers": [%b, %b]}' % (deep, large)))
        assert [result["status"] for result in json.loads(answer.body)["results"]] == [200, 200]

    world.run(story)


@pytest.mark.parametrize("door", ["http_v1", "platform"])
@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        *((b"", None), (b" \n", None), (b"{}", None), (b" { } ", None)),
        (b'{"delay": "1d"}', "delay is not a known field; this operation takes no fields"),
        (b'{"reason": "x", "x": 1}', "reason is not a known field; this operation takes no fields"),
        *((b"null", "body must be a JSON object"), (b"[]", "body must be a JSON object")),
        (b"{", "body is not valid JSON: "),
    ],
)
def test_operation_without_fields_accepts_only_an_empty_body(door: str, body: bytes, refusal: str | None) -> None:
    world = World()

    async def story() -> None:
        await world.put()
        apis: dict[str, Any] = {"http_v1": world.http_v1, "platform": world.platform}
        operations = [one for one in apis[door].operations() if one.method != "GET" and one.body is None]
        assert [one.name for one in operations] == {
            "http_v1": ["delete", "cancel", "replay", "add_secret", "delete_secret"],
            "platform": ["platform_cancel"],
        }[door]
        for one in operations:
            key = {"delete_secret": ("default", "x"), "platform_cancel": (ID,)}.get(one.name, ("default", ID))
            try:
                await one.handler(request(one.method, body, *key))
            except InvalidInput as error:
                assert refusal is not None and str(error).startswith(refusal)
            except (TimerNotFound, TimerNotFinal, SecretNotFound):
                assert refusal is None
            else:
                assert refusal is None

    world.run(story)


@pytest.mark.parametrize(
    "extra", [{"callback_url": URL}, {"callback_method": "PUT"}, {"callback_headers": {"x-a": "b"}}]
)
def test_a_nats_callback_must_not_have_http_fields(extra: dict[str, Any]) -> None:
    world = World()

    async def story() -> None:
        body = {"execute_at": format_time(START + HOUR_MS), "callback": {"type": "nats", "topic": "a.b"}, **extra}
        with pytest.raises(InvalidInput, match=r"^callback can.t be combined with callback_url"):
            await world.platform.create(request("POST", body))

    world.run(story)


def test_a_number_with_thousands_of_digits_is_rejected_as_too_large() -> None:
    world = World()

    async def story() -> None:
        asked = request("GET", None)
        asked.query_string = b"limit=" + b"9" * 5_000
        for door in (world.platform, world.http_v1):
            with pytest.raises(InvalidInput, match=r"^limit must be a whole number from 1 to"):
                await door.list(asked)

    world.run(story)
