"""Every operation of the HTTP v1 API as a ``Call``: the request to send and how to read its response.

Nothing here does I/O. ``Client`` and ``AsyncClient`` take their methods from these functions, so each operation is
written once, and its docstring is that of the method.

Each call states whether it may be sent again when the fate of the first request is unknown. Most calls may: a create
carries its id, an update describes the wanted result, and a delete that finds nothing has been carried out already.
The others are not repeated because a second request means something else: a replay, a new secret, and an upsert with a
delay, which would restart a timer that has fired meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, Unpack
from urllib.parse import quote

import msgspec
from msgspec import Struct

from duetime.client import values
from duetime.client.errors import DuetimeClientError, InvalidRequest, UnexpectedResponse
from duetime.client.failures import Failure, error_of
from duetime.client.values import (
    DEFAULT_NAMESPACE,
    FIELDS,
    FILTERS,
    POLICY_FIELDS,
    Attempt,
    Changes,
    Cluster,
    Count,
    Health,
    Namespace,
    NewSecret,
    NewTimer,
    Overview,
    RetryPolicy,
    Status,
    Timer,
    TimerPage,
    duration_text,
    time_text,
)

BASE = "/api/v1"
PAGE_SIZE = 200
BULK_MAX = 1_000
"""How many timers the service cancels or replays in one request."""

T = TypeVar("T")


class Call(Struct, Generic[T], frozen=True, kw_only=True):
    """A request and how to read its response."""

    method: str
    path: str
    read: Callable[[bytes], T]
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes | None = None
    repeatable: bool = True
    gone_is_done: bool = False  # a retry that gets a 404: the first request was carried out

    @property
    def target(self) -> str:
        query = "&".join(f"{name}={_quoted(value)}" for name, value in self.query.items())
        return f"{self.path}?{query}" if query else self.path


class Portion(Struct, frozen=True, kw_only=True):
    """What one request of a bulk operation did."""

    timers: int
    more: bool = False  # whether more timers may match


class Bulk(Struct, frozen=True, kw_only=True):
    """An operation on all timers that match, in as many requests as it takes."""

    path: str
    kind: type[Portion]
    filters: dict[str, Any]
    limit: int | None
    repeatable: bool

    def call(self, total: int) -> Call[Portion]:
        """The next request, after this many timers."""
        limit = BULK_MAX if self.limit is None else min(self.limit - total, BULK_MAX)
        body = _encode(self.filters | {"limit": limit})
        return _call("POST", self.path, self.kind, body=body, repeatable=self.repeatable)


# --- timers --------------------------------------------------------------------------------------------------------


def create(**fields: Unpack[NewTimer]) -> Call[Timer]:
    """Create a timer that fires at ``execute_at`` or after ``delay`` and calls ``callback_url``.

    Without an ``id`` the client generates a UUID, so a create whose response was lost can be sent again without
    creating a second timer. The same create again returns the existing timer; with the same ``id`` and different
    parameters it raises ``Conflict``.
    """
    return _call("POST", "/timers", Timer, body=_new(fields))


def upsert(**fields: Unpack[NewTimer]) -> Call[Timer]:
    """Create a timer or replace the one with this ``id``. Takes the same arguments as ``create``."""
    return _call("POST", "/timers/create", Timer, body=_new(fields), repeatable=fields.get("delay") is None)


def batch(timers: Iterable[NewTimer]) -> Call[list[Timer | DuetimeClientError]]:
    """Create up to 1000 timers, all of them durable on return. Returns a timer or an error for each, in order."""
    return Call(method="POST", path=BASE + "/timers/batch", body=_batch(timers), read=_results)


def batch_ids(timers: Iterable[NewTimer]) -> Call[list[str | DuetimeClientError]]:
    """Like ``batch``, but returns only the id of each timer. The response is a tenth of the size."""
    path, headers = BASE + "/timers/batch", {"prefer": "return=minimal"}
    return Call(method="POST", path=path, headers=headers, body=_batch(timers), read=_ids)


def get(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[Timer]:
    """Fetch a timer."""
    return _call("GET", _one(namespace, id), Timer)


def update(id: str, *, namespace: str = DEFAULT_NAMESPACE, **changes: Unpack[Changes]) -> Call[Timer]:
    """Change a pending timer; fields that are left out stay as they are. Raises ``NotPending`` when it is too late."""
    return _call("PUT", _one(namespace, id), Timer, body=_encode(_changes(changes)))


def delete(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[None]:
    """Delete a timer, pending or finished, with its history."""
    return Call(method="DELETE", path=BASE + _one(namespace, id), read=_nothing, gone_is_done=True)


def cancel(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[Timer]:
    """Cancel a pending timer and keep it with the status ``canceled``. Canceling it again changes nothing. Raises
    ``NotPending`` when it is too late."""
    return _call("POST", _one(namespace, id) + "/cancel", Timer)


def cancel_all(
    *,
    namespace: str | None = None,
    id: str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
    limit: int | None = None,
) -> Bulk:
    """Cancel and keep all pending timers that match, or up to ``limit`` of them. Returns how many were canceled.

    At least one filter is required; ``namespace="*"`` cancels in all namespaces. The client sends as many
    requests as it takes, 1000 timers each.
    """
    filters = _filters(namespace, id, None, correlation_id, execute_after, execute_before)
    return Bulk(path="/timers/cancel", kind=_Canceled, filters=filters, limit=limit, repeatable=True)


def page(
    *,
    namespace: str | None = None,
    id: str | None = None,
    status: Status | str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
    limit: int | None = None,
    cursor: str | None = None,
) -> Call[TimerPage]:
    """Fetch one page of a list; ``cursor`` is the ``next_cursor`` of the previous page.

    The newest timers come first, with these exceptions: a time range is sorted by time, pending timers by when they are
    due, and finished timers by when they finished, latest first. With an id or a correlation id the newest come first.
    """
    query = _filters(namespace, id, status, correlation_id, execute_after, execute_before)
    if limit is not None:
        query["limit"] = str(limit)
    if cursor is not None:
        query["cursor"] = cursor
    return _call("GET", "/timers", TimerPage, query=query)


def pages(
    *,
    namespace: str | None = None,
    id: str | None = None,
    status: Status | str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
    page_size: int = PAGE_SIZE,
) -> Call[TimerPage]:
    """Iterate over all timers that match. The client fetches page after page as needed. Sorted like ``page``."""
    return page(
        namespace=namespace,
        id=id,
        status=status,
        correlation_id=correlation_id,
        execute_after=execute_after,
        execute_before=execute_before,
        limit=page_size,
    )


pages.__qualname__ = "list"  # as the method is called: Python names it in the error for an unknown argument


def after(call: Call[TimerPage], cursor: str) -> Call[TimerPage]:
    """The call for the page after the one that this call fetches."""
    return msgspec.structs.replace(call, query=call.query | {"cursor": cursor})


def count(
    *,
    namespace: str | None = None,
    id: str | None = None,
    status: Status | str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
) -> Call[Count]:
    """Count the timers that match. With an id, a correlation id or times the count stops at 10,000 (``more``)."""
    query = _filters(namespace, id, status, correlation_id, execute_after, execute_before)
    return _call("GET", "/timers/count", Count, query=query)


def attempts(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[list[Attempt]]:
    """Fetch the latest delivery attempts of a timer, oldest first."""
    return Call(method="GET", path=BASE + _one(namespace, id) + "/attempts", read=_attempts)


def replay(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[Timer]:
    """Fire a finished timer again, now."""
    return _call("POST", _one(namespace, id) + "/replay", Timer, repeatable=False)


def replay_all(
    *,
    status: Status | str = Status.FAILED,
    namespace: str | None = None,
    id: str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
    limit: int = 100,
) -> Bulk:
    """Fire up to ``limit`` finished timers with this status again, now. Returns how many were replayed.

    The client sends as many requests as it takes, 1000 timers each. There is always a limit because a timer that fails
    again matches again.
    """
    filters = _filters(namespace, id, status, correlation_id, execute_after, execute_before)
    return Bulk(path="/timers/replay", kind=_Replayed, filters=filters, limit=limit, repeatable=False)


# --- namespaces ----------------------------------------------------------------------------------------------------


def namespaces() -> Call[list[Namespace]]:
    """Fetch all namespaces, sorted by name."""
    return Call(method="GET", path=BASE + "/namespaces", read=_namespaces)


def namespace(name: str) -> Call[Namespace]:
    """Fetch a namespace."""
    return _call("GET", _named(name), Namespace)


def create_namespace(
    name: str, *, shards: int | None = None, retention: timedelta | str | None = None, weight: int | None = None
) -> Call[Namespace]:
    """Create a namespace. ``retention`` is how long the service keeps its finished timers, or ``"forever"``;
    ``weight``, from 1 to 100, is its share when more timers are due than can be delivered.

    The same create again returns the existing namespace; with other settings it raises ``Conflict``.
    """
    asked = {"name": name, "shards": shards, "retention": _retention(retention), "weight": weight}
    return _call("POST", "/namespaces", Namespace, body=_encode(asked))


def update_namespace(
    name: str, *, retention: timedelta | str | None = None, weight: int | None = None, paused: bool | None = None
) -> Call[Namespace]:
    """Change a namespace; settings that are left out stay as they are."""
    asked = {"retention": _retention(retention), "weight": weight, "paused": paused}
    return _call("PATCH", _named(name), Namespace, body=_encode(asked))


def pause(name: str) -> Call[Namespace]:
    """Pause a namespace: none of its timers fires until it is resumed. Timers can still be created."""
    return update_namespace(name, paused=True)


def resume(name: str) -> Call[Namespace]:
    """Resume a paused namespace. Its overdue timers fire at once."""
    return update_namespace(name, paused=False)


def add_secret(name: str) -> Call[NewSecret]:
    """Create a signing secret, which the service shows only once. The previous one signs too for 24 hours."""
    return _call("POST", _named(name) + "/secrets", NewSecret, repeatable=False)


def delete_secret(name: str, id: str) -> Call[None]:
    """Delete a signing secret: callbacks are no longer signed with it."""
    path = f"{BASE}{_named(name)}/secrets/{_quoted(id)}"
    return Call(method="DELETE", path=path, read=_nothing, gone_is_done=True)


# --- the service ---------------------------------------------------------------------------------------------------


def overview() -> Call[Overview]:
    """Fetch the state of the service: timers by status, activity, forecast, overdue timers, failures, instances."""
    return _call("GET", "/overview", Overview)


def cluster() -> Call[Cluster]:
    """Fetch the instances that share the database, the shards they own, and what the database supports."""
    return _call("GET", "/cluster", Cluster)


def health() -> Call[Health]:
    """Fetch the health of the service; raises ``Unavailable`` when it has lost its database. Needs no API key."""
    return Call(method="GET", path="/health", read=_health)


# --- from arguments to requests ------------------------------------------------------------------------------------


def _call(
    method: str,
    path: str,
    kind: type[T],
    *,
    query: dict[str, str] | None = None,
    body: bytes | None = None,
    repeatable: bool = True,
) -> Call[T]:
    def read(body: bytes) -> T:
        value: T = _read(body, kind)
        return value

    return Call(method=method, path=BASE + path, query=query or {}, body=body, read=read, repeatable=repeatable)


def _filters(
    namespace: str | None,
    id: str | None,
    status: Status | str | None,
    correlation_id: str | None,
    execute_after: datetime | str | None,
    execute_before: datetime | str | None,
) -> dict[str, str]:
    def time(name: str, value: datetime | str | None) -> str | None:
        return None if value is None else time_text(value, name, FILTERS[name])

    given = {
        "namespace": namespace,
        "id": id,
        "status": status,
        "correlation_id": correlation_id,
        "execute_after": time("execute_after", execute_after),
        "execute_before": time("execute_before", execute_before),
    }
    return {FILTERS[name]: str(value) for name, value in given.items() if value is not None}


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise InvalidRequest("text with a lone surrogate (half of a character) can't be sent") from None


def _quoted(text: str) -> str:
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise InvalidRequest("text with a lone surrogate (half of a character) can't be sent") from None


def _one(namespace: str, id: str) -> str:
    for name, value in (("namespace", namespace), ("id", id)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str such as timer.{name}, not {type(value).__name__}")
    if not namespace or not id:
        field = "id" if namespace else "namespace"
        raise InvalidRequest(f"{field} must not be empty", details={"field": field})
    return f"/timers/{_quoted(namespace)}/{_quoted(id)}"


def _named(name: str) -> str:
    if not name:
        raise InvalidRequest("name must not be empty", details={"field": "name"})
    return f"/namespaces/{_quoted(name)}"


def _retention(value: timedelta | str | None) -> str | None:
    return None if value is None else duration_text(value, "retention")


def _new(fields: NewTimer) -> bytes:
    return _encode(_described(fields))


def _batch(timers: Iterable[NewTimer]) -> bytes:
    return _encode({"timers": [_described(timer) for timer in timers]})


def _described(fields: NewTimer) -> dict[str, Any]:
    described = _changes(fields)
    described.setdefault("id", str(uuid.uuid4()))
    return described


_TIMES = {"execute_at"}
_DURATIONS = {"delay", "callback_timeout", "max_retry_attempts_duration", "initial_interval", "max_interval"}
_NULLABLE = {"payload", "metadata"}


def _changes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as the API names and writes them."""
    written: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            known = {one: f'retry_policy={{"{one}": …}}' for one in POLICY_FIELDS} | {one: one for one in FIELDS}
            raise _unknown("a timer", name, known)
        if value is None and name not in _NULLABLE:
            continue
        if name == "retry_policy":
            value = _policy(value)
        written[FIELDS[name]] = _written(name, FIELDS[name], value)
    return written


