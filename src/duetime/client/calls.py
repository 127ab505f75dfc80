"""Every operation of the durable door as a ``Call``: the request to send, and how to read its answer.

Nothing here does I/O. ``Client`` and ``AsyncClient`` take their methods from these functions, so an operation is
written once; its docstring is the method's.

Whether a call may be sent again when nobody knows what became of the first one is decided here, call by call. Most
may: a create carries its id, an update says what should be so, and a delete that finds nothing has been done. Three
are not repeated, because the second time means something else: a replay, a new secret, and an upsert with a delay,
which would start a timer anew that has fired meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar, Unpack
from urllib.parse import quote

import msgspec
from msgspec import Struct

from duetime.client import values
from duetime.client.errors import DuetimeClientError, Failure, InvalidRequest, UnexpectedAnswer, error_of
from duetime.client.values import (
    Attempt,
    Changes,
    Cluster,
    Health,
    Namespace,
    NewSecret,
    NewTimer,
    RetryPolicy,
    Timer,
    TimerPage,
    duration_text,
    time_text,
)
from duetime.model import DEFAULT_NAMESPACE, Status

BASE = "/api/v1"
PAGE_SIZE = 200

T = TypeVar("T")


class Call(Struct, Generic[T], frozen=True, kw_only=True):
    """A request, and what its answer means."""

    method: str
    path: str
    read: Callable[[bytes], T]
    query: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes | None = None
    repeatable: bool = True
    gone_is_done: bool = False  # a repeat that finds nothing: the first one was carried out

    @property
    def target(self) -> str:
        query = "&".join(f"{name}={_quoted(value)}" for name, value in self.query.items())
        return f"{self.path}?{query}" if query else self.path


# --- timers --------------------------------------------------------------------------------------------------------


def create(**fields: Unpack[NewTimer]) -> Call[Timer]:
    """Make a timer. ``execute_at`` or ``delay`` says when, ``callback_url`` where to.

    Without an ``id`` a UUID is made here, so that a create whose answer was lost can be sent again and makes one timer.
    The same create again answers with the first timer; with other parameters it raises ``Conflict``.
    """
    return _call("POST", "/timers", Timer, body=_new(fields))


def upsert(**fields: Unpack[NewTimer]) -> Call[Timer]:
    """Make a timer in the place of the one there was, if there was one. Takes what ``create`` takes."""
    return _call("POST", "/timers/create", Timer, body=_new(fields), repeatable=fields.get("delay") is None)


def batch(timers: Iterable[NewTimer]) -> Call[list[Timer | DuetimeClientError]]:
    """Make up to 1000 timers in one durable write; for each, in order, the timer or the error that kept it out."""
    return Call(method="POST", path=BASE + "/timers/batch", body=_batch(timers), read=_results)


def batch_ids(timers: Iterable[NewTimer]) -> Call[list[str | DuetimeClientError]]:
    """``batch`` for who needs no more than the id of each timer: the answer is a tenth as large."""
    path, headers = BASE + "/timers/batch", {"prefer": "return=minimal"}
    return Call(method="POST", path=path, headers=headers, body=_batch(timers), read=_ids)


def get(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[Timer]:
    """Look at a timer."""
    return _call("GET", _one(namespace, id), Timer)


def update(id: str, *, namespace: str = DEFAULT_NAMESPACE, **changes: Unpack[Changes]) -> Call[Timer]:
    """Change a pending timer; what is left out stays. Raises ``NotPending`` when it is too late."""
    return _call("PUT", _one(namespace, id), Timer, body=_encode(_changes(changes)))


def delete(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[None]:
    """Remove a timer, pending or finished."""
    return Call(method="DELETE", path=BASE + _one(namespace, id), read=_nothing, gone_is_done=True)


def cancel(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[Timer]:
    """Cancel a pending timer and keep it; one that is canceled already stays so. Raises ``NotPending`` when it is too
    late."""
    return _call("POST", _one(namespace, id) + "/cancel", Timer)


def page(
    *,
    namespace: str | None = None,
    status: Status | str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
    limit: int | None = None,
    cursor: str | None = None,
) -> Call[TimerPage]:
    """One page of a list; ``cursor`` is the ``next_cursor`` of the page before.

    Newest first, unless: between two times soonest first, pending ones soonest due first, finished ones latest finished
    first. With a correlation id it is always newest first.
    """
    given = {
        "namespace": namespace,
        "status": status,
        "correlationId": correlation_id,
        "executeAfter": None if execute_after is None else time_text(execute_after, "executeAfter"),
        "executeBefore": None if execute_before is None else time_text(execute_before, "executeBefore"),
        "limit": limit,
        "cursor": cursor,
    }
    query = {name: str(value) for name, value in given.items() if value is not None}
    return _call("GET", "/timers", TimerPage, query=query)


def pages(
    *,
    namespace: str | None = None,
    status: Status | str | None = None,
    correlation_id: str | None = None,
    execute_after: datetime | str | None = None,
    execute_before: datetime | str | None = None,
    page_size: int = PAGE_SIZE,
) -> Call[TimerPage]:
    """Every timer that the filters leave, fetched page by page as they are asked for. Ordered like ``page``."""
    return page(
        namespace=namespace,
        status=status,
        correlation_id=correlation_id,
        execute_after=execute_after,
        execute_before=execute_before,
        limit=page_size,
    )


def after(call: Call[TimerPage], cursor: str) -> Call[TimerPage]:
    """The call for the page that follows the one of this call."""
    return msgspec.structs.replace(call, query=call.query | {"cursor": cursor})


def attempts(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[list[Attempt]]:
    """The latest attempts of a timer, oldest first."""
    return Call(method="GET", path=BASE + _one(namespace, id) + "/attempts", read=_attempts)


def replay(id: str, *, namespace: str = DEFAULT_NAMESPACE) -> Call[Timer]:
    """Fire a finished timer once more, now."""
    return _call("POST", _one(namespace, id) + "/replay", Timer, repeatable=False)


def replay_all(
    *,
    status: Status | str = Status.FAILED,
    namespace: str | None = None,
    correlation_id: str | None = None,
    limit: int = 100,
) -> Call[int]:
    """Fire finished timers once more, now: up to ``limit`` (at most 1000) with this status; how many it was."""
    asked = {"status": status, "namespace": namespace, "correlationId": correlation_id, "limit": limit}
    return Call(method="POST", path=BASE + "/timers/replay", body=_encode(asked), read=_replayed, repeatable=False)


# --- namespaces ----------------------------------------------------------------------------------------------------


def namespaces() -> Call[list[Namespace]]:
    """All namespaces."""
    return Call(method="GET", path=BASE + "/namespaces", read=_namespaces)


def namespace(name: str) -> Call[Namespace]:
    """Look at a namespace."""
    return _call("GET", _named(name), Namespace)


def create_namespace(
    name: str, *, shards: int | None = None, retention: timedelta | str | None = None, weight: int | None = None
) -> Call[Namespace]:
    """Make a namespace; ``retention`` is how long its finished timers are kept, or ``"forever"``; ``weight``, from 1 to
    100, is its share when more is due than can be delivered.

    The same again answers with the first one; with other settings it raises ``Conflict``.
    """
    asked = {"name": name, "shards": shards, "retention": _retention(retention), "weight": weight}
    return _call("POST", "/namespaces", Namespace, body=_encode(asked))


def update_namespace(
    name: str, *, retention: timedelta | str | None = None, weight: int | None = None, paused: bool | None = None
) -> Call[Namespace]:
    """Change a namespace; what is left out stays."""
    asked = {"retention": _retention(retention), "weight": weight, "paused": paused}
    return _call("PATCH", _named(name), Namespace, body=_encode(asked))


def pause(name: str) -> Call[Namespace]:
    """Let nothing of a namespace fire; timers can still be made, and fire once it is resumed."""
    return update_namespace(name, paused=True)


def resume(name: str) -> Call[Namespace]:
    """Let the timers of a paused namespace fire again, at once those that are due."""
    return update_namespace(name, paused=False)


def add_secret(name: str) -> Call[NewSecret]:
    """Make a signing secret, shown this once; the one before it signs too for 24 hours."""
    return _call("POST", _named(name) + "/secrets", NewSecret, repeatable=False)


def delete_secret(name: str, id: str) -> Call[None]:
    """Stop signing with a secret."""
    path = f"{BASE}{_named(name)}/secrets/{_quoted(id)}"
    return Call(method="DELETE", path=path, read=_nothing, gone_is_done=True)


def cluster() -> Call[Cluster]:
    """Which instances share the store, and who owns what."""
    return _call("GET", "/cluster", Cluster)


def health() -> Call[Health]:
    """How the server is; raises ``Unavailable`` when it has lost its store. Needs no key."""
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
    def read(answer: bytes) -> T:
        value: T = _read(answer, kind)
        return value

    return Call(method=method, path=BASE + path, query=query or {}, body=body, read=read, repeatable=repeatable)


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise InvalidRequest("half a character (a lone surrogate) can't be sent") from None


def _quoted(text: str) -> str:
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise InvalidRequest("half a character (a lone surrogate) can't be sent") from None


def _one(namespace: str, id: str) -> str:
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


_NAMES = {
    name: head + "".join(word.capitalize() for word in rest)
    for name in NewTimer.__annotations__
    for head, *rest in [name.split("_")]
}
_TIMES = {"execute_at"}
_DURATIONS = {"delay", "callback_timeout", "max_retry_attempts_duration", "initial_interval", "max_interval"}
_NULLABLE = {"payload", "metadata"}


def _changes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as the API names and writes them."""
    written: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in _NAMES:
            raise TypeError(f"a timer has no {name!r}")
        if value is None and name not in _NULLABLE:
            continue
        if name == "retry_policy":
            value = _policy(value)
        written[_NAMES[name]] = _written(name, _NAMES[name], value)
    return written


