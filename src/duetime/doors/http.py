"""Requests, responses, routes and API keys of the HTTP APIs.

Each API formats its own errors. That includes errors that no handler raises, such as an unknown path, a wrong method or
an invalid request: the API that owns the path formats them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol
from urllib.parse import parse_qsl, unquote_to_bytes

from duetime.doors import wire
from duetime.doors.body_budget import BodyBudget
from duetime.doors.http_heads import Framing, Header
from duetime.errors import DuetimeError, InvalidInput, PayloadTooLarge
from duetime.model import DEFAULT_NAMESPACE

log = logging.getLogger(__name__)

QUERY_FIELDS_MAX = 64
PATH_CHARS_LOGGED_MAX = 200
PATH_CHARS_COMPARED_MAX = 64
PIECE_BYTES_MIN, GATHERED_BYTES_MAX = 4 * 1024, 64 * 1024
"""Small pieces of a body are joined up to this size: an object for each would take many times their bytes."""
JSON = (b"content-type", b"application/json")


def guards(policy: str) -> tuple[Header, ...]:
    """The headers that limit what browsers do with a response to what the Content-Security-Policy allows."""
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )


GUARDS = guards("default-src 'none'; frame-ancestors 'none'")
"""For everything except pages: browsers run nothing in it, and no page can embed it."""
DATA_GUARDS = (*GUARDS, (b"cache-control", b"no-store"))
"""For everything except files: no browser or proxy caches it."""


NO_KEY = "unauthorized: send the API key as X-API-Key or Authorization: Bearer"
WRONG_KEY = "unauthorized: invalid API key"


class NotFound(DuetimeError):
    def __init__(self, message: str = "this path does not exist; /docs describes the API") -> None:
        super().__init__(message)


class MethodNotAllowed(DuetimeError):
    def __init__(self, allowed: Sequence[str]) -> None:
        super().__init__(f"this path allows only {', '.join(allowed)}")
        self.allowed = allowed


class Unauthorized(DuetimeError):
    def __init__(self, message: str = NO_KEY) -> None:
        super().__init__(message)


class Forbidden(DuetimeError):
    """The page or host name that the request comes from is not allowed."""


class TooManyWrongKeys(DuetimeError):
    def __init__(self, wait_seconds: int) -> None:
        super().__init__(
            f"too many wrong API keys from this address: wait {wait_seconds} s; the right key works at once"
        )
        self.wait_seconds = wait_seconds


class TooBusy(DuetimeError):
    """A concurrency limit is reached."""


class TooSlow(DuetimeError):
    def __init__(self) -> None:
        super().__init__("the request body arrived too slowly")


class UnknownCoding(DuetimeError):
    def __init__(self, coding: str) -> None:
        super().__init__(f"the body is compressed (Content-Encoding: {coding}); send it uncompressed")


class Gone(Exception):
    """The client left: nobody waits for a response."""


class Connection(Protocol):
    """The connection of a request, as the request sees it."""

    address: str
    signed_in: bool
    lost: bool

    @property
    def budget(self) -> BodyBudget:
        """The budget for the bodies of its requests."""

    def sign_in(self) -> None:
        """A request carried a valid key or session. Called once."""

    def more(self, request: Request) -> None:
        """The handler waits for the rest of the body."""


NO_FRAMING = Framing()
NO_ROOM = "the memory for request bodies is used up (DUETIME_MAX_BODIES_BYTES); try again"


class Request:
    """One request: path parameters, query, headers, and the body as it arrives."""

    __slots__ = (
        *(
            "_broken",
            "_budget",
            "_connection",
            "_fed",
            "_framing",
            "_held",
            "_pieces",
            "_waiting",
            "answered",
            "headers",
        ),
        *("last", "method", "old", "parameters", "path", "query_string", "raw_path", "whole"),
    )

    def __init__(
        self,
        method: str,
        path: str,
        raw_path: bytes = b"",
        query_string: bytes = b"",
        headers: Sequence[Header] = (),
        connection: Connection | None = None,
        framing: Framing = NO_FRAMING,
    ) -> None:
        self.method = method
        self.path = path
        self.raw_path = raw_path
        self.query_string = query_string
        self.headers = headers
        self.parameters: tuple[str, ...] = ()
        self.last = False  # the connection is closed after the response
        self.old = False  # HTTP/1.0
        self.whole = False  # the whole body has arrived
        self.answered = False  # the rest of the body is dropped
        self._connection = connection
        self._framing = framing
        self._pieces: list[bytes | bytearray] = []
        self._fed = 0
        self._held = 0  # bytes of the budget
        self._budget: BodyBudget | None = None
        self._broken: Exception | None = None  # why the rest of the body will not arrive
        self._waiting: asyncio.Future[None] | None = None

    @property
    def announced(self) -> int:
        """The Content-Length; 0 without one."""
        return self._framing.announced

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._connection is not None and self._connection.lost

    @property
    def fed(self) -> int:
        """How many bytes of the body have arrived."""
        return self._fed

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def query(self) -> dict[str, str]:
        """The query parameters; raises if one is given more than once."""
        try:
            pairs = parse_qsl(
                self.query_string.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=QUERY_FIELDS_MAX,
            )
        except (UnicodeError, ValueError) as error:
            raise InvalidInput(
                "query", f"must be percent-encoded UTF-8 with at most {QUERY_FIELDS_MAX} parameters"
            ) from error
        query: dict[str, str] = {}
        for name, value in pairs:
            if name in query:
                raise InvalidInput(name, "must be given only once")
            query[name] = value
        return query

    def check_query(self, known: Sequence[str] = ()) -> None:
        """Raise if the query has a parameter that is not one of these."""
        for name in self.query() if self.query_string else ():
            if name not in known:
                raise wire.unknown_name(name, known, "query parameter")

    def prefers_minimal(self) -> bool:
        """Whether the client prefers a minimal response (RFC 7240); the first preference counts."""
        preferences = b",".join(value for name, value in self.headers if name == b"prefer").lower()
        for preference in preferences.split(b","):
            name, _, value = preference.partition(b";")[0].partition(b"=")
            if name.strip() == b"return":
                return value.strip().strip(b'"') == b"minimal"
        return False

    async def body(self, bytes_max: int) -> bytes:
        """Wait for the whole body; raises as soon as it exceeds ``bytes_max`` or the budget. The request holds its
        bytes of the budget until ``release``."""
        announced, coding = self._framing
        if coding:
            raise UnknownCoding(coding)
        if announced > bytes_max:
            raise PayloadTooLarge("body", f"is larger than {bytes_max} bytes")
        connection = self._connection
        budget = self._budget = None if connection is None else connection.budget
        if budget is not None and not self.whole and not budget.has_room(announced, announced):
            raise TooBusy(NO_ROOM)
        while True:
            fed = self._fed
            if fed > bytes_max:
                raise PayloadTooLarge("body", f"is larger than {bytes_max} bytes")
            if budget is not None:
                if not budget.take(fed - self._held, fed):
                    raise TooBusy(NO_ROOM)
                self._held = fed
            if self.whole:
                pieces, self._pieces = self._pieces, []
                return b"".join(pieces)  # not a copy if there is only one piece
            if self._broken is not None or connection is None:
                raise self._broken or Gone
            self._waiting = asyncio.get_running_loop().create_future()
            connection.more(self)
            await self._waiting

    @property
    def address(self) -> str:
        """The address of the client, or of the last proxy."""
        return "" if self._connection is None else self._connection.address

    def sign_in(self) -> None:
        """This request carries a valid key or session."""
        connection = self._connection
        if connection is not None and not connection.signed_in:
            connection.sign_in()

    # Called by the connection.

    def with_body(self, body: bytes) -> Request:
        """A new request with the same head and this whole body."""
        head = self.method, self.path, self.raw_path, self.query_string, self.headers
        other = Request(*head, self._connection, self._framing)
        other._pieces.append(body)
        other._fed = len(body)
        other.whole = True
        return other

    def has_body(self, body: bytes) -> bool:
        """Whether exactly these bytes of the body have arrived."""
        return b"".join(self._pieces) == body

    @property
    def waits(self) -> bool:
        """Whether the handler waits for the rest of the body."""
        return self._waiting is not None and not self._waiting.done()

    def feed(self, piece: bytes) -> int:
        """Add a piece of the body; returns how many bytes have arrived."""
        self._fed += len(piece)
        if not self.answered:
            pieces = self._pieces
            if not pieces or len(piece) >= PIECE_BYTES_MIN:
                pieces.append(piece)
            elif isinstance(last := pieces[-1], bytearray) and len(last) < GATHERED_BYTES_MAX:
                last += piece
            else:
                pieces.append(bytearray(piece))
            self._wake()
        return self._fed

    def end(self) -> None:
        """The whole body has arrived."""
        self.whole = True
        self._wake()

    def leave(self) -> None:
        """The client left: the rest of the body will not arrive."""
        self.fail(Gone())

    def fail(self, error: Exception) -> None:
        """Make the handler's wait for the body raise this error."""
        self._broken = error
        self._wake()

    def release(self) -> None:
        """The request is handled, or its client has left: free the body and drop the rest of it."""
        self.answered = True
        self._pieces = []
        if self._budget is not None:
            self._budget.held -= self._held
            self._held = 0

    def _wake(self) -> None:
        if self.waits:
            assert self._waiting is not None
            self._waiting.set_result(None)


