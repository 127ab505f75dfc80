"""HTTP in: requests and answers as the doors see them, routes, keys, and the server that carries them.

A thin layer on ASGI. What goes wrong below a door (an unknown path, a wrong method, a body over the limit, a bug) is
answered by the door that owns the path, in its own error shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote_to_bytes

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from duetime.errors import DuetimeError, InvalidInput, PayloadTooLarge, SettingsError

log = logging.getLogger(__name__)

QUERY_FIELDS_MAX = 64
BACKLOG = 4096
JSON = (b"content-type", b"application/json")

Header = tuple[bytes, bytes]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def guards(policy: str) -> tuple[Header, ...]:
    """What tells browsers to do no more with an answer than its Content-Security-Policy says."""
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )


GUARDS = guards("default-src 'none'; frame-ancestors 'none'")
"""On everything that is not a page: nothing in it is to be run or shown by others."""


class NotFound(DuetimeError):
    def __init__(self) -> None:
        super().__init__("there is nothing at this path")


class MethodNotAllowed(DuetimeError):
    def __init__(self, allowed: Sequence[str]) -> None:
        super().__init__(f"this path takes {', '.join(allowed)}")
        self.allowed = allowed


class Unauthorized(DuetimeError):
    def __init__(self, message: str = "unauthorized") -> None:
        super().__init__(message)


class TooBusy(DuetimeError):
    """As many are served at a time as can be."""


class _Gone(Exception):
    """The client left before its request was whole: there is nobody to answer."""


class Request:
    """One request: its route's path parameters, its query, its headers, its body."""

    __slots__ = ("_receive", "_scope", "method", "parameters")

    def __init__(self, scope: Message, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self.method: str = scope["method"]
        self.parameters: tuple[str, ...] = ()

    def header(self, name: bytes) -> bytes | None:
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    def query(self) -> dict[str, str]:
        """The query's parameters, each given at most once."""
        try:
            pairs = parse_qsl(
                self._scope["query_string"].decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=QUERY_FIELDS_MAX,
            )
        except (UnicodeError, ValueError) as error:
            raise InvalidInput("query", "is not a valid query string") from error
        query: dict[str, str] = {}
        for name, value in pairs:
            if name in query:
                raise InvalidInput(name, "is given twice")
            query[name] = value
        return query

    async def body(self, bytes_max: int) -> bytes:
        """The whole body, refused as soon as it is known to be over ``bytes_max``."""
        announced = self.header(b"content-length")
        if announced is not None and int(announced) > bytes_max:
            raise PayloadTooLarge("body", f"is larger than {bytes_max} bytes")
        body = b""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            body += message.get("body", b"")
            if len(body) > bytes_max:
                raise PayloadTooLarge("body", f"is larger than {bytes_max} bytes")
            more = message.get("more_body", False)
        return body


class Response:
    __slots__ = ("body", "guards", "headers", "status")

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: Sequence[Header] = (JSON,),
        guards: Sequence[Header] = GUARDS,
    ) -> None:
        self.status = status
        self.body = body
        self.headers = headers
        self.guards = guards


class Stream(Response):
    """An answer whose body comes piece by piece, until there are no more or the client leaves."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Sequence[Header]) -> None:
        super().__init__(200, headers=headers)
        self.pieces = pieces

    async def send(self, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(send))
            tasks.create_task(_until_left(receive, writing))

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self.pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


async def _until_left(receive: Receive, writing: asyncio.Task[None]) -> None:
    """Stop the writing when the client has left, which also is what one is told after the end."""
    while (await receive())["type"] != "http.disconnect":
        pass
    writing.cancel()


Handler = Callable[[Request], Awaitable[Response]]


class Door(Protocol):
    """What the application needs of a door."""

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method; a path segment ``{}`` is a parameter."""

    def refusal(self, error: Exception) -> Response:
        """The answer for an error that a handler raised, in the door's shape."""


class Sessions(Protocol):
    """Tells the cookie of somebody who has signed in from any other."""

    def holds(self, request: Request) -> bool: ...


