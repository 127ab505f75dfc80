"""``check_answer`` rejects responses that the OpenAPI document does not allow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doors.described import check_answer
from tests.servers import Answer

JSON = {"content-type": "application/json"}
ALIVE = {"status": "alive"}


def test_described_response_passes() -> None:
    check_answer("GET", "/livez?probe=1", Answer(200, JSON, ALIVE))
    check_answer("HEAD", "/livez", Answer(200, JSON, b""))
    check_answer("GET", "/nowhere", Answer(404, JSON, {"anything": True}))


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [
        ("GET", "/livez", Answer(200, JSON, {"status": "dead"})),
        ("GET", "/livez", Answer(200, JSON, {})),
        ("GET", "/livez", Answer(202, JSON, ALIVE)),
        ("GET", "/livez", Answer(200, {"content-type": "text/plain"}, ALIVE)),
        ("DELETE", "/api/v1/timers/default/a", Answer(204, {}, b"text")),
        ("GET", "/timers/a", Answer(503, JSON, {"code": 1, "message": "without Retry-After", "data": None})),
        ("GET", "/timers/a", Answer(400, JSON, {"code": 0, "message": "no error has this code", "data": None})),
    ],
)
def test_response_that_is_not_described_fails(method: str, path: str, answer: Answer) -> None:
    wrong: Any = (AssertionError, ValueError)
    with pytest.raises(wrong):
        check_answer(method, path, answer)
