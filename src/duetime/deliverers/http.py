"""The HTTP deliverer: sends a begun timer as one signed request and turns the response into an ``Outcome``.

It owns the format of a callback. The address guard (``egress``) decides where a request may go; the client (``client``)
sends it. One timeout covers everything from the DNS lookup to the last byte of the response. It never raises: a bad
target, a blocked address, a silent receiver, a local shortage and a bug in Duetime all become an ``Outcome`` with an
error text for users, and a bug is logged as well. The last two are ``UNSENT`` if no byte of the request was written: an
attempt that was never sent does not count.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from urllib.parse import quote

from msgspec import Struct

from duetime.clock import Clock
from duetime.deliverers.bodies import body_of
from duetime.deliverers.client import HttpClient
from duetime.deliverers.connection import Unreachable
from duetime.deliverers.egress import Egress, Refused, Unresolved
from duetime.deliverers.signing import sign
from duetime.deliverers.unsent import NotSent, unsent
from duetime.errors import InvalidInput
from duetime.model import HttpTarget, Outcome, OutcomeKind, Target, Timer, Unsent
from duetime.targets import METHODS, is_reserved
from duetime.timetext import format_duration
from duetime.urls import Url, parse_url

ROUTES_CACHED_MAX = 1024
HEADER_CHARS_CACHED_MAX = 4096  # targets with longer headers are not cached, so the cache stays small
CHECK_SECONDS_MAX = 1.0
REDIRECTS = (301, 302, 303, 307, 308)
RETRY_AFTER_MS_MAX = 366 * 24 * 3600 * 1000

_ANSWERED = OutcomeKind.ANSWERED  # looking up an enum member is slow
_UNREACHABLE = OutcomeKind.UNREACHABLE
_log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_IN_VALUE = re.compile(r"[\r\n\0]")
_QUOTE_SAFE = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


class _Route(Struct, frozen=True):
    """The parts of a request that are the same in all attempts for one target."""

    url: Url
    head: str  # the request line and the headers that do not change


class HttpDeliverer:
    def __init__(
        self,
        *,
        egress: Egress,
        clock: Clock,
        keys_of: Callable[[str], Sequence[bytes] | None],
        version: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._egress = egress
        self._clock = clock
        self._keys_of = keys_of
        # Other services with the platform API send the first part, and receivers may look for it.
        self._agent = f"timer-platform/0.1.0 duetime/{version}"
        self._client = HttpClient(tls=tls)
        self._cached_route = lru_cache(maxsize=ROUTES_CACHED_MAX)(self._prepare)

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        until = asyncio.get_running_loop().time() + timeout_ms / 1000
        answer = None
        try:
            route = self._route(timer.definition.target)
            url = route.url
            addresses = self._egress.known(url)
            if addresses is None:
                addresses = await self._egress.resolve(url, until)
            answer = await self._client.request(url, addresses, self._message(route, timer), until)
            status = answer.status
            return Outcome(
                kind=_ANSWERED,
                status=status,
                body=answer.body,
                error=None if 200 <= status < 300 else _error_of(status),
                retry_after_ms=None if answer.retry_after is None else self._wait_ms(answer.retry_after),
            )
        except TimeoutError:
            return Outcome(kind=OutcomeKind.TIMED_OUT, error=f"no response within {format_duration(timeout_ms)}")
        except NotSent as exc:
            return unsent(exc.cause, str(exc))
        except (Unreachable, Unresolved) as exc:
            return Outcome(kind=_UNREACHABLE, error=str(exc))
        except Refused as exc:
            return Outcome(kind=OutcomeKind.REFUSED, error=f"the callback URL {exc}")
        except InvalidInput as exc:
            return Outcome(kind=OutcomeKind.REFUSED, error=str(exc))
        except Exception as exc:
            _log.exception("timer %s/%s: delivering it raised an error", timer.namespace, timer.id)
            error = f"internal error: {type(exc).__name__}"
            # The client raises no unexpected error after it has written a byte; a response also proves that it has.
            return unsent(Unsent.INTERNAL, error) if answer is None else Outcome(kind=_UNREACHABLE, error=error)

    async def check(self, target: Target) -> None:
        url = self._route(target).url
        try:
            if url.address is not None:
                self._egress.check(url)
                return
            until = asyncio.get_running_loop().time() + CHECK_SECONDS_MAX
            await self._egress.resolve(url, until, optional=True)
        except Refused as exc:
            raise InvalidInput("callback_url", str(exc)) from None
        except (Unresolved, NotSent, TimeoutError):
            pass  # The name may have an address by the time the timer is due; each attempt checks again.

    async def close(self) -> None:
        await self._client.close()
        await self._egress.close()

    def _route(self, target: Target) -> _Route:
        target = _http(target)
        if not target.headers:
            return self._cached_route(target.method, target.url, ())
        headers = tuple(target.headers.items())
        size = 0
        for name, value in headers:
            size += len(name) + len(value)
        prepare = self._prepare if size > HEADER_CHARS_CACHED_MAX else self._cached_route
        return prepare(target.method, target.url, headers)

    def _prepare(self, method: str, url: str, headers: tuple[tuple[str, str], ...]) -> _Route:
        """Build the fixed part of the request. Validates again what the APIs have validated: a line break here would
        start a second request."""
        if method not in METHODS:
            raise InvalidInput("callback_method", f"must be one of {', '.join(sorted(METHODS))}")
        parsed = parse_url(url)
        names = {name.lower() for name, _ in headers}
        lines = [f"{method} {parsed.target} HTTP/1.1", f"Host: {parsed.authority}"]
        if "content-type" not in names:
            lines.append("Content-Type: application/json")
        if "user-agent" not in names:
            lines.append(f"User-Agent: {self._agent}")
        for name, value in headers:
            if not _TOKEN.fullmatch(name) or _BAD_IN_VALUE.search(value):
                raise InvalidInput("callback_headers", f"has a header that is not valid in HTTP: {name!r}")
            if is_reserved(name):
                raise InvalidInput("callback_headers", f"must not set {name}")
            lines.append(f"{name}: {value}")
        head = "".join(f"{line}\r\n" for line in lines)
        # Replace lone surrogates, which UTF-8 can't encode.
        return _Route(parsed, head.encode("utf-8", "replace").decode())

    def _message(self, route: _Route, timer: Timer) -> bytes:
        """The whole request of one attempt, with a new signed timestamp and the unchanged delivery id."""
        now = self._clock.now()
        body = body_of(timer, now)
        delivery_id = timer.delivery_id
        trace = delivery_id.replace("-", "")
        attempt = timer.attempt
        timestamp_s = now // 1000
        keys = self._keys_of(timer.namespace)
        if keys is None:
            raise NotSent(Unsent.NAMESPACE, "this instance has not read the namespace yet")
        signature = f"webhook-signature: {sign(keys, delivery_id, timestamp_s, body)}\r\n" if keys else ""
        head = (
            f"{route.head}webhook-id: {delivery_id}\r\nwebhook-timestamp: {timestamp_s}\r\n{signature}"
            f"duetime-attempt: {attempt}\r\nduetime-timer: {_name(timer)}\r\n"
            # One trace per firing, one span per attempt; a duplicate of an attempt has the same span.
            f"traceparent: 00-{trace}-{trace[24:]}{(attempt & 0xFFFFFFFF).to_bytes(4).hex()}-01\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _wait_ms(self, retry_after: str) -> int | None:
        """Parse Retry-After: a number of seconds or a date; None for anything else."""
        text = retry_after.strip()
        if text.isascii() and text.isdigit():
            return min(int(text[:12]) * 1000, RETRY_AFTER_MS_MAX)
        try:
            date = parsedate_to_datetime(text)
            if date.tzinfo is None:
                date = date.replace(tzinfo=UTC)
            wait_ms = int(date.timestamp() * 1000) - self._clock.now()
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
        return max(0, min(wait_ms, RETRY_AFTER_MS_MAX))


def _error_of(status: int) -> str:
    return f"HTTP {status}: redirects are not followed" if status in REDIRECTS else f"HTTP {status}"


def _http(target: Target) -> HttpTarget:
    if not isinstance(target, HttpTarget):
        raise InvalidInput("target", "is not an HTTP target")
    return target


def _name(timer: Timer) -> str:
    """``namespace/id``, percent-encoded where a header can't contain it."""
    name = f"{timer.namespace}/{timer.id}"
    # Visible ASCII stays as it is, except the percent sign, so that receivers can decode the name.
    if name.isascii() and name.isprintable() and " " not in name and "%" not in name:
        return name
    return quote(name, safe=_QUOTE_SAFE, errors="replace")