class Response:
    __slots__ = ("body", "guards", "headers", "location", "status")

    def __init__(
        self,
        status: int,
        body: bytes = b"",
        headers: Sequence[Header] = (JSON,),
        guards: Sequence[Header] = DATA_GUARDS,
    ) -> None:
        self.status = status
        self.body = body
        self.headers = headers
        self.guards = guards
        self.location = b""  # of the created resource; not in ``headers``, which are few and cached


class Stream(Response):
    """A response whose body is sent piece by piece, until there are no more or the client leaves."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Sequence[Header]) -> None:
        super().__init__(200, headers=headers)
        self.pieces = pieces


Handler = Callable[[Request], Awaitable[Response]]


class Door(Protocol):
    """An API."""

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method; a path segment ``{}`` is a parameter."""

    def refusal(self, error: Exception) -> Response:
        """The response for an error, in the format of this API."""


class Guard(Protocol):
    """Checks every request before its handler."""

    def check(self, request: Request) -> None:
        """Raise if the request is not allowed."""


class Sessions(Protocol):
    """Checks session cookies."""

    async def holds(self, request: Request) -> bool: ...


class WrongKeys(Protocol):
    """Counts wrong keys."""

    def note(self, address: str) -> int:
        """Count a wrong key of this address; returns for how many seconds it has to wait, or 0."""


