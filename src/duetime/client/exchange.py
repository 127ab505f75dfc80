"""What ``Client`` and ``AsyncClient`` share: where the server is, when to try again, and the list of their methods.

``exchange`` is the whole life of one call without any I/O: a generator that asks its transport to send or to wait and
is told what came of it. A transport is a loop of ten lines around it.

A call is tried again after a failed connection, a 429 and a 502, 503 or 504, with waits that double, each drawn from
zero to twice that, and never shorter than ``Retry-After``. It ends with the last error when the tries or the time are
used up. A call that must not run twice is tried again only when the server can't have seen it: it always has a
connection of its own, and after a 429 or a connection that was never made.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload
from urllib.parse import urlsplit

from msgspec import Struct

from duetime import __version__
from duetime.client import calls
from duetime.client.calls import Call
from duetime.client.errors import (
    ConnectionFailed,
    DuetimeClientError,
    InvalidRequest,
    NotFound,
    Unauthorized,
    refused,
)
from duetime.client.values import Timer, TimerPage
from duetime.clock import Clock

DEFAULT_URL = "http://localhost:3000"
URL_VARIABLE = "TIMER_URL"
KEY_VARIABLE = "API_KEY"
KEY_FILE = "duetime.key"  # what the server names it when it makes its own

ANSWER_BYTES_MAX = 512 * 1024 * 1024
IDLE_MAX = 16
PAUSE_SECONDS = 0.1
PAUSE_SECONDS_MAX = 5.0
RETRIED = {429, 502, 503, 504}

P = ParamSpec("P")
T = TypeVar("T")


# --- where ---------------------------------------------------------------------------------------------------------


class Endpoint(Struct, frozen=True, kw_only=True):
    """A server, and what each request to it carries."""

    url: str
    tls: bool
    host: str
    port: int
    authority: str
    prefix: str
    headers: dict[str, str]


def endpoint(url: str | None, key: str | None) -> Endpoint:
    """The server from the arguments, or the environment; the key also from the file that the server makes."""
    url = (url or os.environ.get(URL_VARIABLE, "").strip() or DEFAULT_URL).rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError
        if "@" in parts.netloc or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError
    except ValueError:
        raise InvalidRequest(f"{url!r} is not the address of a server, like {DEFAULT_URL}") from None
    tls = parts.scheme == "https"
    headers = {"accept": "application/json", "user-agent": f"duetime-python/{__version__}"}
    key = key or os.environ.get(KEY_VARIABLE, "").strip() or _kept_key()
    if key:
        if not key.isascii() or not key.isprintable():
            raise InvalidRequest("the key has characters that a key can't have")
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


def _kept_key() -> str | None:
    try:
        return Path(KEY_FILE).read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None


# --- one call ------------------------------------------------------------------------------------------------------


class Options(Struct, frozen=True, kw_only=True):
    timeout_seconds: float  # for the whole call, with its tries and waits
    attempt_timeout_seconds: float
    attempts_max: int


class Send(Struct, frozen=True, kw_only=True):
    """Send this, and say what came back."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes | None
    timeout_seconds: float
    fresh: bool  # not on a connection that was kept


class Wait(Struct, frozen=True):
    """Do nothing for so long."""

    seconds: float


class Answer(Struct, frozen=True):
    status: int
    retry_after: str | None
    body: bytes


class Lost(Struct, frozen=True, kw_only=True):
    """There was no whole answer."""

    reason: str
    sent: bool  # whether the server may have seen the request
    kept: bool = False  # whether it was on a kept connection, which may just have been too old


Exchange = Generator[Send | Wait, Answer | Lost | None, T]


