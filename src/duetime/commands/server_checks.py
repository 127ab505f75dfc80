"""The checks of ``duetime doctor`` that ask a running service."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from duetime.client import (
    Client,
    ConnectionFailed,
    DuetimeClientError,
    InvalidRequest,
    Unauthorized,
    UnexpectedResponse,
)
from duetime.clock import SystemClock
from duetime.commands import output
from duetime.commands.findings import Finding
from duetime.overdue import OPERATOR_REASONS, TEXTS, Reason
from duetime.version import __version__

READINESS_BYTES_MAX = 64 << 10
TIMEOUT_SECONDS = 3
CLOCK_MS_MAX = 2_000

ADVICE = {
    Reason.PAUSED: "`duetime namespaces resume NAME` fires them",
    Reason.DESTINATION: "check the receivers",
    Reason.NO_OWNER: "`duetime cluster` shows which instances serve and whose clock is wrong",
    Reason.BEHIND: "check their CPU and their logs, or add an instance",
    Reason.STORE: "check its disk, its load and the network",
}
_QUARANTINE_ADVICE = "the log names each with its reason; docs/operate/upgrades.md says what to do"


class QuarantinedCounts(Struct, frozen=True):
    timers: int = 0
    namespaces: int = 0


class Readiness(Struct, frozen=True):
    """The response of ``/readyz``."""

    status: str
    reason: str | None = None
    overdue: dict[str, int] = {}
    quarantined: QuarantinedCounts = QuarantinedCounts()


def local(host: str, port: int, key: str | None) -> list[Finding]:
    """The service that would run here, if it does."""
    url = f"http://{'localhost' if host in ('0.0.0.0', '::', '127.0.0.1') else host}:{port}"
    try:
        with _client(url, key) as client:
            health = client.health().status
            return list(_state(url, health, _readiness(url)))
    except ConnectionFailed as error:
        if error.sent:
            return [Finding("service", False, f"{error}; a process listens there: look at its log, or restart it")]
        return [Finding("service", True, f"no service runs at {url}: `duetime serve` starts it")]
    except (DuetimeClientError, OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        return [_strange(url, error, "another program may use this port: set PORT to a free one")]


def named(url: str, key: str | None) -> list[Finding]:
    """The service that was asked for: it must run, and take the key."""
    found: list[Finding] = []
    try:
        with _client(url, key) as client:
            found += _reached(client)
            found += _state(client.url, client.health().status, _readiness(client.url))
    except ConnectionFailed as error:
        found.append(Finding("service", False, f"{error}; check the address, and that the service is running"))
    except InvalidRequest as error:
        found.append(Finding("service", False, str(error)))
    except (DuetimeClientError, OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        found.append(_strange(url, error, "check the address"))
    return found


def _client(url: str, key: str | None) -> Client:
    return Client(url, key, attempts_max=1, timeout_seconds=TIMEOUT_SECONDS)


def _strange(url: str, error: Exception, advice: str) -> Finding:
    says = str(error) if isinstance(error, UnexpectedResponse) else f"{url} responds, but not like Duetime ({error})"
    return Finding("service", False, f"{says}; {advice}")


def _reached(client: Client) -> Iterator[Finding]:
    """The key, the version and the clock."""
    clock = SystemClock()
    before = clock.now()
    server_ms = round(client.health().timestamp.timestamp() * 1000)
    after = clock.now()
    try:
        cluster = client.cluster()
    except Unauthorized:
        says = f"{client.url} rejects it: give --key, API_KEY or a profile with the key of this service"
        yield Finding("key", False, says)
    else:
        yield Finding("key", True, f"{client.url} accepts it")
        versions = sorted({instance.version for instance in cluster.instances})
        same = versions == [__version__]
        advice = "" if same else f"; this command is {__version__}: use the same version on both sides"
        yield Finding("version", True, f"the service runs {', '.join(versions)}{advice}")
    # The service read its clock between the request and the response.
    off_ms = server_ms - after if server_ms > after else min(server_ms - before, 0)
    if abs(off_ms) <= CLOCK_MS_MAX:
        yield Finding("clock", True, "this machine and the service agree on the time")
    else:
        ahead = "behind" if off_ms > 0 else "ahead of"
        says = f"this machine is {abs(off_ms)} ms {ahead} the service: synchronize both clocks with NTP"
        yield Finding("clock", False, f"{says} (a service with --virtual-clock differs on purpose)")


def _state(url: str, health: str, readiness: Readiness) -> Iterator[Finding]:
    if readiness.reason is not None:
        yield Finding("service", False, f"{url} is not ready: {readiness.reason}")
    else:
        yield Finding("service", health == "up", f"{url} is {health}")
    for reason in Reason:
        if count := readiness.overdue.get(reason):
            yield Finding(
                "overdue",
                reason not in OPERATOR_REASONS,
                f"{output.plural(count, 'timer')} wait{'s' if count == 1 else ''} {TEXTS[reason]}: {ADVICE[reason]}",
            )
    if not readiness.overdue:
        yield Finding("overdue", True, "no timer is overdue")
    aside = readiness.quarantined
    if aside.timers:
        yield Finding("rows", False, f"{aside.timers} timers are quarantined: {_QUARANTINE_ADVICE}")
    if aside.namespaces:
        yield Finding("rows", False, f"{aside.namespaces} namespaces can't be read: {_QUARANTINE_ADVICE}")
    if not aside.timers and not aside.namespaces:
        yield Finding("rows", True, "no unreadable row was found")


def _readiness(url: str) -> Readiness:
    """The response of /readyz. The client would raise for a 503 and lose the reason."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"{parts.path}/readyz")
        return msgspec.json.decode(connection.getresponse().read(READINESS_BYTES_MAX), type=Readiness)
    finally:
        connection.close()
