"""``AsyncClient``: the asynchronous transport, HTTP/1.1 on the streams of asyncio. It owns its connections; one in use
belongs to one call, and a call that is canceled closes its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TypeVar

from duetime.client.calls import Call
from duetime.client.exchange import (
    ANSWER_BYTES_MAX,
    IDLE_MAX,
    Answer,
    Awaiting,
    Lost,
    Options,
    Send,
    Wait,
    endpoint,
    exchange,
    returned,
    why,
)
from duetime.clock import Clock, SystemClock

T = TypeVar("T")

HEAD_BYTES_MAX = 64 * 1024


class _Malformed(Exception):
    """What came back is not HTTP/1.1, or is too large."""


class AsyncClient(Awaiting):
    """A client of one server for one event loop; calls may run side by side.

    The arguments and their defaults are those of ``Client``. Use it in an ``async with`` block or ``close`` it.
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
        result: Answer | Lost | None = None
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

    async def _send(self, send: Send) -> Answer | Lost:
        connection = None if send.fresh or not self._idle else self._idle.pop()
        kept = connection is not None
        answer: Answer | None = None
        try:
            async with asyncio.timeout(send.timeout_seconds):
                if connection is None:
                    connection = await self._connect()
                answer = await connection.ask(send, self._endpoint.authority)
        except (OSError, EOFError, _Malformed) as error:
            return Lost(
                reason=why(error) if not isinstance(error, EOFError) else "the connection was closed",
                sent=connection is not None,
                kept=kept and not isinstance(error, TimeoutError),
            )
        finally:
            if connection is not None and (answer is None or not connection.good or len(self._idle) >= IDLE_MAX):
                connection.drop()
        if connection.good:
            self._idle.append(connection)
        return answer

    async def _connect(self) -> _Connection:
        if self._endpoint.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return _Connection(
            *await asyncio.open_connection(
                self._endpoint.host, self._endpoint.port, ssl=self._tls, limit=HEAD_BYTES_MAX
            )
        )

    async def close(self) -> None:
        """Close the connections that were kept. The client can still be used, and makes new ones."""
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
        self.good = True  # for one more request

    async def ask(self, send: Send, authority: str) -> Answer:
        content = send.body or b""
        lines = [f"{send.method} {send.target} HTTP/1.1", f"host: {authority}"]
        lines += [f"{name}: {value}" for name, value in send.headers.items()]
        if send.method != "GET":
            lines.append(f"content-length: {len(content)}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + content)
        # The answer is awaited while the request goes out: a server that refuses it answers before it has it all.
        status, headers = await self._head()
        body = await self._body(status, headers)
        # What is still unsent by then would come before the next request.
        self.good = self.good and not self._writer.transport.get_write_buffer_size()
        return Answer(status, headers.get("retry-after"), body)

    async def _head(self) -> tuple[int, dict[str, str]]:
        while True:
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                raise _Malformed(f"the answer has more than {HEAD_BYTES_MAX} bytes of headers") from None
            first, *lines = head.decode("latin-1").split("\r\n")
            version, _, rest = first.partition(" ")
            status = rest[:3]
            if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
                raise _Malformed("the answer is not HTTP")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if int(status) >= 200:
                said = headers.get("connection", "").lower()
                self.good = "close" not in said and (version == "HTTP/1.1" or "keep-alive" in said)
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
        return await self._reader.read(ANSWER_BYTES_MAX)

    async def _chunks(self) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while size := _size((await self._line()).partition(b";")[0].decode("latin-1"), 16):
            total += size
            if total > ANSWER_BYTES_MAX:
                raise _Malformed("the answer is too large")
            pieces.append(await self._reader.readexactly(size))
            if await self._line():
                raise _Malformed("the answer is not HTTP")
        while await self._line():
            pass  # trailers
        return b"".join(pieces)

    async def _line(self) -> bytes:
        try:
            return (await self._reader.readuntil(b"\r\n"))[:-2]
        except asyncio.LimitOverrunError:
            raise _Malformed("the answer is not HTTP") from None

    def drop(self) -> None:
        """Close at once: what was not sent or read does not matter any more."""
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
    if not 0 <= size <= ANSWER_BYTES_MAX:
        raise _Malformed("the answer is not HTTP, or too large")
    return size
