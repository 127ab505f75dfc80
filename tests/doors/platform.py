"""The platform API's responses: ``{"code", "message", "data"}``, and the fields of each endpoint's data."""

from __future__ import annotations

import re
import uuid
from typing import Any

from tests.servers import Answer

CREATED = {"id", "created_at", "execute_at", "callback_url", "callback_method", "status", "executed_at"}
UPDATED = CREATED | {"updated_at"}
FULL = UPDATED | {"callback_headers", "callback_payload", "last_error", "metadata"}
URL = "http://127.0.0.1:9/hook"
UNKNOWN_ID = str(uuid.UUID(int=0, version=4))


def success(answer: Answer, status: int, message: str) -> Any:
    """Assert that the response has this status and message; returns its data."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.body) == {"code", "message", "data"}
    assert (answer.body["code"], answer.body["message"]) == (0, message)
    return answer.body["data"]


def refused(answer: Answer, status: int, code: int, message: str) -> None:
    """Assert that the response is this error and that its message matches the pattern."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.body) == {"code", "message", "data"}
    assert (answer.body["code"], answer.body["data"]) == (code, None)
    assert re.search(message, answer.body["message"]), answer.body
