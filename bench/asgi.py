"""A bare application on a foreign server: reads a create request and responds without doing anything.

Runs with uvicorn, uvloop and httptools, in the environment of the peers. It is the reference for creates: the speed of
a thin application on a well-maintained server. Our own server would be a bad reference, because every improvement of it
would make creates look worse.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Create(msgspec.Struct):
    execute_at: str
    callback_url: str
    callback_method: str
    callback_headers: dict[str, str]
    callback_payload: msgspec.Raw
    metadata: msgspec.Raw


_decode = msgspec.json.Decoder(Create).decode
_encode = msgspec.json.Encoder().encode


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    if scope["method"] == "POST":
        asked = _decode(body)
        timer = {
            "id": str(uuid.uuid4()),
            "created_at": asked.execute_at,
            "execute_at": asked.execute_at,
            "callback_url": asked.callback_url,
            "callback_method": asked.callback_method,
            "callback_headers": asked.callback_headers,
            "status": "pending",
            "executed_at": None,
        }
        status, body = 201, _encode({"code": 0, "message": "timer created successfully", "data": timer})
    else:
        status, body = 200, b"{}"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
