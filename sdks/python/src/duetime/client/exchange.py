"""What ``Client`` and ``AsyncClient`` share: the service's address, the retries, and the list of their methods.

``exchange`` is one call from start to end without any I/O: a generator that tells its transport to send or to wait and
gets the result. Each client is a transport with a loop of ten lines around it.

A call is retried after a failed connection and after the statuses 429, 502, 503 and 504, with exponential backoff and
jitter, and never sooner than ``Retry-After``. It ends with the last error when its attempts or its time are used up. A
call that must not run twice is retried only when the service can't have seen it, that is, after a 429 or when no
connection was made; it always gets a new connection.
"""

from __future__ import annotations

import functools
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload
from urllib.parse import urlsplit

from msgspec import Struct

from duetime.client import calls
from duetime.client.calls import BASE, Bulk, Call
from duetime.client.clock import Clock
from duetime.client.errors import (
    ConnectionFailed,
    DuetimeClientError,
    InvalidRequest,
    NotFound,
    Unauthorized,
    UnexpectedResponse,
)
from duetime.client.failures import error_from, not_duetime
from duetime.client.values import Timer, TimerPage
from duetime.client.version import __version__

DEFAULT_URL = "http://localhost:3000"
URL_VARIABLE = "TIMER_URL"
KEY_VARIABLE = "API_KEY"
KEY_FILE = "duetime.key"  # the service writes it when it generates its own key

RESPONSE_BYTES_MAX = 512 * 1024 * 1024
IDLE_MAX = 16
BACKOFF_SECONDS = 0.1
BACKOFF_SECONDS_MAX = 5.0
RETRIED = {429, 502, 503, 504}

P = ParamSpec("P")
T = TypeVar("T")


# --- the service ----------------------------------------------------------------------------------------------------


class Endpoint(Struct, frozen=True, kw_only=True):
    """A service and the headers of every request to it."""

    url: str
    tls: bool
    host: str
    port: int
    authority: str
    prefix: str
    headers: dict[str, str]


def endpoint(url: str | None, key: str | None) -> Endpoint:
    """The service from the arguments or the environment; the key also from the file that the service writes."""
    url = (url or os.environ.get(URL_VARIABLE, "").strip() or DEFAULT_URL).rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError
        if "@" in parts.netloc or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError
    except ValueError:
        raise InvalidRequest(f"{url!r} is not the address of a service, such as {DEFAULT_URL}") from None
    if url.endswith(BASE):
        raise InvalidRequest(f"{url!r} is not the address of a service: give the address without {BASE}")
    tls = parts.scheme == "https"
    headers = {"accept": "application/json", "user-agent": f"duetime-python/{__version__}"}
    key = key or os.environ.get(KEY_VARIABLE, "").strip() or _key_from_file()
    if key:
        if not key.isascii() or not key.isprintable():
            raise InvalidRequest("the API key must be printable ASCII")
        headers["x-api-key"] = key
    return Endpoint(
        url=url,
        tls=tls,
        host=parts.hostname,
        port=port or (443 if tls else 80),
        authority=parts.netloc,
        prefix=parts.path,
        headers=headers,
    )


def _key_from_file() -> str | None:
    try:
        return Path(KEY_FILE).read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


def _no_key() -> str:
    return f"the service needs an API key: pass key=, set {KEY_VARIABLE}, or copy its {KEY_FILE} to {Path.cwd()}"


# --- one call ------------------------------------------------------------------------------------------------------


class Options(Struct, frozen=True, kw_only=True):
    timeout_seconds: float  # for the whole call, with its attempts and waits
    attempt_timeout_seconds: float
    attempts_max: int