def _policy(given: RetryPolicy | Mapping[str, Any]) -> dict[str, Any]:
    fields = msgspec.structs.asdict(given) if isinstance(given, RetryPolicy) else given
    written = {}
    for name, value in fields.items():
        if name not in POLICY_FIELDS:
            raise _unknown("a retry policy", name, {one: one for one in POLICY_FIELDS})
        if value is not None:
            written[POLICY_FIELDS[name]] = _written(name, f"retryPolicy.{POLICY_FIELDS[name]}", value)
    return written


def _unknown(owner: str, name: str, known: Mapping[str, str]) -> TypeError:
    """The error for a field that does not exist, with the one that is probably meant: spelled as the API does, with the
    same ending, or similar."""
    letters = name.replace("_", "").lower()
    by_letters = {one.replace("_", ""): shown for one, shown in known.items()}
    near = [one for one in by_letters if one.endswith(letters)] or get_close_matches(letters, by_letters, 1)
    guess = f"; did you mean {by_letters[near[0]]}?" if near else ""
    return TypeError(f"{owner} has no field {name!r}{guess}")


def _written(name: str, field: str, value: Any) -> Any:
    if name in _TIMES:
        return time_text(value, name, field)
    return duration_text(value, name, field) if name in _DURATIONS else value


# --- from responses to values --------------------------------------------------------------------------------------


