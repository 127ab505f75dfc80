"""HTTP in: requests and answers as the doors see them, routes and keys.

What goes wrong below a door (an unknown path, a wrong method, a body over the limit, a bug) is
answered by the door that owns the path, in its own error shape.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import parse_qsl, unquote_to_bytes

from duetime.doors.budget import Budget
from duetime.doors.heads import Framing, Header
from duetime.errors import DuetimeError, InvalidInput, PayloadTooLarge

log = logging.getLogger(__name__)

QUERY_FIELDS_MAX = 64
PATH_CHARS_LOGGED_MAX = 200
PIECE_BYTES_MIN, GATHERED_BYTES_MAX = 4 * 1024, 64 * 1024
"""Smaller pieces of a body are gathered up to this size: an object for each would take many times their bytes."""
JSON = (b"content-type", b"application/json")


def guards(policy: str) -> tuple[Header, ...]:
    """What tells browsers to do no more with an answer than its Content-Security-Policy says."""
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )


GUARDS = guards("default-src 'none'; frame-ancestors 'none'")
"""On everything that is not a page: nothing in it is to be run or shown by others."""
DATA_GUARDS = (*GUARDS, (b"cache-control", b"no-store"))
"""On everything that is not a file: no cache keeps it, of a browser or of a proxy."""


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


class Forbidden(DuetimeError):
    """The request must not come from where it comes from."""


class TooManyWrongKeys(DuetimeError):
    def __init__(self, wait_seconds: int) -> None:
        super().__init__(
            f"too many wrong API keys came from this address: wait {wait_seconds} s; the right key works at once"
        )
        self.wait_seconds = wait_seconds


class TooBusy(DuetimeError):
    """A limit on what is served at the same time is reached."""


class TooSlow(DuetimeError):
    def __init__(self) -> None:
        super().__init__("the request came too slowly")


class UnknownCoding(DuetimeError):
    def __init__(self, coding: str) -> None:
        super().__init__(f"the body is compressed (Content-Encoding: {coding}); send it uncompressed")


class Gone(Exception):
    """The client left: there is nobody to answer."""


class Connection(Protocol):
    """What a request tells the connection that it came on."""

    address: str
    signed_in: bool
    lost: bool

    @property
    def budget(self) -> Budget:
        """What the bodies of its requests count against."""

    def sign_in(self) -> None:
        """A request carried a valid key or session. Called once."""

    def more(self, request: Request) -> None:
        """The handler waits for the rest of the body."""


NO_FRAMING = Framing()
NO_ROOM = "the service holds as many request bodies as it can; try again"


class Request:
    """One request: its route's path parameters, its query, its headers, and its body as it comes."""

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
        self.last = False  # of its connection
        self.old = False  # of HTTP/1.0
        self.whole = False  # its body has come
        self.answered = False  # whatever comes is dropped
        self._connection = connection
        self._framing = framing
        self._pieces: list[bytes | bytearray] = []
        self._fed = 0
        self._held = 0  # of the budget
        self._budget: Budget | None = None
        self._broken: Exception | None = None  # why the rest of the body will not come
        self._waiting: asyncio.Future[None] | None = None

    @property
    def announced(self) -> int:
        """How many bytes the head says the body has."""
        return self._framing.announced

    @property
    def gone(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self._connection is not None and self._connection.lost

    @property
    def fed(self) -> int:
        """How many bytes of the body have come."""
        return self._fed

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def query(self) -> dict[str, str]:
        """The query's parameters, each given at most once."""
        try:
            pairs = parse_qsl(
                self.query_string.decode("ascii"),
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

    def prefers_minimal(self) -> bool:
        """Whether the client wants no more of an answer than it needs (RFC 7240); the first that it says of that
        counts."""
        said = b",".join(value for name, value in self.headers if name == b"prefer").lower()
        for preference in said.split(b","):
            name, _, value = preference.partition(b";")[0].partition(b"=")
            if name.strip() == b"return":
                return value.strip().strip(b'"') == b"minimal"
        return False

    async def body(self, bytes_max: int) -> bytes:
        """The whole body, refused as soon as it is known to be over ``bytes_max`` or over the budget. The request holds
        its bytes of the budget until it is ``over``."""
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
                return b"".join(pieces)  # the piece itself, if there is but one
            if self._broken is not None or connection is None:
                raise self._broken or Gone
            self._waiting = asyncio.get_running_loop().create_future()
            connection.more(self)
            await self._waiting

    @property
    def address(self) -> str:
        """Where it comes from, or the last proxy on its way."""
        return "" if self._connection is None else self._connection.address

    def sign_in(self) -> None:
        """This request carries a valid key or session."""
        connection = self._connection
        if connection is not None and not connection.signed_in:
            connection.sign_in()

    # For whoever reads the connection.

    def again(self, body: bytes) -> Request:
        """Another request with the same head, whose body has come already."""
        head = self.method, self.path, self.raw_path, self.query_string, self.headers
        other = Request(*head, self._connection, self._framing)
        other._pieces.append(body)
        other._fed = len(body)
        other.whole = True
        return other

    def has(self, body: bytes) -> bool:
        """Whether this is what has come of its body."""
        return b"".join(self._pieces) == body

    @property
    def waits(self) -> bool:
        """Whether somebody waits for the rest of the body."""
        return self._waiting is not None and not self._waiting.done()

    def feed(self, piece: bytes) -> int:
        """A piece of the body came; how much of it there is now."""
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
        """The body is whole."""
        self.whole = True
        self._wake()

    def leave(self) -> None:
        """There will be no more of it."""
        self.fail(Gone())

    def fail(self, error: Exception) -> None:
        """Have its reader raise this, unless the body is whole."""
        self._broken = error
        self._wake()

    def over(self) -> None:
        """It is answered, or nobody waits for an answer: whatever comes from here on is dropped."""
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
    __slots__ = ("body", "guards", "headers", "status")

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


class Stream(Response):
    """An answer whose body comes piece by piece, until there are no more or the client leaves."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: Sequence[Header]) -> None:
        super().__init__(200, headers=headers)
        self.pieces = pieces


Handler = Callable[[Request], Awaitable[Response]]


class Door(Protocol):
    """What the application needs of a door."""

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method; a path segment ``{}`` is a parameter."""

    def refusal(self, error: Exception) -> Response:
        """The answer for an error that a handler raised, in the door's shape."""


class Guard(Protocol):
    """Judges every request before a handler sees it."""

    def check(self, request: Request) -> None:
        """Raise for a request that is refused."""


class Sessions(Protocol):
    """Tells the cookie of somebody who has signed in from any other."""

    async def holds(self, request: Request) -> bool: ...


class WrongKeys(Protocol):
    """Counts wrong keys."""

    def note(self, address: str) -> int:
        """An address sent a wrong key: for how many seconds it must send no other; 0 if it may."""


class Keys:
    """Tells a caller with the API key, or signed in with it, from one without."""

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

    def check_key(self, given: bytes, request: Request, message: str = "unauthorized") -> None:
        """Sign the request in if this is the key. The right one is never made to wait for the wrong ones."""
        if self._is_right(given):
            if self.needed:
                request.sign_in()
            return
        if given and self._wrong_keys is not None and (wait_seconds := self._wrong_keys.note(request.address)):
            raise TooManyWrongKeys(wait_seconds)
        raise Unauthorized(message)

    def has_key(self, request: Request) -> bool:
        """Whether the request carries the key, or needs none."""
        return self._is_right(_given(request))

    def _is_right(self, given: bytes | None) -> bool:
        return self._key is None or (given is not None and hmac.compare_digest(given, self._key))


def locked(keys: Keys, handler: Handler) -> Handler:
    """The handler, for callers with the key or a session."""

    async def checked(request: Request) -> Response:
        if keys.has_key(request):  # Nearly all have it: for them there is no coroutine but the handler's.
            request.sign_in()
        else:
            await keys.check(request)
        return await handler(request)

    return checked


def _given(request: Request) -> bytes | None:
    """The key that the request carries, right or wrong; None without a header for one."""
    given = request.header(b"x-api-key")
    if given is None and (authorization := request.header(b"authorization")) is not None:
        scheme, _, token = authorization.partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else b""
    return given


class Application:
    """All doors together: finds the door and the handler of a request."""

    def __init__(
        self, doors: Sequence[Door], *, fallback: Door, under: Mapping[str, Door], guard: Guard | None = None
    ) -> None:
        """``fallback`` answers for paths that nobody has, except those below a prefix in ``under``."""
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
            # A HEAD is a GET whose body the server leaves out.
            handler = methods.get("GET" if request.method == "HEAD" else request.method)
            if handler is None:
                raise MethodNotAllowed(sorted(methods))
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
        """The answer to what is not a request, in the shape of the door that has the path, as far as it is known."""
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


def shown_path(request: Request) -> str:
    return request.raw_path[:PATH_CHARS_LOGGED_MAX].decode("ascii", "replace")
