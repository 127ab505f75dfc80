"""The HTTP v1 API, ``/api/v1``: its operations, and its status and code for each error."""

from __future__ import annotations

from typing import Any

import msgspec

from duetime.doors import http_v1_schema as schema
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
from duetime.doors.http_v1_reading import PastDue, RequestReader
from duetime.doors.http_v1_schema import BASE
from duetime.doors.http_v1_values import (
    decode_cursor,
    encode_cursor,
    filter_in,
    filter_of,
    path_of,
    retention_of,
    selected,
    shown_abilities,
    shown_attempt,
    shown_count,
    shown_instance,
    shown_namespace,
    shown_timer,
    unowned_of,
)
from duetime.doors.operation import BODY_ERRORS, Operation, Parameter, routes, without_fields
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
    TimerNotFinal,
    TimerNotFound,
    TimerNotPending,
    TooManyNamespaces,
    UnknownName,
    UnknownNamespace,
    Unsupported,
)
from duetime.model import HOUR_MS, Namespace, Status, Timer
from duetime.namespaces import Namespaces
from duetime.secret_rotation import new_key, to_text
from duetime.service import NewTimer, Service
from duetime.telemetry import Telemetry
from duetime.timetext import format_time

LIMIT_DEFAULT, LIMIT_MAX = 50, 1_000
MINIMAL_APPLIED = (b"preference-applied", b"return=minimal")

_encode = msgspec.json.Encoder().encode


class NoSuchNamespace(DuetimeError):
    """The namespace in the path does not exist."""


