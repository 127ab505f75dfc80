"""A client of the HTTP v1 API for tests: its requests, the format of its errors, and a virtual clock."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from tests.servers import DUE_SECONDS, FINAL, Answer, Duetime, instant, until

BASE = "/api/v1"
URL = "http://127.0.0.1:9/hook"
FIELDS = {
    *("namespace", "id", "executeAt", "callbackUrl", "callbackMethod", "callbackHeaders", "payload", "metadata"),
    *("correlationId", "retryPolicy", "callbackTimeout", "responseProtocol", "callbackSubject"),
    *("status", "attempts", "lastError", "createdAt", "updatedAt", "executedAt"),
}
ONCE = {"maxRetries": 0}
Timer = dict[str, Any]


def failure(answer: Answer, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """Assert that the response is this error; returns its body."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    return failed_as(answer.body, code, field)


def failed_as(body: dict[str, Any], code: str, field: str | None = None) -> dict[str, Any]:
    """Assert that the body has the error format, this code and, if given, this field; returns the body."""
    assert set(body) == {"error", "message", "details", "timestamp"}, body
    assert body["error"] == code, body
    assert isinstance(body["message"], str) and body["message"]
    assert isinstance(body["details"], dict)
    instant(body["timestamp"])
    if field is not None:
        assert body["details"].get("field", "").startswith(field), body
        assert field in body["message"], body
    return body


def success(answer: Answer, status: int = 200) -> Any:
    """Assert that the response has this status; returns its body."""
    assert answer.status == status, answer
    if status == 204:
        assert answer.body == b"" and "content-type" not in answer.headers
    else:
        assert answer.headers["content-type"] == "application/json"
    return answer.body


def seconds_between(earlier: str, later: str) -> float:
    return (instant(later) - instant(earlier)) / timedelta(seconds=1)


class HttpV1(Duetime):
    """A service and a client of its HTTP v1 API. Its clock is virtual by default."""

    def __init__(self, directory: Any, *, virtual_clock: bool = True, **options: Any) -> None:
        super().__init__(directory, virtual_clock=virtual_clock, **options)
        self._seen: dict[str, list[dict[str, Any]]] = {}  # the attempts that ``attempt`` has seen, by timer

    def api(self, method: str, path: str, json: Any = None, **more: Any) -> Answer:
        return self.request(method, BASE + path, json=json, **more)

    def make(self, url: str = URL, **fields: Any) -> Timer:
        """Create a timer, due in ``DUE_SECONDS`` unless the fields contain a time."""
        when = {} if {"delay", "executeAt"} & fields.keys() else {"executeAt": self.ahead(DUE_SECONDS)}
        timer: Timer = success(self.api("POST", "/timers", {"callbackUrl": url, **when, **fields}))
        return timer

    def namespace(self, name: str, **fields: Any) -> str:
        success(self.api("POST", "/namespaces", {"name": name, **fields}), 201)
        return name

    def current(self, timer: Timer) -> Timer:
        """Get the current state of the timer."""
        found: Timer = success(
            self.api("POST", "/timers/get", {"namespace": timer["namespace"], "timerId": timer["id"]})
        )
        return found

    def path(self, timer: Timer) -> str:
        return f"/timers/{timer['namespace']}/{timer['id']}"

    def in_status(self, timer: Timer, *statuses: str) -> Timer:
        """Wait until the timer has one of these statuses; returns it."""

        def reached() -> Timer | None:
            found = self.current(timer)
            return found if found["status"] in statuses else None

        found: Timer = until(f"timer {timer['id']} is {' or '.join(statuses)}", reached)
        return found

    def final(self, timer: Timer) -> Timer:
        """Wait until the timer is completed, failed or canceled; returns it."""
        return self.in_status(timer, *FINAL)

    def attempt(self, timer: Timer) -> Timer:
        """Advance the clock to the timer's next attempt and wait until that is recorded; returns the timer."""
        seen = self._seen.get(self.path(timer), [])
        # Read the due time before the attempts: a timer that is due may be attempted at any moment.
        due = instant(self.current(timer)["fireAt"])
        ahead = (due - self.now()) // timedelta(milliseconds=1)
        if ahead >= 0 and self.attempts(timer) == seen:
            self.advance(f"{ahead + 1}ms")
        self._seen[self.path(timer)] = until(
            "the attempt is recorded", lambda: (made := self.attempts(timer)) != seen and made
        )
        return self.current(timer)

    def attempts(self, timer: Timer) -> list[dict[str, Any]]:
        attempts: list[dict[str, Any]] = success(self.api("GET", self.path(timer) + "/attempts"))["attempts"]
        return attempts

    def run(self, url: str, **fields: Any) -> Timer:
        """Create a timer that is due at once, and wait until it is final; returns it."""
        return self.final(self.make(url, delay="0s", **fields))

    def batch(self, items: list[Any]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = success(self.api("POST", "/timers/batch", {"timers": items}))["results"]
        return results

    def pages(self, query: str, limit: int) -> list[Timer]:
        """All timers of a list, read page by page."""
        found: list[Timer] = []
        cursor = ""
        while True:
            page = success(self.api("GET", f"/timers?{query}&limit={limit}{cursor}"))
            assert set(page) == {"timers", "nextCursor"} and len(page["timers"]) <= limit
            found += page["timers"]
            if page["nextCursor"] is None:
                return found
            cursor = f"&cursor={page['nextCursor']}"

    def at(self, seconds: float) -> datetime:
        """The time this many seconds from now, by the service's clock."""
        return self.now() + timedelta(seconds=seconds)