class Keys:
    """Tells a caller with the API key, or signed in with it, from one without."""

    def __init__(self, api_key: str | None, sessions: Sessions | None = None) -> None:
        self._key = None if api_key is None else api_key.encode()
        self._sessions = sessions

    @property
    def needed(self) -> bool:
        return self._key is not None

    def fits(self, given: bytes) -> bool:
        return self._key is not None and hmac.compare_digest(given, self._key)

    def check(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.header(b"x-api-key")
        if given is None:
            authorization = request.header(b"authorization")
            if authorization is None and self._sessions is not None and self._sessions.holds(request):
                return
            scheme, _, token = (authorization or b"").partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
        if not self.fits(given):
            raise Unauthorized


_STREAM = "duetime.stream"
"""Marks the scope of a request that is answered by a stream."""


class Application:
    """The ASGI application: finds the door and the handler, and sends the answer."""

    def __init__(self, doors: Sequence[Door], *, fallback: Door, under: Mapping[str, Door]) -> None:
        """``fallback`` answers for paths that nobody has, except those below a prefix in ``under``."""
        self._fixed: dict[str, tuple[Door, dict[str, Handler]]] = {}
        self._shaped: list[tuple[list[str], Door, dict[str, Handler]]] = []
        self.fallback = fallback
        self._under = under
        for door in doors:
            for path, methods in door.routes().items():
                if "{}" in path:
                    self._shaped.append((path.split("/"), door, methods))
                else:
                    self._fixed[path] = (door, methods)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        door = next((d for prefix, d in self._under.items() if scope["path"].startswith(prefix)), self.fallback)
        try:
            door, methods = self._find(scope, request)
            # A HEAD is a GET whose body the server leaves out.
            handler = methods.get("GET" if request.method == "HEAD" else request.method)
            if handler is None:
                raise MethodNotAllowed(sorted(methods))
            response = await handler(request)
        except _Gone:
            return
        except Exception as error:
            response = door.refusal(error)
            if response.status == 500:
                log.exception("%s %s failed", request.method, scope["path"])
            elif response.status == 503:
                log.warning("%s %s: %s", request.method, scope["path"], error)
        headers = [*response.headers, *response.guards]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        if isinstance(response, Stream) and request.method != "HEAD":
            scope[_STREAM] = True
            await send(start)
            await response.send(receive, send)
            return
        if response.status not in (204, 304):
            headers.append((b"content-length", str(len(response.body)).encode()))
        await send(start)
        await send({"type": "http.response.body", "body": response.body})

    def _find(self, scope: Message, request: Request) -> tuple[Door, dict[str, Handler]]:
        fixed = self._fixed.get(scope["path"])
        if fixed is not None:
            return fixed
        segments = scope["raw_path"].decode("ascii", "replace").split("/")
        for shape, door, methods in self._shaped:
            if len(shape) == len(segments) and all(
                s in ("{}", given) for s, given in zip(shape, segments, strict=True)
            ):
                try:
                    request.parameters = tuple(
                        unquote_to_bytes(given).decode() for s, given in zip(shape, segments, strict=True) if s == "{}"
                    )
                except UnicodeDecodeError:
                    raise NotFound from None
                return door, methods
        raise NotFound


class _Gathering:
    """A transport that writes once for what was written to it in one round of the event loop.

    uvicorn writes the head and the body of an answer one after the other, and each would be a system call.
    """

    __slots__ = ("_loop", "_transport", "_unwritten")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unwritten: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._unwritten:
            self._loop.call_soon(self._flush)
        self._unwritten.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if unwritten and not self._transport.is_closing():
            self._transport.write(b"".join(unwritten))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the node: it drains first and stops the server last."""
        yield


def server(application: Application) -> uvicorn.Server:
    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(cast(asyncio.Transport, _Gathering(transport, self.loop)))

        def send_400_response(self, msg: str) -> None:
            """What is not even HTTP gets an answer in the shape of the others."""
            response = application.fallback.refusal(InvalidInput("", "the request is not valid HTTP"))
            length = b"content-length", str(len(response.body)).encode()
            headers = (*response.headers, *response.guards, length, (b"connection", b"close"))
            head = b"\r\n".join((b"HTTP/1.1 400 Bad Request", *(b"%s: %s" % header for header in headers)))
            self.transport.write(head + b"\r\n\r\n" + response.body)
            self.transport.close()

        def shutdown(self) -> None:
            """A stream that has not ended by now has a reader that does not read: nobody waits for it."""
            if self.cycle is not None and not self.cycle.response_complete and _STREAM in self.cycle.scope:
                self.transport.abort()
            super().shutdown()

    config = uvicorn.Config(
        application,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
    )
    return _Server(config)


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise SettingsError(f"PORT: can't listen on {host}:{port}: {error.strerror}") from error
