"""``Client``: the blocking transport. It owns its connections; one in use belongs to one thread's call."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections import deque
from typing import TypeVar

from duetime.client.calls import Call
from duetime.client.exchange import (
    ANSWER_BYTES_MAX,
    IDLE_MAX,
    Answer,
    Blocking,
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

_PIECE_BYTES = 1 << 20


class _Overlong(Exception):
    """The answer is larger than any that the server gives."""


class Client(Blocking):
    """A client of one server that any number of threads may share.

    The server is ``url``, ``TIMER_URL`` of the environment, or http://localhost:3000; the key is ``key``, ``API_KEY``
    of the environment, or what the file ``duetime.key`` in the working directory holds. A call ends within
    ``timeout_seconds``, with all its tries. Use it in a ``with`` block or ``close`` it.
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
        self._idle: deque[http.client.HTTPConnection] = deque()  # its ends are safe to use from any thread

    @property
    def url(self) -> str:
        return self._endpoint.url

    def run(self, call: Call[T]) -> T:
        steps = exchange(call, self._endpoint, self._options, self._clock)
        result: Answer | Lost | None = None
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

    def _send(self, send: Send) -> Answer | Lost:
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
            whole = False
            # A server that refuses a large body may answer and close before it has read it all.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(send.method, send.target, send.body, send.headers)
                whole = True
            response = connection.getresponse()
            body = self._read(connection, response, deadline)
        except (OSError, http.client.HTTPException, _Overlong) as error:
            connection.close()
            # One that was closed while it lay idle says so at once; one that is slow was good.
            return Lost(reason=why(error), sent=sent, kept=kept is not None and not isinstance(error, TimeoutError))
        except BaseException:
            connection.close()
            raise
        if not whole or response.will_close or len(self._idle) >= IDLE_MAX:
            connection.close()
        else:
            self._idle.append(connection)
        return Answer(response.status, response.getheader("retry-after"), body)

    def _read(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := response.read1(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > ANSWER_BYTES_MAX:
                raise _Overlong(f"the answer is larger than {ANSWER_BYTES_MAX} bytes")
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise TimeoutError
            if connection.sock is not None:  # it is the response's alone when the server closes after it
                connection.sock.settimeout(left)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        response.close()  # reading it to its end does not always do so, and an open one blocks the next request
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
        """Close the connections that were kept. The client can still be used, and makes new ones."""
        while (connection := self._take()) is not None:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
