"""The durable door: ``/api/v1``, namespaces, retries, batches, pages; camelCase, in two styles over one service."""

from __future__ import annotations

from typing import Any

import msgspec

from duetime.deliverers.signing import new_secret, to_text
from duetime.doors import durable_schema as schema
from duetime.doors import wire
from duetime.doors.durable_reading import Late, Reading
from duetime.doors.durable_values import (
    cursor_of,
    filter_in,
    filter_of,
    path_of,
    place_of,
    retention_of,
    selected,
    shown_attempt,
    shown_count,
    shown_instance,
    shown_namespace,
    shown_timer,
    unowned_of,
)
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
from duetime.doors.operation import Operation, Parameter, routes
from duetime.doors.overview import Overview
from duetime.errors import (
    DuetimeError,
    InvalidInput,
    NamespaceConflict,
    PayloadTooLarge,
    Quarantined,
    SecretNotFound,
    StoreError,
    TimerConflict,
    TimerNotFound,
    TimerNotPending,
    TooManyNamespaces,
    UnknownNamespace,
)
from duetime.model import (
    HOUR_MS,
    Namespace,
    Status,
    Timer,
)
from duetime.service import NewTimer, Service
from duetime.telemetry import Telemetry
from duetime.timetext import format_time

BASE = "/api/v1"
LIMIT_DEFAULT, LIMIT_MAX = 50, 1_000
MINIMAL_APPLIED = (b"preference-applied", b"return=minimal")

_encode = msgspec.json.Encoder().encode


class _NoSuchNamespace(DuetimeError):
    """The namespace that the path names does not exist."""


_ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
    (PayloadTooLarge, 413, "PAYLOAD_TOO_LARGE"),
    (InvalidInput, 400, "INVALID_INPUT"),
    (UnknownNamespace, 400, "UNKNOWN_NAMESPACE"),
    (TimerNotFound, 404, "TIMER_NOT_FOUND"),
    (TimerConflict, 409, "TIMER_CONFLICT"),
    (TimerNotPending, 409, "TIMER_NOT_PENDING"),
    (NamespaceConflict, 409, "NAMESPACE_CONFLICT"),
    (TooManyNamespaces, 409, "TOO_MANY_NAMESPACES"),
    (_NoSuchNamespace, 404, "NAMESPACE_NOT_FOUND"),
    (SecretNotFound, 404, "SECRET_NOT_FOUND"),
    (Unauthorized, 401, "UNAUTHORIZED"),
    (Forbidden, 403, "FORBIDDEN"),
    (TooManyWrongKeys, 429, "TOO_MANY_WRONG_KEYS"),
    (NotFound, 404, "NOT_FOUND"),
    (MethodNotAllowed, 405, "METHOD_NOT_ALLOWED"),
    (TooSlow, 408, "REQUEST_TIMEOUT"),
    (UnknownCoding, 415, "UNSUPPORTED_ENCODING"),
    (Quarantined, 500, "QUARANTINED"),
    (StoreError, 503, "UNAVAILABLE"),
    (TooBusy, 503, "UNAVAILABLE"),
)


