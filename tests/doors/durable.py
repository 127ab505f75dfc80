"""A client of the durable door for tests: its calls, its error shape, and time that comes when it is told to."""

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
    """Check that the answer is this error in the door's shape; its body."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    return failed_as(answer.body, code, field)


def failed_as(body: dict[str, Any], code: str, field: str | None = None) -> dict[str, Any]:
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
    assert answer.status == status, answer
    if status == 204:
        assert answer.body == b"" and "content-type" not in answer.headers
    else:
        assert answer.headers["content-type"] == "application/json"
    return answer.body


def seconds_between(earlier: str, later: str) -> float:
    return (instant(later) - instant(earlier)) / timedelta(seconds=1)


class Durable(Duetime):
    """A service and its durable door. The clock is virtual unless told otherwise."""

    def __init__(self, directory: Any, *, virtual_clock: bool = True, **options: Any) -> None:
        super().__init__(directory, virtual_clock=virtual_clock, **options)
        self._shown: dict[str, list[dict[str, Any]]] = {}  # the attempts of each timer that ``attempt`` has shown

    def api(self, method: str, path: str, json: Any = None, **more: Any) -> Answer:
        return self.request(method, BASE + path, json=json, **more)

    def make(self, url: str = URL, **fields: Any) -> Timer:
        """Create a timer, due in some seconds unless the fields say when."""
        when = {} if {"delay", "executeAt"} & fields.keys() else {"executeAt": self.ahead(DUE_SECONDS)}
        timer: Timer = success(self.api("POST", "/timers", {"callbackUrl": url, **when, **fields}))
        return timer

    def namespace(self, name: str, **fields: Any) -> str:
        success(self.api("POST", "/namespaces", {"name": name, **fields}), 201)
        return name

    def see(self, timer: Timer) -> Timer:
        """The timer as it is now."""
        seen: Timer = success(
            self.api("POST", "/timers/get", {"namespace": timer["namespace"], "timerId": timer["id"]})
        )
        return seen

    def path(self, timer: Timer) -> str:
        return f"/timers/{timer['namespace']}/{timer['id']}"

    def in_status(self, timer: Timer, *statuses: str) -> Timer:
        """The timer, once it has one of these statuses."""

        def there() -> Timer | None:
            seen = self.see(timer)
            return seen if seen["status"] in statuses else None

        found: Timer = until(f"timer {timer['id']} is {' or '.join(statuses)}", there)
        return found

    def final(self, timer: Timer) -> Timer:
        return self.in_status(timer, *FINAL)

    def attempt(self, timer: Timer) -> Timer:
        """Let the time of the timer's next attempt come, and return it after that: the one after those shown before."""
        shown = self._shown.get(self.path(timer), [])
        # What was due before its attempts were looked at: the attempt may come by itself at any moment.
        due = instant(self.see(timer)["fireAt"])
        ahead = (due - self.now()) // timedelta(milliseconds=1)
        if ahead >= 0 and self.attempts(timer) == shown:
            self.advance(f"{ahead + 1}ms")
        self._shown[self.path(timer)] = until(
            "the attempt is recorded", lambda: (made := self.attempts(timer)) != shown and made
        )
        return self.see(timer)

    def attempts(self, timer: Timer) -> list[dict[str, Any]]:
        attempts: list[dict[str, Any]] = success(self.api("GET", self.path(timer) + "/attempts"))["attempts"]
        return attempts

    def run(self, url: str, **fields: Any) -> Timer:
        """Make a timer that is due at once, and return what became of it."""
        return self.final(self.make(url, delay="0s", **fields))

    def batch(self, items: list[Any]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = success(self.api("POST", "/timers/batch", {"timers": items}))["results"]
        return results

    def pages(self, query: str, limit: int) -> list[Timer]:
        """Everything a list has, page by page."""
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
        return self.now() + timedelta(seconds=seconds)
