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
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
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


class NotFound(DuetimeError):
    def __init__(self) -> None:
        super().__init__("there is nothing at this path")


class MethodNotAllowed(DuetimeError):
    def __init__(self, allowed: Sequence[str]) -> None:
        super().__init__(f"this path takes {', '.join(allowed)}")
        self.allowed = allowed


class Unauthorized(DuetimeError):
    def __init__(self) -> None:
        super().__init__("unauthorized")


class _Gone(Exception):
    """The client left before its request was whole: there is nobody to answer."""


class Request:
    """One request: its route's path parameters, its query, its headers, its body."""

    __slots__ = ("_receive", "_scope", "method", "parameters")

    def __init__(self, scope: Message, receive: Callable[[], Awaitable[Message]]) -> None:
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
    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes = b"", headers: Sequence[Header] = (JSON,)) -> None:
        self.status = status
        self.body = body
        self.headers = headers


Handler = Callable[[Request], Awaitable[Response]]


class Door(Protocol):
    """What the application needs of a door."""

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method; a path segment ``{}`` is a parameter."""

    def refusal(self, error: Exception) -> Response:
        """The answer for an error that a handler raised, in the door's shape."""


class Keys:
    """Tells a caller with the API key from one without."""

    def __init__(self, api_key: str | None) -> None:
        self._key = None if api_key is None else api_key.encode()

    def check(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.header(b"x-api-key")
        if given is None:
            scheme, _, token = (request.header(b"authorization") or b"").partition(b" ")
            given = token.strip() if scheme.lower() == b"bearer" else b""
        if not hmac.compare_digest(given, self._key):
            raise Unauthorized


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

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
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
        headers = list(response.headers)
        if response.status != 204:
            headers.append((b"content-length", str(len(response.body)).encode()))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
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
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(response.body)}"
            self.transport.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + response.body)
            self.transport.close()

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