_POLICY_NAMES = dict(zip(RetryPolicy.__struct_fields__, RetryPolicy.__struct_encode_fields__, strict=True))


def _policy(given: RetryPolicy | Mapping[str, Any]) -> dict[str, Any]:
    fields = msgspec.structs.asdict(given) if isinstance(given, RetryPolicy) else given
    written = {}
    for name, value in fields.items():
        if name not in _POLICY_NAMES:
            raise TypeError(f"a retry policy has no {name!r}")
        if value is not None:
            written[_POLICY_NAMES[name]] = _written(name, f"retryPolicy.{_POLICY_NAMES[name]}", value)
    return written


def _written(name: str, field: str, value: Any) -> Any:
    if name in _TIMES:
        return time_text(value, field)
    return duration_text(value, field) if name in _DURATIONS else value


# --- from answers to values ----------------------------------------------------------------------------------------


def _read(body: bytes, kind: Any) -> Any:
    try:
        return values.decode(body, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnexpectedAnswer(f"the answer is not one of Duetime: {error}") from None


class _Result(Struct):
    status: int
    timer: Timer | None = None
    id: str | None = None  # of one who asked for no more
    error: Failure | None = None


class _Results(Struct):
    results: list[_Result]


class _Replayed(Struct):
    replayed: int


class _Healthy(Struct):
    data: Health


def _nothing(body: bytes) -> None:
    return None


def _results(body: bytes) -> list[Timer | DuetimeClientError]:
    return [result.timer or _error(result) for result in _read(body, _Results).results]


def _ids(body: bytes) -> list[str | DuetimeClientError]:
    # A server that knows no preferences, or is not told of them, answers with the timers.
    return [
        result.id or (result.timer and result.timer.id) or _error(result) for result in _read(body, _Results).results
    ]


def _error(result: _Result) -> DuetimeClientError:
    if result.error is None:
        raise UnexpectedAnswer("a timer of the batch has neither a result nor an error")
    return error_of(result.status, result.error)


def _attempts(body: bytes) -> list[Attempt]:
    found: list[Attempt] = _read(body, values.Attempts).attempts
    return found


def _namespaces(body: bytes) -> list[Namespace]:
    found: list[Namespace] = _read(body, values.Namespaces).namespaces
    return found


def _replayed(body: bytes) -> int:
    count: int = _read(body, _Replayed).replayed
    return count


def _health(body: bytes) -> Health:
    health: Health = _read(body, _Healthy).data
    return health
