"""A stand-in for a later version of the service, whose answers have fields that generated clients do not know yet."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from tests.servers import Duetime

FREE = {
    "payload",
    "callback_payload",
    "metadata",
    "callbackHeaders",
    "callback_headers",
    "details",
    "statuses",
    "overdueReasons",
}
"""Fields whose contents are no objects with fixed fields."""


@contextmanager
def later(service: Duetime) -> Iterator[int]:
    """The port of a proxy that adds a field to each object in the answers of the service."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = service.request(self.command, self.path, body=body, headers=dict(self.headers))
            shown = json.dumps(_with_more(answer.body)).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(shown)))
            self.end_headers()
            self.wfile.write(shown)

        do_GET = do_POST = do_PUT = forward

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, name="later").start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def _with_more(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_more(item) for item in part]
    if isinstance(part, dict):
        return {name: value if name in FREE else _with_more(value) for name, value in part.items()} | {"later": True}
    return part