def exchange(call: Call[T], to: Endpoint, options: Options, clock: Clock) -> Exchange[T]:
    deadline = clock.monotonic() + options.timeout_seconds
    headers = to.headers | call.headers | ({} if call.body is None else {"content-type": "application/json"})
    fresh = not call.repeatable
    doubtful = False  # whether an earlier try may have been carried out
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
        if isinstance(result, Lost):
            error = ConnectionFailed(f"no answer from {to.url}: {result.reason}", sent=result.sent)
            again = call.repeatable or not result.sent
            doubtful = doubtful or result.sent
            if result.kept and again:
                fresh = True
                continue
        else:
            assert isinstance(result, Answer)
            if result.status < 300:
                return call.read(result.body)
            error = refused(result.status, result.body)
            if doubtful and call.gone_is_done and isinstance(error, NotFound):
                return call.read(b"")
            again = result.status in RETRIED and (call.repeatable or result.status == 429)
            again = again and not isinstance(error, Unauthorized)
            doubtful = doubtful or result.status >= 500
            pause = _seconds(result.retry_after)
        failed += 1
        # Drawn, so that clients who failed together do not come back together.
        pause += random.uniform(0, min(PAUSE_SECONDS * 2**failed, PAUSE_SECONDS_MAX))
        if not again or failed >= options.attempts_max or clock.monotonic() + pause >= deadline:
            raise error
        yield Wait(pause)


def _seconds(retry_after: str | None) -> float:
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0


# --- the methods ---------------------------------------------------------------------------------------------------


class operation(Generic[P, T]):
    """A method made of a function that describes a call: one client returns what came of it, the other a coroutine."""

    def __init__(self, describe: Callable[P, Call[T]]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaiting, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Blocking | Awaiting | None, owner: type) -> Any:
        describe = self._describe
        if client is None:
            return describe

        @functools.wraps(describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.run(describe(*args, **kwargs))

        return method


class listing(Generic[P]):
    """The same for a list that comes in pages: an iterator, or an asynchronous one."""

    def __init__(self, describe: Callable[P, Call[TimerPage]]) -> None:
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[TimerPage]]: ...
    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[P, Iterator[Timer]]: ...
    @overload
    def __get__(self, client: Awaiting, owner: type) -> Callable[P, AsyncIterator[Timer]]: ...
    def __get__(self, client: Blocking | Awaiting | None, owner: type) -> Any:
        describe = self._describe
        if client is None:
            return describe

        @functools.wraps(describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.walk(describe(*args, **kwargs))

        return method


class Operations:
    """What both clients can do. Each is described in ``duetime.client.calls``."""

    create = operation(calls.create)
    upsert = operation(calls.upsert)
    batch = operation(calls.batch)
    batch_ids = operation(calls.batch_ids)
    get = operation(calls.get)
    update = operation(calls.update)
    cancel = operation(calls.cancel)
    delete = operation(calls.delete)
    page = operation(calls.page)
    list = listing(calls.pages)
    attempts = operation(calls.attempts)
    replay = operation(calls.replay)
    replay_all = operation(calls.replay_all)
    namespaces = operation(calls.namespaces)
    namespace = operation(calls.namespace)
    create_namespace = operation(calls.create_namespace)
    update_namespace = operation(calls.update_namespace)
    pause = operation(calls.pause)
    resume = operation(calls.resume)
    add_secret = operation(calls.add_secret)
    delete_secret = operation(calls.delete_secret)
    cluster = operation(calls.cluster)
    health = operation(calls.health)


class Blocking(Operations):
    """Operations that return when they are done."""

    def run(self, call: Call[T]) -> T:
        raise NotImplementedError

    def walk(self, call: Call[TimerPage]) -> Iterator[Timer]:
        while True:
            page = self.run(call)
            yield from page.timers
            if page.next_cursor is None:
                return
            call = calls.after(call, page.next_cursor)


class Awaiting(Operations):
    """Operations that are awaited."""

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


def returned(stop: StopIteration, call: Call[T]) -> T:
    """What an exchange of this call ended with."""
    return cast(T, stop.value)


def why(error: BaseException) -> str:
    """A connection's failure in words."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()  # a name that does not resolve
    return str(error) or "the connection was closed"
