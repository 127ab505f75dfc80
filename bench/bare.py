"""The bare server, a process: Duetime's own server and validation of a create request, without a store.

``python -m bench.bare PORT KEY``. It is the ceiling of creates over HTTP: the difference is the store's share.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

import msgspec
import uvloop

from duetime.doors import wire
from duetime.doors.http import Application, Handler, Keys, Request, Response
from duetime.doors.platform_schema import CreatePlatformTimer
from duetime.doors.server import Server, bind
from duetime.errors import InvalidInput
from duetime.timetext import format_time, parse_time

BODY_BYTES_MAX = 256 * 1024

_decoder = msgspec.json.Decoder(CreatePlatformTimer)
_encode = msgspec.json.Encoder().encode


class BareDoor:
    def __init__(self, key: str) -> None:
        self._keys = Keys(key)

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/timers": {"POST": self.create}, "/readyz": {"GET": self.ready}}

    def refusal(self, error: Exception) -> Response:
        return Response(400, _encode({"message": str(error)}))

    async def ready(self, request: Request) -> Response:
        return Response(200, b"{}")

    async def create(self, request: Request) -> Response:
        await self._keys.check(request)
        fields = wire.decode(await request.body(BODY_BYTES_MAX), CreatePlatformTimer, _decoder)
        if fields.execute_at is None or fields.callback_url is None:
            raise InvalidInput("body", "lacks a field")
        at = format_time(parse_time(fields.execute_at, "execute_at"))
        url = wire.check_url(fields.callback_url, "callback_url")
        headers = wire.check_headers(fields.callback_headers or {}, "callback_headers")
        timer = {
            "id": str(uuid.uuid4()),
            "created_at": at,
            "execute_at": at,
            "callback_url": url,
            "callback_method": fields.callback_method or "POST",
            "callback_headers": headers,
            "status": "pending",
            "executed_at": None,
        }
        return Response(201, _encode({"code": 0, "message": "timer created successfully", "data": timer}))


def main() -> None:
    port, key = int(sys.argv[1]), sys.argv[2]
    door = BareDoor(key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Server(Application([door], fallback=door, under={})).serve(bind("127.0.0.1", port)))


if __name__ == "__main__":
    main()