class Send(Struct, frozen=True, kw_only=True):
    """Tells the transport to send this and to return the result."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes | None
    timeout_seconds: float
    fresh: bool  # on a new connection


class Wait(Struct, frozen=True):
    """Tells the transport to wait."""

    seconds: float


class Response(Struct, frozen=True):
    status: int
    retry_after: str | None
    body: bytes


class NoResponse(Struct, frozen=True, kw_only=True):
    """No complete response arrived."""

    reason: str
    sent: bool  # whether the service may have seen the request
    reused: bool = False  # whether the connection was reused: the service may have closed it while it was idle


Exchange = Generator[Send | Wait, Response | NoResponse | None, T]


def exchange(call: Call[T], to: Endpoint, options: Options, clock: Clock) -> Exchange[T]:
    deadline = clock.monotonic() + options.timeout_seconds
    headers = to.headers | call.headers | ({} if call.body is None else {"content-type": "application/json"})
    fresh = not call.repeatable
    doubtful = False  # whether the service may have carried out an earlier attempt
    failed = 0
    while True:
        left = max(deadline - clock.monotonic(), 0.001)
        result = yield Send(
            method=call.method,
            target=to.prefix + call.target,
            headers=headers,
            body=call.body,
            timeout_seconds=min(left, options.attempt_timeout_seconds),
            fresh=fresh,
        )
        error: DuetimeClientError
        pause = 0.0
        if isinstance(result, NoResponse):
            error = ConnectionFailed(f"no response from {to.url}: {result.reason}", sent=result.sent)
            again = call.repeatable or not result.sent
            doubtful = doubtful or result.sent
            if result.reused and again:
                fresh = True
                continue
        else:
            assert isinstance(result, Response)
            if result.status < 300:
                try:
                    return call.read(result.body)
                except UnexpectedResponse as unexpected:
                    raise not_duetime(to.url, str(unexpected), result.status) from None
            error = error_from(result.status, result.body, to.url)
            if isinstance(error, Unauthorized) and "x-api-key" not in headers:
                error = Unauthorized(_no_key(), code=error.code, status=error.status)
            if doubtful and call.gone_is_done and isinstance(error, NotFound):
                return call.read(b"")
            again = result.status in RETRIED and (call.repeatable or result.status == 429)
            again = again and not isinstance(error, Unauthorized)
            doubtful = doubtful or result.status >= 500
            pause = _seconds(result.retry_after)
        failed += 1
        # Jitter: clients that failed together must not come back together.
        pause += random.uniform(0, min(BACKOFF_SECONDS * 2**failed, BACKOFF_SECONDS_MAX))
        if not again or failed >= options.attempts_max or clock.monotonic() + pause >= deadline:
            raise error
        yield Wait(pause)


def _seconds(retry_after: str | None) -> float:
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0


# --- the methods ---------------------------------------------------------------------------------------------------


class operation(Generic[P, T]):
    """A method made from a function that describes a call. It returns the result, or on ``AsyncClient`` a coroutine."""

    def __init__(self, describe: Callable[P, Call[T]]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, client: SyncOperations, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncOperations, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: SyncOperations | AsyncOperations | None, owner: type) -> Any:
        describe = self._describe
        if client is None:
            return describe

        @functools.wraps(describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.run(describe(*args, **kwargs))

        return method


class listing(Generic[P]):
    """The same for a list in pages: the method returns an iterator or an asynchronous iterator."""

    def __init__(self, describe: Callable[P, Call[TimerPage]]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[TimerPage]]: ...
    @overload
    def __get__(self, client: SyncOperations, owner: type) -> Callable[P, Iterator[Timer]]: ...
    @overload
    def __get__(self, client: AsyncOperations, owner: type) -> Callable[P, AsyncIterator[Timer]]: ...
    def __get__(self, client: SyncOperations | AsyncOperations | None, owner: type) -> Any:
        describe = self._describe
        if client is None:
            return describe

        @functools.wraps(describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.walk(describe(*args, **kwargs))

        return method


class bulk(Generic[P]):
    """The same for an operation on all timers that match: the method returns their number."""

    def __init__(self, describe: Callable[P, Bulk]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Bulk]: ...
    @overload
    def __get__(self, client: SyncOperations, owner: type) -> Callable[P, int]: ...
    @overload
    def __get__(self, client: AsyncOperations, owner: type) -> Callable[P, Coroutine[Any, Any, int]]: ...
    def __get__(self, client: SyncOperations | AsyncOperations | None, owner: type) -> Any:
        describe = self._describe
        if client is None:
            return describe

        @functools.wraps(describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.run_all(describe(*args, **kwargs))

        return method


class Operations:
    """The methods of both clients, described in ``duetime.client.calls``."""

    create = operation(calls.create)
    upsert = operation(calls.upsert)
    batch = operation(calls.batch)
    batch_ids = operation(calls.batch_ids)
    get = operation(calls.get)
    update = operation(calls.update)
    cancel = operation(calls.cancel)
    cancel_all = bulk(calls.cancel_all)
    delete = operation(calls.delete)
    page = operation(calls.page)
    list = listing(calls.pages)
    count = operation(calls.count)
    attempts = operation(calls.attempts)
    replay = operation(calls.replay)
    replay_all = bulk(calls.replay_all)
    namespaces = operation(calls.namespaces)
    namespace = operation(calls.namespace)
    create_namespace = operation(calls.create_namespace)
    update_namespace = operation(calls.update_namespace)
    pause = operation(calls.pause)
    resume = operation(calls.resume)
    add_secret = operation(calls.add_secret)
    delete_secret = operation(calls.delete_secret)
    overview = operation(calls.overview)
    cluster = operation(calls.cluster)
    health = operation(calls.health)


class SyncOperations(Operations):
    """The methods of ``Client``: each returns its result."""

    def run(self, call: Call[T]) -> T:
        raise NotImplementedError

    def walk(self, call: Call[TimerPage]) -> Iterator[Timer]:
        while True:
            page = self.run(call)
            yield from page.timers
            if page.next_cursor is None:
                return
            call = calls.after(call, page.next_cursor)

    def run_all(self, bulk: Bulk) -> int:
        total = 0
        while True:
            portion = self.run(bulk.call(total))
            total += portion.timers
            if not portion.more or total == bulk.limit:
                return total


class AsyncOperations(Operations):
    """The methods of ``AsyncClient``: each returns an awaitable."""

    async def run(self, call: Call[T]) -> T:
        raise NotImplementedError

    async def walk(self, call: Call[TimerPage]) -> AsyncIterator[Timer]:
        while True:
            page = await self.run(call)
            for timer in page.timers:
                yield timer
            if page.next_cursor is None:
                return
            call = calls.after(call, page.next_cursor)

    async def run_all(self, bulk: Bulk) -> int:
        total = 0
        while True:
            portion = await self.run(bulk.call(total))
            total += portion.timers
            if not portion.more or total == bulk.limit:
                return total


def returned(stop: StopIteration, call: Call[T]) -> T:
    """The result of an exchange of this call."""
    return cast(T, stop.value)


def reason_of(error: BaseException) -> str:
    """Why a connection failed, in words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}; is it a server without TLS, at http://?"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()  # a name that does not resolve
    return str(error) or "the connection was closed"
