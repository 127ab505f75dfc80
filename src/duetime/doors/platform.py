"""The platform API: ``/timers`` and ``/health``; every response is ``{"code", "message", "data"}``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from duetime.doors import wire
from duetime.doors.decode_threads import off_loop
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
from duetime.doors.operation import BODY_ERRORS, Operation, Parameter, routes, without_fields
from duetime.doors.platform_schema import (
    KEY_CHARS_MAX,
    LIMIT_DEFAULT,
    LIMIT_MAX,
    OFFSET_MAX,
    CreatePlatformTimer,
    Health,
    HttpCallback,
    NatsCallback,
    PlatformCanceled,
    PlatformChanges,
    PlatformFailure,
    PlatformPage,
    PlatformSummary,
    PlatformTimer,
    PlatformUpdated,
    RefusedField,
    ShownNatsCallback,
    Success,
    Unhealthy,
)
from duetime.doors.retry_policy import checked_policy
from duetime.errors import (
    InvalidInput,
    PayloadTooLarge,
    Quarantined,
    StoreError,
    TimerConflict,
    TimerNotFound,
    TimerNotPending,
    Unsupported,
)
from duetime.identity import fingerprint_of, id_of_key
from duetime.instants import Instant
from duetime.model import (
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
HEALTH_TIMEOUT_SECONDS = 5.0

SUCCESS, INTERNAL, INVALID, NOT_FOUND, UNAUTHORIZED, UNSUPPORTED = range(6)


_create_decoder = msgspec.json.Decoder(CreatePlatformTimer)
_update_decoder = msgspec.json.Decoder(PlatformChanges)
_encode = msgspec.json.Encoder().encode


def _ok(status: int, message: str, data: object) -> Response:
    return Response(status, _encode(Success(SUCCESS, message, data)))


def _refused(status: int, code: int, message: str, field: str | None = None) -> Response:
    return Response(status, _encode(PlatformFailure(code, message, None if field is None else RefusedField(field))))


def _created(timer: Timer) -> Response:
    response = _ok(201, "timer created successfully", PlatformSummary(*_short(timer)))
    response.location = b"/timers/" + timer.id.encode()
    return response


def refusal(error: Exception) -> Response:
    """The response to an error, in the format of this API."""
    match error:
        case PayloadTooLarge():
            return _refused(413, INVALID, str(error))
        case Unsupported():
            return _refused(400, UNSUPPORTED, str(error), error.field)
        case InvalidInput(field="callback_subject"):
            # The deliverer does not know this API's names.
            return _refused(400, INVALID, f"callback.topic {error.reason}")
        case InvalidInput():
            return _refused(400, INVALID, str(error))
        case TimerNotPending():
            # The wording of this API, which other services have too.
            return _refused(400, INVALID, f"cannot {error.verb} timer with status '{error.status}'")
        case TimerConflict():
            return _refused(409, INVALID, "this idempotency_key was used with different parameters")
        case TimerNotFound():
            return _refused(404, NOT_FOUND, "timer not found")
        case NotFound():
            return _refused(404, NOT_FOUND, str(error))
        case MethodNotAllowed():
            response = _refused(405, INVALID, str(error))
            response.headers = (JSON, (b"allow", ", ".join(error.allowed).encode()))
            return response
        case TooSlow():
            return _refused(408, INVALID, str(error))
        case UnknownCoding():
            return _refused(415, INVALID, str(error))
        case Unauthorized():
            return _refused(401, UNAUTHORIZED, str(error))
        case Quarantined():
            return _refused(500, INTERNAL, str(error))
        case Forbidden():
            return _refused(403, UNAUTHORIZED, str(error))
        case TooManyWrongKeys():
            response = _refused(429, UNAUTHORIZED, str(error))
            response.headers = (JSON, (b"retry-after", b"%d" % error.wait_seconds))
            return response
        case StoreError() | TooBusy():
            reason = f"database error: {error.public}" if isinstance(error, StoreError) else str(error)
            response = _refused(503, INTERNAL, reason)
            response.headers = (JSON, (b"retry-after", b"1"))
            return response
    return _refused(500, INTERNAL, "internal error: see the server's log for details")


class PlatformDoor:
    def __init__(self, service: Service, keys: Keys, telemetry: Telemetry, *, request_bytes_max: int) -> None:
        self._service = service
        self._keys = keys
        self._telemetry = telemetry
        self._request_bytes_max = request_bytes_max

    def routes(self) -> dict[str, dict[str, Handler]]:
        return routes(self.operations())

    def operations(self) -> list[Operation]:
        def at(method: str, path: str, name: str, handler: Handler, summary: str, **more: Any) -> Operation:
            known = [parameter.name for parameter in more.get("parameters", ())]
            if method != "GET":
                more["errors"] = (*more["errors"], *BODY_ERRORS)
                if "body" not in more:
                    handler = without_fields(handler, self._request_bytes_max)
            return Operation(
                method=method,
                path=path,
                tag="platform",
                name=name,
                summary=summary,
                description=handler.__doc__ or "",
                handler=locked(self._keys, handler, known),
                **more,
            )

        def health(path: str) -> Operation:
            return Operation(
                method="GET",
                path=path,
                tag="monitoring",
                name=path[1:],
                summary="Check that the store can be read and written",
                description=self.health.__doc__ or "",
                handler=self.health,
                responses={200: Success[Health], 500: Unhealthy},
                errors=(403,),
                needs_key=False,
                example={"message": "healthy"},
            )

        one = "/timers/{id}"
        listed = [
            Parameter("status", Status, "only timers with this status"),
            Parameter("sort", Sort, "the field to sort by"),
            Parameter("order", str, "descending or ascending"),
            Parameter("limit", int, f"the page size: {LIMIT_DEFAULT} by default, at most {LIMIT_MAX}"),
            Parameter("offset", int, "how many timers to skip"),
        ]
        return [
            at("POST", "/timers", "platform_create", self.create, "Create a timer",
               body=CreatePlatformTimer, responses={201: Success[PlatformSummary], 200: Success[PlatformSummary]},
               errors=(400, 409), example={"message": "timer created successfully"}),
            at("GET", "/timers", "platform_list", self.list, "List timers",
               responses={200: Success[PlatformPage]}, parameters=listed, errors=(400,)),
            at("GET", one, "platform_get", self.get, "Get a timer",
               responses={200: Success[PlatformTimer]}, errors=(400, 404)),
            at("PUT", one, "platform_update", self.update, "Change a pending timer",
               body=PlatformChanges, responses={200: Success[PlatformUpdated]}, errors=(400, 404),
               example={"message": "timer updated successfully"}),
            at("DELETE", one, "platform_cancel", self.cancel, "Cancel a pending timer, and keep it",
               responses={200: Success[PlatformCanceled]}, errors=(400, 404),
               example={"message": "timer canceled successfully"}),
            health("/health"),
            health("/healthz"),
        ]  # fmt: skip

    def refusal(self, error: Exception) -> Response:
        return refusal(error)

    async def create(self, request: Request) -> Response:
        """The timer is durable when the response is sent. A request with an `idempotency_key` can be repeated safely:
        the status is 200 for the same body, with the existing timer, and 409 for a different one."""
        body = await request.body(self._request_bytes_max)
        fields = await off_loop(request, body, wire.decode, body, CreatePlatformTimer, _create_decoder)
        if fields.execute_at is None:
            raise InvalidInput("execute_at", "is required")
        execute_at = parse_time(fields.execute_at, "execute_at")
        definition = _changed(fields, None)
        key = fields.idempotency_key
        if key is None:
            self._check_in_future(execute_at)
            new = NewTimer(namespace=DEFAULT_NAMESPACE, execute_at=execute_at, definition=definition)
            timer, fresh = await self._service.create(new)
        else:
            fingerprint = await off_loop(request, body, fingerprint_of, definition, execute_at)
            timer, fresh = await self._create_once(key, execute_at, definition, fingerprint)
        if not fresh:
            return _ok(200, "timer already exists", PlatformSummary(*_short(timer)))
        self._telemetry.created("platform")
        return _created(timer)

    async def _create_once(
        self, key: str, execute_at: Instant, definition: Definition, fingerprint: str
    ) -> tuple[Timer, bool]:
        if not 1 <= len(key) <= KEY_CHARS_MAX:
            raise InvalidInput("idempotency_key", f"must have 1 to {KEY_CHARS_MAX} characters")
        id = id_of_key(key)
        try:
            self._check_in_future(execute_at)
        except InvalidInput:
            # A repeat may arrive when its time is near or past: it gets the existing timer, not an error.
            there = await self._service.repeated(DEFAULT_NAMESPACE, id, fingerprint)
            if there is None:
                raise
            return there, False
        new = NewTimer(
            namespace=DEFAULT_NAMESPACE, id=id, execute_at=execute_at, definition=definition, fingerprint=fingerprint
        )
        return await self._service.create(new)

    async def get(self, request: Request) -> Response:
        """The response has its headers, payload, metadata and latest error."""
        timer = await self._service.get(DEFAULT_NAMESPACE, _id(request))
        return _ok(200, "success", _full(timer))

    async def list(self, request: Request) -> Response:
        """One page, newest first by default, and the total number of timers that match."""
        query = request.query()
        wanted = Query(
            namespace=DEFAULT_NAMESPACE,
            status=wire.choice(query, "status", Status, None),
            sort=wire.choice(query, "sort", Sort, Sort.CREATED_AT),
            descending=wire.one_of(query, "order", ("asc", "desc"), "desc") == "desc",
            limit=wire.whole(query, "limit", LIMIT_DEFAULT, 1, LIMIT_MAX),
            offset=wire.whole(query, "offset", 0, 0, OFFSET_MAX),
        )
        timers, total = await self._service.page_by_offset(wanted)
        shown = [PlatformSummary(*_short(timer)) for timer in timers]
        page = PlatformPage(shown, total.timers, wanted.limit, wanted.offset, total.estimated)
        return _ok(200, "success", page)

    async def update(self, request: Request) -> Response:
        """Omitted fields keep their values. If the timer is not pending any more, the response is 400."""
        id = _id(request)
        body = await request.body(self._request_bytes_max)
        fields = await off_loop(request, body, wire.decode, body, PlatformChanges, _update_decoder)
        execute_at = None if fields.execute_at is None else parse_time(fields.execute_at, "execute_at")
        timer = await self._service.get(DEFAULT_NAMESPACE, id)
        if timer.status is not Status.PENDING:
            raise TimerNotPending("update", timer.status)
        if execute_at is not None:
            self._check_in_future(execute_at)
        change: Callable[[Definition], Definition] = partial(_changed, fields)
        target = change(timer.definition).target
        if target != timer.definition.target:
            await self._service.check_target(target)
        timer = await self._service.update(DEFAULT_NAMESPACE, id, execute_at=execute_at, change=change)
        return _ok(200, "timer updated successfully", _updated(timer))

    async def cancel(self, request: Request) -> Response:
        """The timer does not fire any more. Canceling a canceled timer is not an error."""
        timer = await self._service.cancel(DEFAULT_NAMESPACE, _id(request))
        return _ok(200, "timer canceled successfully", PlatformCanceled(timer.id, timer.status))

    async def health(self, request: Request) -> Response:
        """For load balancers and probes. Needs no key and ignores the query."""
        up = True
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                await self._service.ping()
        except (StoreError, TimeoutError):
            up = False
        at = format_time(self._service.clock.now())
        if up:
            return _ok(200, "healthy", Health("up", "connected", at))
        down = Health("degraded", "disconnected", at)
        return Response(500, _encode(Unhealthy(INTERNAL, "database connection failed", down)))

    def _check_in_future(self, execute_at: Instant) -> None:
        now = self._service.clock.now()
        if execute_at - now < AHEAD_MS_MIN:
            least = " by at least 5 seconds" if execute_at > now else ""
            raise InvalidInput("execute_at", f"must be in the future{least}; the server's time is {format_time(now)}")


_NEW = Definition(
    target=HttpTarget(url=""), retry=SINGLE_ATTEMPT, body=BodyFormat.PAYLOAD, protocol=ResponseProtocol.STATUS
)


def _changed(fields: PlatformChanges, before: Definition | None) -> Definition:
    """The definition of a new timer, or the one ``before`` with these changes."""
    new = before or _NEW
    return msgspec.structs.replace(
        new,
        target=_target(fields, new.target),
        payload=_payload(fields) or new.payload,
        metadata=fields.metadata or new.metadata,
        retry=new.retry
        if fields.retry_policy is None
        else checked_policy(fields.retry_policy, "retry_policy", RetryPolicy() if before is None else new.retry),
    )


def _payload(fields: PlatformChanges) -> Raw | UnsetType:
    callback = fields.callback
    if callback is None:
        return fields.callback_payload
    if fields.callback_payload:
        if callback.payload:
            raise InvalidInput("callback.payload", "can't be combined with callback_payload")
        if isinstance(callback, HttpCallback):
            raise InvalidInput("callback", "can't be combined with callback_payload: give it as callback.payload")
    return callback.payload or fields.callback_payload


def _target(fields: PlatformChanges, old: Target) -> Target:
    url, method, headers, prefix = fields.callback_url, fields.callback_method, fields.callback_headers, "callback_"
    callback = fields.callback
    if callback is not None:
        if url is not None or method is not None or headers is not None:
            raise InvalidInput("callback", "can't be combined with callback_url, callback_method or callback_headers")
        if isinstance(callback, NatsCallback):
            return _nats(callback)
        url, method, headers, prefix = callback.url, callback.method, callback.headers, "callback."
    elif isinstance(old, NatsTarget) and url is None:
        if method is not None or headers is not None:
            raise InvalidInput("callback", "is required to change the headers of a NATS timer, which has no method")
        return old
    before = old if isinstance(old, HttpTarget) else HttpTarget(url="")
    if url is None and not before.url:
        raise InvalidInput(prefix + "url", "is required" if callback else "is required unless callback is given")
    return HttpTarget(
        url=before.url if url is None else wire.check_url(url, prefix + "url"),
        method=before.method if method is None else method,
        headers=before.headers if headers is None else wire.check_headers(headers, prefix + "headers"),
    )


def _nats(callback: NatsCallback) -> NatsTarget:
    subject = wire.check_subject(callback.topic, "callback.topic")
    if callback.key is not None:
        subject = wire.check_subject(f"{subject}.{callback.key}", "callback.key")
    return NatsTarget(subject=subject, headers=wire.check_headers(callback.headers or {}, "callback.headers"))


def _id(request: Request) -> str:
    return wire.check_uuid(request.parameters[0], "id")


def _time(at: Instant | None) -> str | None:
    return None if at is None else format_time(at)


def _short(timer: Timer) -> tuple[str, str, str, str | None, str | None, Status, str | None]:
    """The fields of ``PlatformSummary``, in order, which every response about a timer has."""
    target = timer.definition.target
    url, method = (target.url, target.method) if isinstance(target, HttpTarget) else (None, None)
    created_at, execute_at = format_time(timer.created_at), format_time(timer.execute_at)
    return timer.id, created_at, execute_at, url, method, timer.status, _time(timer.executed_at)


def _callback(target: NatsTarget) -> ShownNatsCallback:
    return ShownNatsCallback(target.subject, target.headers or None)


def _updated(timer: Timer) -> PlatformUpdated:
    return PlatformUpdated(*_short(timer), updated_at=format_time(timer.updated_at))


def _full(timer: Timer) -> PlatformTimer:
    definition = timer.definition
    target = definition.target
    return PlatformTimer(
        *_short(timer),
        updated_at=format_time(timer.updated_at),
        callback_headers=definition.target.headers or None if isinstance(target, HttpTarget) else None,
        callback=_callback(target) if isinstance(target, NatsTarget) else UNSET,
        callback_payload=definition.payload or None,
        last_error=timer.last_error,
        metadata=definition.metadata or None,
    )
