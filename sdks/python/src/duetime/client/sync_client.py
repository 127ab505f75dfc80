"""``Client``: the synchronous transport. It owns its connections; each is used by one call at a time."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections import deque
from typing import TypeVar

from duetime.client.calls import Call
from duetime.client.clock import Clock, SystemClock
from duetime.client.exchange import (
    IDLE_MAX,
    RESPONSE_BYTES_MAX,
    NoResponse,
    Options,
    Response,
    Send,
    SyncOperations,
    Wait,
    endpoint,
    exchange,
    reason_of,
    returned,
)

T = TypeVar("T")

_PIECE_BYTES = 1 << 20


class _TooLarge(Exception):
    """The response is larger than any that the service sends."""


class Client(SyncOperations):
    """A client of one service. Any number of threads may share it.

    Its address is ``url``, the environment variable ``TIMER_URL``, or http://localhost:3000. The API key is ``key``,
    the environment variable ``API_KEY``, or the content of the file ``duetime.key`` in the working directory. A call
    ends within ``timeout_seconds``, retries included. Use the client in a ``with`` block or ``close`` it.
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
        self._idle: deque[http.client.HTTPConnection] = deque()  # thread-safe at its ends

    @property
    def url(self) -> str:
        return self._endpoint.url

    def run(self, call: Call[T]) -> T:
        steps = exchange(call, self._endpoint, self._options, self._clock)
        result: Response | NoResponse | None = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as stop:
                return returned(stop, call)
            if isinstance(step, Wait):
                time.sleep(step.seconds)
                result = None
            else:
                result = self._send(step)

    def _send(self, send: Send) -> Response | NoResponse:
        kept = None if send.fresh else self._take()
        connection = kept or self._connection(send.timeout_seconds)
        deadline = self._clock.monotonic() + send.timeout_seconds
        sent = kept is not None
        try:
            if kept is None:
                connection.connect()
                sent = True
            else:
                connection.sock.settimeout(send.timeout_seconds)
            complete = False
            # A server that rejects a large body may respond and close the connection before it has read all of it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(send.method, send.target, send.body, send.headers)
                complete = True
            response = connection.getresponse()
            body = self._read(connection, response, deadline)
        except (OSError, http.client.HTTPException, _TooLarge) as error:
            connection.close()
            # A connection that the service closed while it was idle fails at once. One that times out was open.
            reused = kept is not None and not isinstance(error, TimeoutError)
            return NoResponse(reason=reason_of(error), sent=sent, reused=reused)
        except BaseException:
            connection.close()
            raise
        if not complete or response.will_close or len(self._idle) >= IDLE_MAX:
            connection.close()
        else:
            self._idle.append(connection)
        return Response(response.status, response.getheader("retry-after"), body)

    def _read(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := response.read1(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > RESPONSE_BYTES_MAX:
                raise _TooLarge(f"the response is larger than {RESPONSE_BYTES_MAX} bytes")
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise TimeoutError
            if connection.sock is not None:  # None when the service closes the connection after the response
                connection.sock.settimeout(left)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        response.close()  # reading to the end does not always close it, and an open response blocks the next request
        return b"".join(pieces)

    def _take(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connection(self, timeout_seconds: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._endpoint.tls else http.client.HTTPConnection
        return kind(self._endpoint.host, self._endpoint.port, timeout=timeout_seconds)

    def close(self) -> None:
        """Close the idle connections. The client can still be used and opens new ones."""
        while (connection := self._take()) is not None:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