_ERRORS: tuple[tuple[type[Exception], int, str], ...] = (
    (PayloadTooLarge, 413, "PAYLOAD_TOO_LARGE"),
    (Unsupported, 400, "UNSUPPORTED"),
    (InvalidInput, 400, "INVALID_INPUT"),
    (UnknownNamespace, 400, "UNKNOWN_NAMESPACE"),
    (TimerNotFound, 404, "TIMER_NOT_FOUND"),
    (TimerConflict, 409, "TIMER_CONFLICT"),
    (TimerNotFinal, 409, "TIMER_CONFLICT"),
    (TimerNotPending, 409, "TIMER_NOT_PENDING"),
    (NamespaceConflict, 409, "NAMESPACE_CONFLICT"),
    (TooManyNamespaces, 409, "TOO_MANY_NAMESPACES"),
    (NoSuchNamespace, 404, "NAMESPACE_NOT_FOUND"),
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


def failure_of(error: Exception, now: str) -> tuple[int, schema.Failure]:
    """The status and body of the response to an error."""
    if isinstance(error, InvalidInput) and "_" in error.field and not isinstance(error, UnknownName):
        error = type(error)(_camel(error.field), error.reason)  # The inner modules name fields in snake_case.
    details = {"field": error.field} if isinstance(error, InvalidInput) and error.field else {}
    for kind, status, code in _ERRORS:
        if isinstance(error, kind):
            message = error.public if isinstance(error, StoreError) else str(error)
            return status, schema.Failure(code, message, details, now)
    return 500, schema.Failure("INTERNAL_ERROR", "internal error: see the server's log for details", {}, now)


class HttpV1Door:
    def __init__(
        self,
        service: Service,
        namespaces: Namespaces,
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
        self._namespaces = namespaces
        self._keys = keys
        self._telemetry = telemetry
        self._overview = overview
        self._reader = RequestReader(
            service,
            request_bytes_max=request_bytes_max,
            batch_bytes_max=batch_bytes_max,
            timeout_ms_max=timeout_ms_max,
        )
        self._request_bytes_max = request_bytes_max
        self._shards = shards

    def routes(self) -> dict[str, dict[str, Handler]]:
        return routes(self.operations())

    def operations(self) -> list[Operation]:
        def at(method: str, path: str, handler: Handler, summary: str, **more: Any) -> Operation:
            if method != "GET":
                more["errors"] = (*more.get("errors", ()), *BODY_ERRORS)
                if "body" not in more:
                    handler = without_fields(handler, self._request_bytes_max)
            known = [parameter.name for parameter in more.get("parameters", ()) if parameter.place == "query"]
            return Operation(
                method=method,
                path=BASE + path,
                tag=path.split("/")[1],
                name=handler.__name__,
                summary=summary,
                description=handler.__doc__ or "",
                handler=locked(self._keys, handler, known),
                **more,
            )

        timer = {200: schema.Timer}
        filters = [
            Parameter("namespace", str, "only timers of this namespace"),
            Parameter("id", str, "only timers with this id; in all namespaces unless one is given, newest first"),
            Parameter("status", Status, "only this status; pending: soonest due first, final: latest finished first"),
            Parameter("correlationId", str, "only timers with this correlation id, newest first"),
            Parameter("executeAfter", str, "only timers scheduled at this time or later, soonest first"),
            Parameter("executeBefore", str, "only timers scheduled before this time, soonest first"),
        ]
        listed = [
            *filters,
            Parameter("limit", int, f"the page size: {LIMIT_DEFAULT} by default, at most {LIMIT_MAX}"),
            Parameter("cursor", str, "nextCursor of the previous page"),
        ]
        prefer = Parameter("Prefer", str, "`return=minimal`: the response has ids instead of timers", "header")
        one = "/timers/{namespace}/{id}"
        name = "/namespaces/{name}"
        canceled = {"status": "canceled"}
        batch = {"results": [{"status": 200, "timer": schema.Timer}, {"status": 400, "error": schema.Failure}]}
        return [
            at("POST", "/timers", self.create, "Create a timer",
               body=schema.CreateTimer, responses=timer, errors=(409,)),
            at("GET", "/timers", self.list, "List timers",
               responses={200: schema.TimerPage}, parameters=listed),
            at("GET", "/timers/count", self.count, "Count timers",
               responses={200: schema.Count}, parameters=filters),
            at("POST", "/timers/batch", self.batch, "Create up to 1000 timers",
               body=schema.BatchIn, responses={200: schema.BatchOut}, parameters=[prefer], example=batch),
            at("POST", "/timers/cancel", self.cancel_many, "Cancel pending timers, by filter",
               body=schema.CancelIn, responses={200: schema.CancelOut}),
            at("POST", "/timers/replay", self.replay_many, "Replay finished timers, by filter",
               body=schema.ReplayIn, responses={200: schema.ReplayOut}),
            at("GET", one, self.get, "Get a timer", responses=timer, errors=(404,)),
            at("PUT", one, self.update, "Change a pending timer",
               body=schema.Changes, responses=timer, errors=(404, 409)),
            at("DELETE", one, self.delete, "Delete a timer", responses={204: None}, errors=(404, 409)),
            at("GET", one + "/attempts", self.attempts, "Get the latest attempts of a timer",
               responses={200: schema.Attempts}, errors=(404,)),
            at("POST", one + "/cancel", self.cancel, "Cancel a pending timer, and keep it",
               responses=timer, errors=(404, 409), example=canceled),
            at("POST", one + "/replay", self.replay, "Replay a finished timer",
               responses=timer, errors=(404, 409)),
            at("POST", "/timers/create", self.upsert, "Create or replace a timer",
               body=schema.CreateTimer, responses=timer, errors=(409,)),
            at("POST", "/timers/get", self.get_selected, "Get a timer",
               body=schema.Selection, responses=timer, errors=(404,)),
            at("POST", "/timers/update", self.update_selected, "Change a pending timer",
               body=schema.UpdateTimer, responses=timer, errors=(404, 409)),
            at("POST", "/timers/delete", self.delete_selected, "Delete a timer",
               body=schema.Selection, responses={204: None}, errors=(404, 409)),
            at("GET", "/namespaces", self.namespaces, "List the namespaces", responses={200: schema.Namespaces}),
            at("POST", "/namespaces", self.create_namespace, "Create a namespace",
               body=schema.NamespaceIn, responses={201: schema.Namespace, 200: schema.Namespace},
               errors=(409,), example={"secrets": []}),
            at("GET", name, self.namespace, "Get a namespace", responses={200: schema.Namespace}, errors=(404,)),
            at("PATCH", name, self.change_namespace, "Change a namespace",
               body=schema.NamespaceChanges, responses={200: schema.Namespace}, errors=(404,)),
            at("POST", name + "/secrets", self.add_secret, "Create a signing secret",
               responses={201: schema.NewSecret}, errors=(404,)),
            at("DELETE", name + "/secrets/{id}", self.delete_secret, "Delete a signing secret",
               responses={204: None}, errors=(404,)),
            at("GET", "/overview", self.overview, "Get an overview of the service", responses={200: schema.Overview}),
            at("GET", "/cluster", self.cluster, "List the instances and what the store can do",
               responses={200: schema.Cluster}),
        ]  # fmt: skip

    # Errors.

    def refusal(self, error: Exception) -> Response:
        status, failure = failure_of(error, self._now())
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

    def _now(self) -> str:
        return format_time(self._service.clock.now())

    def _not_in_future(self) -> InvalidInput:
        return InvalidInput("executeAt", f"must be in the future; the server's time is {self._now()}")

    # Timers.

    async def create(self, request: Request) -> Response:
        """A request with an `id` can be repeated safely: a repeat returns the existing timer. If the parameters differ
        from those of the existing timer, the response is 409."""
        wanted = await self._reader.create(request)
        if isinstance(wanted, PastDue):
            return _ok(await self._existing(wanted.new))
        timer, fresh = await self._service.create(wanted)
        self._telemetry.created("http_v1", int(fresh))
        return _ok(timer)

    async def _existing(self, new: NewTimer) -> Timer:
        """The timer that an earlier, equal request created; for a repeat that arrives after its time."""
        there = new.id and await self._service.repeated(new.namespace, new.id, new.fingerprint)
        if not there:
            raise self._not_in_future()
        return there

    async def upsert(self, request: Request) -> Response:
        """Replaces an existing timer with this id, unless it is executing: then the response is 409."""
        wanted = await self._reader.create(request)
        if isinstance(wanted, PastDue):
            raise self._not_in_future()
        timer = await self._service.upsert(wanted)
        self._telemetry.created("http_v1")
        return _ok(timer)

    async def batch(self, request: Request) -> Response:
        """All timers are durable when the response is sent. The results have the order of the timers; an error of one
        timer does not affect the others."""
        minimal = request.prefers_minimal()
        results: list[schema.BatchResult | None] = []
        news: list[NewTimer] = []
        for wanted in await self._reader.batch(request):
            if isinstance(wanted, NewTimer):
                news.append(wanted)
                results.append(None)
            else:
                results.append(await self._not_created(wanted, minimal))
        answers = await self._service.create_many(news)
        self._telemetry.created("http_v1", sum(isinstance(answer, tuple) and answer[1] for answer in answers))
        left = iter(answers)
        whole = [self._result(next(left), minimal) if result is None else result for result in results]
        return Response(200, _encode(schema.BatchOut(whole)), (JSON, MINIMAL_APPLIED) if minimal else (JSON,))

    async def _not_created(self, wanted: PastDue | InvalidInput, minimal: bool) -> schema.BatchResult:
        """The result for an item of a batch that creates no timer."""
        if isinstance(wanted, InvalidInput):
            return self._refused(wanted)
        try:
            return _created(await self._existing(wanted.new), minimal)
        except StoreError:
            raise
        except DuetimeError as error:
            return self._refused(error)

    def _result(self, answer: tuple[Timer, bool] | DuetimeError, minimal: bool) -> schema.BatchResult:
        return self._refused(answer) if isinstance(answer, DuetimeError) else _created(answer[0], minimal)

    def _refused(self, error: DuetimeError) -> schema.BatchResult:
        status, failure = failure_of(error, self._now())
        return schema.BatchResult(status, error=failure)

    async def get(self, request: Request) -> Response:
        """The response has its status, the number of its attempts and its latest error."""
        return _ok(await self._service.get(*path_of(request)))

    async def get_selected(self, request: Request) -> Response:
        """The request body has the id. The response has the timer's status, the number of its attempts and its latest
        error."""
        return _ok(await self._service.get(*selected(await self._reader.decode(request, schema.Selection))))

    async def update(self, request: Request) -> Response:
        """Omitted fields keep their values. The change starts a new firing. If the timer is executing or finished, the
        response is 409."""
        return await self._update(path_of(request), await self._reader.decode(request, schema.Changes))

    async def update_selected(self, request: Request) -> Response:
        """The request body has the id. Omitted fields keep their values. The change starts a new firing. If the timer
        is executing or finished, the response is 409."""
        changes = await self._reader.decode(request, schema.UpdateTimer)
        return await self._update(selected(changes), changes)

    async def _update(self, key: tuple[str, str], changes: schema.Changes) -> Response:
        execute_at, _ = self._reader.time(changes)
        timer = await self._service.get(*key)
        definition = self._reader.definition(changes, timer.definition)
        if timer.status is Status.PENDING:
            if not self._reader.is_in_future(changes, execute_at):
                raise self._not_in_future()
            if definition.target != timer.definition.target:
                await self._service.check_target(definition.target)
        changed = await self._service.update(
            *key,
            execute_at=execute_at,
            change=lambda before: self._reader.definition(changes, before),
            correlation_id=changes.correlation_id,
        )
        return _ok(changed)

    async def delete(self, request: Request) -> Response:
        """Deletes a pending or finished timer and its history. If the timer is executing, the response is 409."""
        await self._service.delete(*path_of(request))
        return Response(204, headers=())

    async def delete_selected(self, request: Request) -> Response:
        """The request body has the id. Deletes a pending or finished timer and its history. If the timer is executing,
        the response is 409."""
        await self._service.delete(*selected(await self._reader.decode(request, schema.Selection)))
        return Response(204, headers=())

    async def list(self, request: Request) -> Response:
        """Newest first, unless a filter has its own order. Follow `nextCursor` until it is null: a page ends after
        about 4 MiB of timers, so a page with fewer than `limit` timers may not be the last one."""
        query = request.query()
        filter = filter_in(query)
        limit = wire.whole(query, "limit", LIMIT_DEFAULT, 1, LIMIT_MAX)
        page = await self._service.page(filter, limit, decode_cursor(query.get("cursor"), filter))
        return Response(
            200, _encode(schema.TimerPage([shown_timer(timer) for timer in page.timers], encode_cursor(page.next)))
        )

    async def count(self, request: Request) -> Response:
        """With an id, a correlation id or a time range, the count stops at 10,000; `more` is true if there are more."""
        return Response(200, _encode(shown_count(await self._service.count(filter_in(request.query())))))

    async def attempts(self, request: Request) -> Response:
        """The latest ten attempts, oldest first."""
        timer = await self._service.get(*path_of(request))
        return Response(200, _encode(schema.Attempts([shown_attempt(timer, attempt) for attempt in timer.attempts])))

    async def cancel(self, request: Request) -> Response:
        """The timer does not fire any more. If it is executing, completed or failed, the response is 409."""
        return _ok(await self._service.cancel(*path_of(request)))

    async def cancel_many(self, request: Request) -> Response:
        """Cancels up to `limit` pending timers that match all filters. At least one filter is required: the namespace
        `*` cancels in all namespaces. Repeat the request while `more` is true."""
        fields = await self._reader.decode(request, schema.CancelIn)
        filters = (fields.namespace, fields.id, fields.correlation_id, fields.execute_after, fields.execute_before)
        if all(filter is None for filter in filters):
            reason = 'is required unless there is another filter; "namespace": "*" cancels in all namespaces'
            raise InvalidInput("namespace", reason)
        canceled = await self._service.cancel_all(filter_of(fields, Status.PENDING), fields.limit)
        return Response(200, _encode(schema.CancelOut(canceled.timers, canceled.more)))

    async def replay(self, request: Request) -> Response:
        """A completed, failed or canceled timer becomes pending again and is due now."""
        return _ok(await self._service.replay(*path_of(request)))

    async def replay_many(self, request: Request) -> Response:
        """Up to `limit` timers of one status that match all filters become pending again and are due now. Repeat the
        request while `more` is true."""
        fields = await self._reader.decode(request, schema.ReplayIn)
        replayed = await self._service.replay_all(filter_of(fields, Status(fields.status)), fields.limit)
        return Response(200, _encode(schema.ReplayOut(replayed.timers, replayed.more)))

    # Namespaces.

    async def namespaces(self, request: Request) -> Response:
        """All namespaces, sorted by name."""
        return Response(200, _encode(schema.Namespaces([self._shown(n) for n in self._namespaces.all()])))

    async def create_namespace(self, request: Request) -> Response:
        """The status is 201 if the namespace is new, 200 if it exists with the same settings, and 409 if it exists with
        different settings."""
        fields = await self._reader.decode(request, schema.NamespaceIn)
        wire.check_namespace(fields.name, "name")
        if fields.shards is not None and fields.shards > self._shards:
            raise InvalidInput("shards", f"must be at most {self._shards}, the number of shards of the cluster")
        namespace, fresh = await self._namespaces.create(
            fields.name,
            shards=fields.shards,
            retention_ms=None if fields.retention is None else retention_of(fields.retention),
            weight=fields.weight,
        )
        response = Response(201 if fresh else 200, _encode(self._shown(namespace)))
        if fresh:
            response.location = f"{BASE}/namespaces/{namespace.name}".encode()
        return response

    async def namespace(self, request: Request) -> Response:
        """The response has its settings and the ids of the secrets that sign its callbacks."""
        return Response(200, _encode(self._shown(await self._namespaces.get(await self._name(request)))))

    async def change_namespace(self, request: Request) -> Response:
        """Changes the retention or weight, pauses or resumes the namespace. Omitted fields keep their values."""
        name = await self._name(request)
        fields = await self._reader.decode(request, schema.NamespaceChanges)
        if fields.shards is not None and fields.shards != (shards := (await self._namespaces.get(name)).shards):
            raise InvalidInput("shards", f"can't be changed after the namespace is created (it has {shards})")
        retention_ms = None if fields.retention is None else retention_of(fields.retention)

        def changed(before: Namespace) -> Namespace:
            return msgspec.structs.replace(
                before,
                retention_ms=before.retention_ms if retention_ms is None else retention_ms,
                weight=before.weight if fields.weight is None else fields.weight,
                paused=before.paused if fields.paused is None else fields.paused,
            )

        return Response(200, _encode(self._shown(await self._namespaces.change(name, changed))))

    async def add_secret(self, request: Request) -> Response:
        """Only this response has the key. It signs callbacks from now on; the previous secret also signs them for 24
        hours."""
        secret = await self._namespaces.add_secret(await self._name(request), new_key())
        shown = schema.NewSecret(secret.id, to_text(secret.key), format_time(secret.created_at))
        response = Response(201, _encode(shown))
        response.location = f"{BASE}/namespaces/{request.parameters[0]}/secrets/{secret.id}".encode()
        return response

    async def delete_secret(self, request: Request) -> Response:
        """The secret stops signing callbacks. If it was the newest, the previous one becomes the current one, unless it
        has expired."""
        await self._namespaces.delete_secret(await self._name(request), request.parameters[1])
        return Response(204, headers=())

    async def cluster(self, request: Request) -> Response:
        """The live instances and their shards, and the abilities of the database."""
        instances = await self._service.cluster()
        unowned = unowned_of(instances, self._shards)
        abilities = shown_abilities(self._service.abilities)
        shown = schema.Cluster([shown_instance(i) for i in instances], self._shards, unowned, abilities)
        return Response(200, _encode(shown))

    async def overview(self, request: Request) -> Response:
        """Counts, activity of the last hour, forecast, overdue timers, failures and instances. It is computed at most
        once a second."""
        return Response(200, await self._overview.whole())

    def _shown(self, namespace: Namespace) -> schema.Namespace:
        return shown_namespace(namespace, self._service.clock.now())

    async def _name(self, request: Request) -> str:
        name = wire.check_namespace(request.parameters[0], "name")
        try:
            await self._namespaces.get(name)
        except UnknownNamespace as error:
            raise NoSuchNamespace(str(error)) from None
        return name


def _ok(timer: Timer) -> Response:
    return Response(200, _encode(shown_timer(timer)))


def _created(timer: Timer, minimal: bool) -> schema.BatchResult:
    return schema.BatchResult(200, id=timer.id) if minimal else schema.BatchResult(200, timer=shown_timer(timer))


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