class Keys:
    """Checks whether a request has the API key or a session."""

    def __init__(
        self, api_key: str | None, sessions: Sessions | None = None, wrong_keys: WrongKeys | None = None
    ) -> None:
        self._key = None if api_key is None else api_key.encode()
        self._sessions = sessions
        self._wrong_keys = wrong_keys

    @property
    def needed(self) -> bool:
        return self._key is not None

    async def check(self, request: Request) -> None:
        given = _given(request)
        if given is None and self._sessions is not None and await self._sessions.holds(request):
            request.sign_in()
        else:
            self.check_key(given or b"", request)

    def check_key(self, given: bytes, request: Request) -> None:
        """Sign the request in if this is the key. The right key never waits because of wrong ones."""
        if self._is_right(given):
            if self.needed:
                request.sign_in()
            return
        if given and self._wrong_keys is not None and (wait_seconds := self._wrong_keys.note(request.address)):
            raise TooManyWrongKeys(wait_seconds)
        raise Unauthorized(WRONG_KEY if given else NO_KEY)

    def has_key(self, request: Request) -> bool:
        """Whether the request carries the key, or no key is needed."""
        return self._is_right(_given(request))

    def _is_right(self, given: bytes | None) -> bool:
        return self._key is None or (given is not None and hmac.compare_digest(given, self._key))


def locked(keys: Keys, handler: Handler, parameters: Sequence[str] = ()) -> Handler:
    """Wrap a handler so that requests need the key or a session, and may have only these query ``parameters``."""

    async def checked(request: Request) -> Response:
        if keys.has_key(request):  # Nearly all requests have it; this saves them a coroutine.
            request.sign_in()
        else:
            await keys.check(request)
        if request.query_string:
            request.check_query(parameters)
        return await handler(request)

    return checked


def _given(request: Request) -> bytes | None:
    """The key that the request carries, valid or not; None without a header for it."""
    given = request.header(b"x-api-key")
    if given is None and (authorization := request.header(b"authorization")) is not None:
        scheme, _, token = authorization.partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else b""
    return given