def _read(body: bytes, kind: Any) -> Any:
    try:
        return values.decode(body, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnexpectedResponse(str(error)) from None


class _Result(Struct):
    status: int
    timer: Timer | None = None
    id: str | None = None  # in place of the timer, with "Prefer: return=minimal"
    error: Failure | None = None


class _Results(Struct):
    results: list[_Result]


class _Canceled(Portion, frozen=True, kw_only=True):
    timers: int = msgspec.field(name="canceled")


class _Replayed(Portion, frozen=True, kw_only=True):
    timers: int = msgspec.field(name="replayed")


class _Healthy(Struct):
    data: Health


def _nothing(body: bytes) -> None:
    return None


def _results(body: bytes) -> list[Timer | DuetimeClientError]:
    return [result.timer or _error(result) for result in _read(body, _Results).results]


def _ids(body: bytes) -> list[str | DuetimeClientError]:
    # A service that does not get or know the preference returns whole timers.
    return [
        result.id or (result.timer and result.timer.id) or _error(result) for result in _read(body, _Results).results
    ]


def _error(result: _Result) -> DuetimeClientError:
    if result.error is None:
        raise UnexpectedResponse("neither a timer nor an error for one timer of the batch")
    return error_of(result.status, result.error)


def _attempts(body: bytes) -> list[Attempt]:
    found: list[Attempt] = _read(body, values.Attempts).attempts
    return found


def _namespaces(body: bytes) -> list[Namespace]:
    found: list[Namespace] = _read(body, values.Namespaces).namespaces
    return found


def _health(body: bytes) -> Health:
    health: Health = _read(body, _Healthy).data
    return health