class DurableDoor:
    def __init__(
        self,
        service: Service,
        keys: Keys,
        telemetry: Telemetry,
        overview: Overview,
        *,
        request_bytes_max: int,
        batch_bytes_max: int,
        shards: int,
        timeout_ms_max: int = HOUR_MS,
    ) -> None:
        self._service = service
        self._keys = keys
        self._telemetry = telemetry
        self._overview = overview
        self._reading = Reading(
            service,
            request_bytes_max=request_bytes_max,
            batch_bytes_max=batch_bytes_max,
            timeout_ms_max=timeout_ms_max,
        )
        self._shards = shards

    def routes(self) -> dict[str, dict[str, Handler]]:
        return routes(self.operations())

    def operations(self) -> list[Operation]:
        def at(method: str, path: str, handler: Handler, summary: str, **more: Any) -> Operation:
            name = handler.__name__
            if "takes" in more:
                more["refuses"] = (*more["refuses"], 408, 415)
            return Operation(
                method=method, path=BASE + path, name=name, summary=summary, handler=locked(self._keys, handler), **more
            )

        timer = {200: schema.Timer}
        filters = [
            Parameter("namespace", str, "only of this namespace"),
            Parameter("id", str, "only with exactly this id; without a namespace in any, newest first"),
            Parameter("status", Status, "pending: soonest due first; final ones: latest finished first"),
            Parameter("correlationId", str, "only with this correlation id, newest first"),
            Parameter("executeAfter", str, "due at this time or later, soonest first"),
            Parameter("executeBefore", str, "due before this time, soonest first"),
        ]
        listed = [
            *filters,
            Parameter("limit", int, f"how many, {LIMIT_DEFAULT} unless given, at most {LIMIT_MAX}"),
            Parameter("cursor", str, "nextCursor of the page before"),
        ]
        prefer = Parameter("Prefer", str, "`return=minimal`: answer with ids, without the timers", "header")
        one = "/timers/{namespace}/{id}"
        name = "/namespaces/{name}"
        return [
            at("POST", "/timers", self.create, "Make a timer; the same request again answers with the first one",
               takes=schema.CreateTimer, gives=timer, refuses=(400, 409, 413)),
            at("GET", "/timers", self.list, "List timers, newest first unless a filter has an order of its own",
               gives={200: schema.TimerPage}, given=listed, refuses=(400,)),
            at("GET", "/timers/count", self.count, "Count timers, by the filters of the list",
               gives={200: schema.Count}, given=filters, refuses=(400,)),
            at("POST", "/timers/batch", self.batch, "Make up to 1000 timers in one durable write",
               takes=schema.BatchIn, gives={200: schema.BatchOut}, given=[prefer], refuses=(400, 413)),
            at("POST", "/timers/cancel", self.cancel_many, "Cancel pending timers, by filter",
               takes=schema.CancelIn, gives={200: schema.CancelOut}, refuses=(400, 413)),
            at("POST", "/timers/replay", self.replay_many, "Fire finished timers once more, by filter",
               takes=schema.ReplayIn, gives={200: schema.ReplayOut}, refuses=(400, 413)),
            at("GET", one, self.get, "Look at a timer", gives=timer, refuses=(400, 404)),
            at("PUT", one, self.update, "Change a pending timer; what is left out stays",
               takes=schema.Changes, gives=timer, refuses=(400, 404, 409, 413)),
            at("DELETE", one, self.delete, "Remove a timer, pending or finished",
               gives={204: None}, refuses=(400, 404, 409)),
            at("GET", one + "/attempts", self.attempts, "The latest attempts of a timer",
               gives={200: schema.Attempts}, refuses=(400, 404)),
            at("POST", one + "/cancel", self.cancel, "Cancel a pending timer, and keep it",
               gives=timer, refuses=(400, 404, 409)),
            at("POST", one + "/replay", self.replay, "Fire a finished timer once more, now",
               gives=timer, refuses=(400, 404, 409)),
            at("POST", "/timers/create", self.upsert, "Make a timer, in the place of the one there was",
               takes=schema.CreateTimer, gives=timer, refuses=(400, 409, 413)),
            at("POST", "/timers/get", self.get_selected, "Look at a timer",
               takes=schema.Selection, gives=timer, refuses=(400, 404, 413)),
            at("POST", "/timers/update", self.update_selected, "Change a pending timer; what is left out stays",
               takes=schema.UpdateTimer, gives=timer, refuses=(400, 404, 409, 413)),
            at("POST", "/timers/delete", self.delete_selected, "Remove a timer, pending or finished",
               takes=schema.Selection, gives={204: None}, refuses=(400, 404, 409, 413)),
            at("GET", "/namespaces", self.namespaces, "List the namespaces", gives={200: schema.Namespaces}),
            at("POST", "/namespaces", self.create_namespace, "Make a namespace",
               takes=schema.NamespaceIn, gives={201: schema.Namespace, 200: schema.Namespace}, refuses=(400, 409, 413)),
            at("GET", name, self.namespace, "Look at a namespace", gives={200: schema.Namespace}, refuses=(400, 404)),
            at("PATCH", name, self.change_namespace,
               "Change the retention or the weight of a namespace, pause or resume it",
               takes=schema.NamespaceChanges, gives={200: schema.Namespace}, refuses=(400, 404, 413)),
            at("POST", name + "/secrets", self.add_secret,
               "Make a signing secret; the one before it signs too for 24 hours",
               gives={201: schema.NewSecret}, refuses=(400, 404)),
            at("DELETE", name + "/secrets/{id}", self.delete_secret, "Stop signing with a secret",
               gives={204: None}, refuses=(400, 404)),
            at("GET", "/overview", self.overview, "How the service is doing: what it did, what is ahead, what fails",
               gives={200: schema.Overview}),
            at("GET", "/cluster", self.cluster, "Which instances share the store, and who owns what",
               gives={200: schema.Cluster}),
        ]  # fmt: skip

    # Errors.

    def refusal(self, error: Exception) -> Response:
        status, failure = self._failure(error)
        headers = [JSON]
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        elif isinstance(error, TooManyWrongKeys):
            headers.append((b"retry-after", b"%d" % error.wait_seconds))
        elif status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        elif status == 503:
            headers.append((b"retry-after", b"1"))
        return Response(status, _encode(failure), headers)

    def _failure(self, error: Exception) -> tuple[int, schema.Failure]:
        if isinstance(error, InvalidInput) and "_" in error.field:
            error = type(error)(_camel(error.field), error.reason)  # what was refused further in has no door's spelling
        details = {"field": error.field} if isinstance(error, InvalidInput) and error.field else {}
        for kind, status, code in _ERRORS:
            if isinstance(error, kind):
                message = error.public if isinstance(error, StoreError) else str(error)
                return status, schema.Failure(code, message, details, self._now())
        message = "internal error: the log of the service has the details"
        return 500, schema.Failure("INTERNAL_ERROR", message, {}, self._now())

    def _now(self) -> str:
        return format_time(self._service.clock.now())

    # Timers.

    async def create(self, request: Request) -> Response:
        asked = await self._reading.create(request)
        if isinstance(asked, Late):
            return _ok(await self._earlier(asked.new))
        timer, fresh = await self._service.create(asked)
        self._telemetry.created("durable", int(fresh))
        return _ok(timer)

    async def _earlier(self, new: NewTimer) -> Timer:
        """The timer that an earlier request made, for a repeat that comes when its time is past."""
        there = new.id and await self._service.repeated(new.namespace, new.id, new.fingerprint)
        if not there:
            raise _not_ahead()
        return there

    async def upsert(self, request: Request) -> Response:
        asked = await self._reading.create(request)
        if isinstance(asked, Late):
            raise _not_ahead()
        timer = await self._service.upsert(asked)
        self._telemetry.created("durable")
        return _ok(timer)

    async def batch(self, request: Request) -> Response:
        minimal = request.prefers_minimal()
        results: list[schema.BatchResult | None] = []
        news: list[NewTimer] = []
        for asked in await self._reading.batch(request):
            if isinstance(asked, NewTimer):
                news.append(asked)
                results.append(None)
            else:
                results.append(await self._not_made(asked, minimal))
        answers = await self._service.create_many(news)
        self._telemetry.created("durable", sum(isinstance(answer, tuple) and answer[1] for answer in answers))
        left = iter(answers)
        whole = [self._result(next(left), minimal) if result is None else result for result in results]
        return Response(200, _encode(schema.BatchOut(whole)), (JSON, MINIMAL_APPLIED) if minimal else (JSON,))

    async def _not_made(self, asked: Late | InvalidInput, minimal: bool) -> schema.BatchResult:
        """The result for a part of a batch that makes no timer."""
        if isinstance(asked, InvalidInput):
            return self._refused(asked)
        try:
            return _made(await self._earlier(asked.new), minimal)
        except StoreError:
            raise
        except DuetimeError as error:
            return self._refused(error)

    def _result(self, answer: tuple[Timer, bool] | DuetimeError, minimal: bool) -> schema.BatchResult:
        return self._refused(answer) if isinstance(answer, DuetimeError) else _made(answer[0], minimal)

    def _refused(self, error: DuetimeError) -> schema.BatchResult:
        status, failure = self._failure(error)
        return schema.BatchResult(status, error=failure)

    async def get(self, request: Request) -> Response:
        return _ok(await self._service.get(*path_of(request)))

    async def get_selected(self, request: Request) -> Response:
        return _ok(await self._service.get(*selected(await self._reading.of(request, schema.Selection))))

    async def update(self, request: Request) -> Response:
        return await self._update(path_of(request), await self._reading.of(request, schema.Changes))

    async def update_selected(self, request: Request) -> Response:
        changes = await self._reading.of(request, schema.UpdateTimer)
        return await self._update(selected(changes), changes)

    async def _update(self, key: tuple[str, str], changes: schema.Changes) -> Response:
        execute_at, _ = self._reading.time(changes)
        timer = await self._service.get(*key)
        definition = self._reading.definition(changes, timer.definition)
        if timer.status is Status.PENDING:
            if not self._reading.is_ahead(changes, execute_at):
                raise _not_ahead()
            if definition.target != timer.definition.target:
                await self._service.check_target(definition.target)
        changed = await self._service.update(
            *key,
            execute_at=execute_at,
            change=lambda before: self._reading.definition(changes, before),
            correlation_id=changes.correlation_id,
        )
        return _ok(changed)

    async def delete(self, request: Request) -> Response:
        await self._service.delete(*path_of(request))
        return Response(204, headers=())

    async def delete_selected(self, request: Request) -> Response:
        await self._service.delete(*selected(await self._reading.of(request, schema.Selection)))
        return Response(204, headers=())

    async def list(self, request: Request) -> Response:
        query = request.query()
        filter = filter_in(query)
        limit = wire.whole(query, "limit", LIMIT_DEFAULT, 1, LIMIT_MAX)
        page = await self._service.page(filter, limit, place_of(query.get("cursor"), filter))
        return Response(
            200, _encode(schema.TimerPage([shown_timer(timer) for timer in page.timers], cursor_of(page.next)))
        )

    async def count(self, request: Request) -> Response:
        return Response(200, _encode(shown_count(await self._service.count(filter_in(request.query())))))

    async def attempts(self, request: Request) -> Response:
        timer = await self._service.get(*path_of(request))
        return Response(200, _encode(schema.Attempts([shown_attempt(timer, attempt) for attempt in timer.attempts])))

    async def cancel(self, request: Request) -> Response:
        return _ok(await self._service.cancel(*path_of(request)))

    async def cancel_many(self, request: Request) -> Response:
        asked = await self._reading.of(request, schema.CancelIn)
        canceled = await self._service.cancel_all(filter_of(asked, Status.PENDING), asked.limit)
        return Response(200, _encode(schema.CancelOut(canceled.timers, canceled.more)))

    async def replay(self, request: Request) -> Response:
        return _ok(await self._service.replay(*path_of(request)))

    async def replay_many(self, request: Request) -> Response:
        asked = await self._reading.of(request, schema.ReplayIn)
        replayed = await self._service.replay_all(filter_of(asked, Status(asked.status)), asked.limit)
        return Response(200, _encode(schema.ReplayOut(replayed.timers, replayed.more)))

    # Namespaces.

    async def namespaces(self, request: Request) -> Response:
        return Response(200, _encode(schema.Namespaces([self._shown(n) for n in self._service.namespaces()])))

    async def create_namespace(self, request: Request) -> Response:
        asked = await self._reading.of(request, schema.NamespaceIn)
        wire.check_namespace(asked.name, "name")
        if asked.shards is not None and asked.shards > self._shards:
            raise InvalidInput("shards", f"must be at most {self._shards}, the number of shards that there are")
        namespace, fresh = await self._service.create_namespace(
            asked.name,
            shards=asked.shards,
            retention_ms=None if asked.retention is None else retention_of(asked.retention),
            weight=asked.weight,
        )
        return Response(201 if fresh else 200, _encode(self._shown(namespace)))

    async def namespace(self, request: Request) -> Response:
        return Response(200, _encode(self._shown(await self._service.namespace(await self._name(request)))))

    async def change_namespace(self, request: Request) -> Response:
        name = await self._name(request)
        asked = await self._reading.of(request, schema.NamespaceChanges)
        if asked.shards is not None and asked.shards != (await self._service.namespace(name)).shards:
            raise InvalidInput("shards", "are fixed when a namespace is made")
        retention_ms = None if asked.retention is None else retention_of(asked.retention)

        def changed(before: Namespace) -> Namespace:
            return msgspec.structs.replace(
                before,
                retention_ms=before.retention_ms if retention_ms is None else retention_ms,
                weight=before.weight if asked.weight is None else asked.weight,
                paused=before.paused if asked.paused is None else asked.paused,
            )

        return Response(200, _encode(self._shown(await self._service.change_namespace(name, changed))))

    async def add_secret(self, request: Request) -> Response:
        secret = await self._service.add_secret(await self._name(request), new_secret())
        shown = schema.NewSecret(secret.id, to_text(secret.key), format_time(secret.created_at))
        return Response(201, _encode(shown))

    async def delete_secret(self, request: Request) -> Response:
        await self._service.delete_secret(await self._name(request), request.parameters[1])
        return Response(204, headers=())

    async def cluster(self, request: Request) -> Response:
        instances = await self._service.cluster()
        unowned = unowned_of(instances, self._shards)
        return Response(200, _encode(schema.Cluster([shown_instance(i) for i in instances], self._shards, unowned)))

    async def overview(self, request: Request) -> Response:
        return Response(200, await self._overview.whole())

    def _shown(self, namespace: Namespace) -> schema.Namespace:
        return shown_namespace(namespace, self._service.clock.now())

    async def _name(self, request: Request) -> str:
        name = wire.check_namespace(request.parameters[0], "name")
        try:
            await self._service.namespace(name)
        except UnknownNamespace as error:
            raise _NoSuchNamespace(str(error)) from None
        return name


def _not_ahead() -> InvalidInput:
    return InvalidInput("executeAt", "must be in the future")


def _ok(timer: Timer) -> Response:
    return Response(200, _encode(shown_timer(timer)))


def _made(timer: Timer, minimal: bool) -> schema.BatchResult:
    return schema.BatchResult(200, id=timer.id) if minimal else schema.BatchResult(200, timer=shown_timer(timer))


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
