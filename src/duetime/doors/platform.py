"""The platform door: ``/timers`` and ``/health``, every answer ``{"code", "message", "data"}``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from duetime.doors import wire
from duetime.doors.http import (
    JSON,
    Forbidden,
    Handler,
    Keys,
    MethodNotAllowed,
    NotFound,
    Request,
    Response,
    TooBusy,
    TooManyWrongKeys,
    TooSlow,
    Unauthorized,
    UnknownCoding,
    locked,
)
from duetime.doors.off_loop import off_loop
from duetime.doors.retry_policy import SnakeRetryPolicy, checked_policy
from duetime.errors import (
    InvalidInput,
    PayloadTooLarge,
    Quarantined,
    StoreError,
    TimerConflict,
    TimerNotFound,
    TimerNotPending,
)
from duetime.identity import fingerprint_of, id_of_key
from duetime.model import (
    ABSENT,
    DEFAULT_NAMESPACE,
    SECOND_MS,
    SINGLE_ATTEMPT,
    BodyFormat,
    Definition,
    HttpTarget,
    NatsTarget,
    ResponseProtocol,
    RetryPolicy,
    Status,
    Target,
    Timer,
)
from duetime.service import NewTimer, Service
from duetime.store import Query, Sort
from duetime.telemetry import Telemetry
from duetime.timetext import format_time, parse_time

AHEAD_MS_MIN = 5 * SECOND_MS
LIMIT_DEFAULT, LIMIT_MAX = 50, 200
OFFSET_MAX = 10**9
KEY_LENGTH_MAX = 255
HEALTH_TIMEOUT_SECONDS = 5.0

SUCCESS, INTERNAL, INVALID, NOT_FOUND, UNAUTHORIZED = range(5)


class Callback(Struct):
    type: str
    topic: str | None = None
    headers: dict[str, str] | None = None


class Fields(Struct):
    """What a create and an update have in common; null means the same as leaving a field out, except in a payload."""

    execute_at: str | None = None
    callback_url: str | None = None
    callback_method: str | None = None
    callback_headers: dict[str, str] | None = None
    callback_payload: Raw = ABSENT
    metadata: Raw = ABSENT
    retry_policy: SnakeRetryPolicy | None = None
    callback: Callback | None = None


class Create(Fields):
    idempotency_key: str | None = None


_create_decoder = msgspec.json.Decoder(Create)
_update_decoder = msgspec.json.Decoder(Fields)


class Summary(Struct):
    id: str
    created_at: str
    execute_at: str
    callback_url: str | None
    callback_method: str | None
    status: Status
    executed_at: str | None


class Updated(Summary):
    updated_at: str


class Full(Updated):
    callback_headers: dict[str, str] | None
    callback_payload: Raw | None
    last_error: str | None
    metadata: Raw | None
    callback: Callback | UnsetType = UNSET  # for NATS


class Envelope(Struct):
    code: int
    message: str
    data: Any


_encode = msgspec.json.Encoder().encode


def _reply(status: int, code: int, message: str, data: object = None) -> Response:
    return Response(status, _encode(Envelope(code, message, data)))


class PlatformDoor:
    def __init__(self, service: Service, keys: Keys, telemetry: Telemetry, *, request_bytes_max: int) -> None:
        self._service = service
        self._keys = keys
        self._telemetry = telemetry
        self._request_bytes_max = request_bytes_max

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {
            "/timers": {"POST": locked(self._keys, self.create), "GET": locked(self._keys, self.list)},
            "/timers/{}": {
                "GET": locked(self._keys, self.get),
                "PUT": locked(self._keys, self.update),
                "DELETE": locked(self._keys, self.cancel),
            },
            "/health": {"GET": self.health},
        }

    def refusal(self, error: Exception) -> Response:
        match error:
            case PayloadTooLarge():
                return _reply(413, INVALID, str(error))
            case InvalidInput(field="callback_subject"):
                return _reply(400, INVALID, f"callback {error.reason}")  # what was refused further in has no topic
            case InvalidInput() | TimerNotPending():
                return _reply(400, INVALID, str(error))
            case TimerConflict():
                return _reply(409, INVALID, str(error))
            case TimerNotFound() | NotFound():
                return _reply(404, NOT_FOUND, str(error))
            case MethodNotAllowed():
                response = _reply(405, INVALID, str(error))
                response.headers = (JSON, (b"allow", ", ".join(error.allowed).encode()))
                return response
            case TooSlow():
                return _reply(408, INVALID, str(error))
            case UnknownCoding():
                return _reply(415, INVALID, str(error))
            case Unauthorized():
                return _reply(401, UNAUTHORIZED, str(error))
            case Quarantined():
                return _reply(500, INTERNAL, str(error))
            case Forbidden():
                return _reply(403, UNAUTHORIZED, str(error))
            case TooManyWrongKeys():
                response = _reply(429, UNAUTHORIZED, str(error))
                response.headers = (JSON, (b"retry-after", b"%d" % error.wait_seconds))
                return response
            case StoreError() | TooBusy():
                reason = f"database error: {error.public}" if isinstance(error, StoreError) else str(error)
                response = _reply(503, INTERNAL, reason)
                response.headers = (JSON, (b"retry-after", b"1"))
                return response
        return _reply(500, INTERNAL, "internal error: the log of the service has the details")

    async def create(self, request: Request) -> Response:
        body = await request.body(self._request_bytes_max)
        fields = await off_loop(request, body, wire.decode, body, Create, _create_decoder)
        if fields.execute_at is None:
            raise InvalidInput("execute_at", "is required")
        if fields.callback_url is None and fields.callback is None:
            raise InvalidInput("callback_url", "is required")
        execute_at = parse_time(fields.execute_at, "execute_at")
        definition = _changed(fields, None)
        key = fields.idempotency_key
        if key is None:
            self._check_ahead(execute_at)
            new = NewTimer(namespace=DEFAULT_NAMESPACE, execute_at=execute_at, definition=definition)
            timer, fresh = await self._service.create(new)
        else:
            fingerprint = await off_loop(request, body, fingerprint_of, definition, execute_at)
            timer, fresh = await self._create_once(key, execute_at, definition, fingerprint)
        if not fresh:
            return _reply(200, SUCCESS, "timer exists already", Summary(*_short(timer)))
        self._telemetry.created("platform")
        return _reply(201, SUCCESS, "timer created successfully", Summary(*_short(timer)))

    async def _create_once(
        self, key: str, execute_at: int, definition: Definition, fingerprint: str
    ) -> tuple[Timer, bool]:
        if not 1 <= len(key) <= KEY_LENGTH_MAX:
            raise InvalidInput("idempotency_key", f"must have 1 to {KEY_LENGTH_MAX} characters")
        id = id_of_key(key)
        try:
            self._check_ahead(execute_at)
        except InvalidInput:
            # A repeat may come when its time is near or past: it gets the first answer, not an error.
            there = await self._service.repeated(DEFAULT_NAMESPACE, id, fingerprint)
            if there is None:
                raise
            return there, False
        new = NewTimer(
            namespace=DEFAULT_NAMESPACE, id=id, execute_at=execute_at, definition=definition, fingerprint=fingerprint
        )
        return await self._service.create(new)

    async def get(self, request: Request) -> Response:
        timer = await self._service.get(DEFAULT_NAMESPACE, _id(request))
        return _reply(200, SUCCESS, "success", _full(timer))

    async def list(self, request: Request) -> Response:
        query = request.query()
        asked = Query(
            namespace=DEFAULT_NAMESPACE,
            status=wire.choice(query, "status", Status, None),
            sort=wire.choice(query, "sort", Sort, Sort.CREATED_AT),
            descending=wire.one_of(query, "order", ("asc", "desc"), "desc") == "desc",
            limit=wire.whole(query, "limit", LIMIT_DEFAULT, 1, LIMIT_MAX),
            offset=wire.whole(query, "offset", 0, 0, OFFSET_MAX),
        )
        timers, total = await self._service.find(asked)
        page = {
            "timers": [Summary(*_short(timer)) for timer in timers],
            "total": total,
            "limit": asked.limit,
            "offset": asked.offset,
        }
        return _reply(200, SUCCESS, "success", page)

    async def update(self, request: Request) -> Response:
        id = _id(request)
        body = await request.body(self._request_bytes_max)
        fields = await off_loop(request, body, wire.decode, body, Fields, _update_decoder)
        execute_at = None if fields.execute_at is None else parse_time(fields.execute_at, "execute_at")
        timer = await self._service.get(DEFAULT_NAMESPACE, id)
        if timer.status is not Status.PENDING:
            raise TimerNotPending("update", timer.status)
        if execute_at is not None:
            self._check_ahead(execute_at)
        change: Callable[[Definition], Definition] = partial(_changed, fields)
        target = change(timer.definition).target
        if target != timer.definition.target:
            await self._service.check_target(target)
        timer = await self._service.update(DEFAULT_NAMESPACE, id, execute_at=execute_at, change=change)
        return _reply(200, SUCCESS, "timer updated successfully", _updated(timer))

    async def cancel(self, request: Request) -> Response:
        timer = await self._service.cancel(DEFAULT_NAMESPACE, _id(request))
        return _reply(200, SUCCESS, "timer canceled successfully", {"id": timer.id, "status": timer.status})

    async def health(self, request: Request) -> Response:
        up = True
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                await self._service.ping()
        except (StoreError, TimeoutError):
            up = False
        data = {
            "status": "up" if up else "degraded",
            "database": "connected" if up else "disconnected",
            "timestamp": format_time(self._service.clock.now()),
        }
        if up:
            return _reply(200, SUCCESS, "healthy", data)
        return _reply(500, INTERNAL, "database connection failed", data)

    def _check_ahead(self, execute_at: int) -> None:
        ahead_ms = execute_at - self._service.clock.now()
        if ahead_ms <= 0:
            raise InvalidInput("execute_at", "must be in the future")
        if ahead_ms < AHEAD_MS_MIN:
            raise InvalidInput("execute_at", "must be in the future by at least 5 seconds")


_NEW = Definition(
    target=HttpTarget(url=""), retry=SINGLE_ATTEMPT, body=BodyFormat.PAYLOAD, protocol=ResponseProtocol.STATUS
)


def _changed(fields: Fields, before: Definition | None) -> Definition:
    """The definition that the fields make, of a new timer or out of the one before."""
    new = before or _NEW
    return msgspec.structs.replace(
        new,
        target=_target(fields, new.target),
        payload=fields.callback_payload or new.payload,
        metadata=fields.metadata or new.metadata,
        retry=new.retry
        if fields.retry_policy is None
        else checked_policy(fields.retry_policy, "retry_policy", RetryPolicy() if before is None else new.retry),
    )


def _target(fields: Fields, old: Target) -> Target:
    url, method, headers = fields.callback_url, fields.callback_method, fields.callback_headers
    if fields.callback is not None:
        if url is not None or method is not None or headers is not None:
            raise InvalidInput("callback", "must not come with callback_url, its method or headers")
        return _nats(fields.callback)
    if isinstance(old, NatsTarget) and url is None:
        if method is not None or headers is not None:
            raise InvalidInput("callback", "is how a NATS timer is changed")
        return old
    before = old if isinstance(old, HttpTarget) else HttpTarget(url="")
    return HttpTarget(
        url=before.url if url is None else wire.check_url(url, "callback_url"),
        method=before.method if method is None else wire.check_method(method, "callback_method"),
        headers=before.headers if headers is None else wire.check_headers(headers, "callback_headers"),
    )


def _nats(callback: Callback) -> NatsTarget:
    if callback.type != "nats":
        raise InvalidInput("callback.type", "must be 'nats'; an HTTP callback is given by callback_url")
    if callback.topic is None:
        raise InvalidInput("callback.topic", "is required")
    return NatsTarget(
        subject=wire.check_subject(callback.topic, "callback.topic"),
        headers=wire.check_headers(callback.headers or {}, "callback.headers"),
    )


def _id(request: Request) -> str:
    return wire.check_uuid(request.parameters[0], "id")


def _time(at: int | None) -> str | None:
    return None if at is None else format_time(at)


def _short(timer: Timer) -> tuple[str, str, str, str | None, str | None, Status, str | None]:
    """What every answer about a timer has: the fields of ``Summary``, in their order."""
    target = timer.definition.target
    url, method = (target.url, target.method) if isinstance(target, HttpTarget) else (None, None)
    created_at, execute_at = format_time(timer.created_at), format_time(timer.execute_at)
    return timer.id, created_at, execute_at, url, method, timer.status, _time(timer.executed_at)


def _callback(target: NatsTarget) -> Callback:
    return Callback("nats", target.subject, target.headers or None)


def _updated(timer: Timer) -> Updated:
    return Updated(*_short(timer), updated_at=format_time(timer.updated_at))


def _full(timer: Timer) -> Full:
    definition = timer.definition
    target = definition.target
    return Full(
        *_short(timer),
        updated_at=format_time(timer.updated_at),
        callback_headers=definition.target.headers or None if isinstance(target, HttpTarget) else None,
        callback=_callback(target) if isinstance(target, NatsTarget) else UNSET,
        callback_payload=definition.payload or None,
        last_error=timer.last_error,
        metadata=definition.metadata or None,
    )