class Application:
    """All APIs together: finds the handler of a request."""

    def __init__(
        self, doors: Sequence[Door], *, fallback: Door, under: Mapping[str, Door], guard: Guard | None = None
    ) -> None:
        """``fallback`` formats the errors of unknown paths, except those below a prefix in ``under``."""
        self._guard = guard
        self._fixed: dict[str, tuple[Door, dict[str, Handler]]] = {}
        self._shaped: list[tuple[list[str], Door, dict[str, Handler]]] = []
        self._fallback = fallback
        self._under = under
        for door in doors:
            for path, methods in door.routes().items():
                if "{}" in path:
                    self._shaped.append((path.split("/"), door, methods))
                else:
                    self._fixed[path] = (door, methods)

    async def answer(self, request: Request) -> Response | None:
        door: Door | None = None
        try:
            door, methods = self._find(request)
            if self._guard is not None:
                self._guard.check(request)
            # A HEAD is a GET; the connection omits the body of the response.
            handler = methods.get("GET" if request.method == "HEAD" else request.method)
            if handler is None:
                raise MethodNotAllowed(sorted({*methods, "HEAD"} if "GET" in methods else methods))
            return await handler(request)
        except Gone:
            return None
        except Exception as error:
            response = (door or self._door_of(request.path)).refusal(error)
            if response.status == 500:
                log.exception("%s %s failed", request.method, shown_path(request))
            elif response.status == 503:
                log.warning("%s %s: %s", request.method, shown_path(request), error)
            return response

    def refusal(self, error: Exception, path: str) -> Response:
        """The response to an invalid request, in the format of the API that owns the path, as far as that is known."""
        return self._door_of(path).refusal(error)

    def _door_of(self, path: str) -> Door:
        return next((door for prefix, door in self._under.items() if path.startswith(prefix)), self._fallback)

    def _find(self, request: Request) -> tuple[Door, dict[str, Handler]]:
        fixed = self._fixed.get(request.path)
        raw_path = request.raw_path
        if fixed is not None and (b"%" not in raw_path or b"%2f" not in raw_path.lower()):  # no escaped slash
            return fixed
        segments = raw_path.decode("ascii", "replace").split("/")
        for shape, door, methods in self._shaped:
            if _fits(shape, segments):
                try:
                    request.parameters = tuple(
                        unquote_to_bytes(given).decode() for s, given in zip(shape, segments, strict=True) if s == "{}"
                    )
                except UnicodeDecodeError:
                    raise NotFound from None
                return door, methods
        raise self._not_found(segments)

    def _not_found(self, segments: list[str]) -> NotFound:
        *others, last = segments
        path = "/".join(others)
        if not last and (path in self._fixed or self._shape_of(others)):
            shown = path if len(path) <= PATH_CHARS_LOGGED_MAX else path[: PATH_CHARS_LOGGED_MAX - 1] + "…"
            return NotFound(f"this path ends with a slash and does not exist; did you mean {shown}?")
        whole = "/".join(segments)
        if last in ("", DEFAULT_NAMESPACE) and (shape := self._shape_of([*(segments if last else others), "id"])):
            return NotFound("this path needs an id: " + "/".join(shape).format("{namespace}", "{id}"))
        near = self._with_default(segments) if len(whole) <= PATH_CHARS_LOGGED_MAX else None
        near = near or self._similar(whole)
        return NotFound(f"this path does not exist; did you mean {near}?") if near else NotFound()

    def _shape_of(self, segments: list[str]) -> list[str] | None:
        return next((shape for shape, _, _ in self._shaped if _fits(shape, segments)), None)

    def _with_default(self, segments: list[str]) -> str | None:
        """The path with the default namespace, if only the namespace is missing."""
        for at in range(len(segments)):
            path = [*segments[:at], DEFAULT_NAMESPACE, *segments[at:]]
            if self._shape_of(path):
                return "/".join(path)
        return None

    def _similar(self, path: str) -> str | None:
        """The path whose last segment is similar, and whose other segments are most similar."""
        if len(path) > PATH_CHARS_COMPARED_MAX:
            return None
        last = path.rpartition("/")[2]
        known = [one for one in self._fixed if get_close_matches(last, [one.rpartition("/")[2]], 1, 0.8)]
        return next(iter(get_close_matches(path, known, 1)), None)


def _fits(shape: list[str], segments: list[str]) -> bool:
    """Whether a path has this shape. A parameter is never empty."""
    return len(shape) == len(segments) and all(
        given if s == "{}" else s == given for s, given in zip(shape, segments, strict=True)
    )


def shown_path(request: Request) -> str:
    return request.raw_path[:PATH_CHARS_LOGGED_MAX].decode("ascii", "replace")
