"""``AsyncClient``: the asynchronous transport, HTTP/1.1 on asyncio's streams. It owns its connections; each is used by
one call at a time, and a canceled call closes its connection."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TypeVar

from duetime.client.calls import Call
from duetime.client.clock import Clock, SystemClock
from duetime.client.exchange import (
    IDLE_MAX,
    RESPONSE_BYTES_MAX,
    AsyncOperations,
    NoResponse,
    Options,
    Response,
    Send,
    Wait,
    endpoint,
    exchange,
    reason_of,
    returned,
)

T = TypeVar("T")

HEAD_BYTES_MAX = 64 * 1024


class _Malformed(Exception):
    """The response is not HTTP/1.1 or is too large."""


class AsyncClient(AsyncOperations):
    """A client of one service for one event loop. Calls may run concurrently.

    It has the arguments and defaults of ``Client``. Use it in an ``async with`` block or ``close`` it.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        attempt_timeout_seconds: float = 10.0,
        attempts_max: int = 10,
        clock: Clock | None = None,
    ) -> None:
        self._endpoint = endpoint(url, key)
        self._options = Options(
            timeout_seconds=timeout_seconds,
            attempt_timeout_seconds=attempt_timeout_seconds,
            attempts_max=attempts_max,
        )
        self._clock = clock or SystemClock()
        self._idle: list[_Connection] = []
        self._tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return self._endpoint.url

    async def run(self, call: Call[T]) -> T:
        steps = exchange(call, self._endpoint, self._options, self._clock)
        result: Response | NoResponse | None = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as stop:
                return returned(stop, call)
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
                result = None
            else:
                result = await self._send(step)

    async def _send(self, send: Send) -> Response | NoResponse:
        connection = None if send.fresh or not self._idle else self._idle.pop()
        reused = connection is not None
        response: Response | None = None
        try:
            async with asyncio.timeout(send.timeout_seconds):
                if connection is None:
                    connection = await self._connect()
                response = await connection.request(send, self._endpoint.authority)
        except (OSError, EOFError, _Malformed) as error:
            return NoResponse(
                reason=reason_of(error) if not isinstance(error, EOFError) else "the connection was closed",
                sent=connection is not None,
                reused=reused and not isinstance(error, TimeoutError),
            )
        finally:
            if connection is not None and (response is None or not connection.good or len(self._idle) >= IDLE_MAX):
                connection.drop()
        if connection.good:
            self._idle.append(connection)
        return response

    async def _connect(self) -> _Connection:
        if self._endpoint.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return _Connection(
            *await asyncio.open_connection(
                self._endpoint.host, self._endpoint.port, ssl=self._tls, limit=HEAD_BYTES_MAX
            )
        )

    async def close(self) -> None:
        """Close the idle connections. The client can still be used and opens new ones."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.good = True  # whether another request can use it

    async def request(self, send: Send, authority: str) -> Response:
        content = send.body or b""
        lines = [f"{send.method} {send.target} HTTP/1.1", f"host: {authority}"]
        lines += [f"{name}: {value}" for name, value in send.headers.items()]
        if send.method != "GET":
            lines.append(f"content-length: {len(content)}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + content)
        # Reads while the request is still being sent: a server that rejects it responds before it has all of it.
        status, headers = await self._head()
        body = await self._body(status, headers)
        # Otherwise the unsent rest of this request would precede the next one.
        self.good = self.good and not self._writer.transport.get_write_buffer_size()
        return Response(status, headers.get("retry-after"), body)

    async def _head(self) -> tuple[int, dict[str, str]]:
        while True:
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                raise _Malformed(f"the response has more than {HEAD_BYTES_MAX} bytes of headers") from None
            first, *lines = head.decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            status = rest[:3]
            if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
                raise _Malformed("the response is not HTTP")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if int(status) >= 200:
                options = headers.get("connection", "").lower()
                self.good = "close" not in options and (version == "HTTP/1.1" or "keep-alive" in options)
                return int(status), headers

    async def _body(self, status: int, headers: dict[str, str]) -> bytes:
        if status in (204, 304):
            return b""
        if headers.get("transfer-encoding", "").lower().endswith("chunked"):
            return await self._chunks()
        length = headers.get("content-length")
        if length is not None:
            return await self._reader.readexactly(_size(length, 10))
        self.good = False
        return await self._reader.read(RESPONSE_BYTES_MAX)

    async def _chunks(self) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while size := _size((await self._line()).partition(b";")[0].decode("latin-1"), 16):
            total += size
            if total > RESPONSE_BYTES_MAX:
                raise _Malformed("the response is too large")
            pieces.append(await self._reader.readexactly(size))
            if await self._line():
                raise _Malformed("the response is not HTTP")
        while await self._line():
            pass  # trailers
        return b"".join(pieces)

    async def _line(self) -> bytes:
        try:
            return (await self._reader.readuntil(b"\r\n"))[:-2]
        except asyncio.LimitOverrunError:
            raise _Malformed("the response is not HTTP") from None

    def drop(self) -> None:
        """Close at once, without sending or reading the rest."""
        self.good = False
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _size(text: str, base: int) -> int:
    try:
        size = int(text.strip(), base)
    except ValueError:
        size = -1
    if not 0 <= size <= RESPONSE_BYTES_MAX:
        raise _Malformed("the response is not HTTP or is too large")
    return size
