"""``duetime doctor``: looks at everything that a start needs, asks the service whether timers are overdue if it runs,
and says what to do about what is wrong.

It reads the settings as ``duetime serve`` in the same place would, changes nothing, and makes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec import Struct

from duetime.client import Client, ConnectionFailed, DuetimeClientError
from duetime.clock import SystemClock
from duetime.commands import output
from duetime.engine.watchdog import OURS, Reason
from duetime.errors import DuetimeError, SettingsError
from duetime.node import build_broker
from duetime.settings import Settings, load
from duetime.settings.keyfile import KEY_FILE
from duetime.stores.postgres import PostgresStore
from duetime.stores.sqlite_lock import holder, open_to_others, too_many_names

DISK_BYTES_MIN = 1 << 30
READINESS_BYTES_MAX = 64 << 10
ASK_SECONDS = 3

_ADVICE = {
    Reason.PAUSED: "wait in paused namespaces: `duetime namespaces resume NAME` fires them",
    Reason.DESTINATION: "wait for destinations that are full, slow or do not answer: check the receivers",
    Reason.NO_OWNER: "are in shards that no instance owns: `duetime cluster` shows who serves and whose clock is off",
    Reason.BEHIND: "wait because this instance does not keep up: check its CPU and its log, or add an instance",
    Reason.STORE: "wait because the store is slow or does not answer: check its disk, its load and the network",
}


_QUARANTINE_ADVICE = "the log names each with its reason; docs/operate/upgrades.md says what to do"


class Finding(Struct, frozen=True):
    about: str
    ok: bool
    says: str


class QuarantinedCounts(Struct, frozen=True):
    timers: int = 0
    namespaces: int = 0


class Readiness(Struct, frozen=True):
    """What ``/readyz`` answers."""

    status: str
    reason: str | None = None
    overdue: dict[str, int] = {}
    quarantined: QuarantinedCounts = QuarantinedCounts()


def run(options: argparse.Namespace) -> int:
    found = asyncio.run(_gathered())
    if options.json:
        output.print_json({"ok": all(each.ok for each in found), "findings": found})
    else:
        for each in found:
            print(f"{'ok  ' if each.ok else 'FAIL'}  {each.about:<9} {output.safe(each.says)}")
    return 0 if all(each.ok for each in found) else 1


async def _gathered() -> list[Finding]:
    try:
        settings = load(os.environ, Path.cwd())
    except SettingsError as error:
        return [Finding("settings", False, str(error))]
    found = [Finding("settings", True, "every value is one that it may be")]
    for look in (_key, _store, _broker, _service):
        found += [each async for each in look(settings)]
    return found


async def _key(settings: Settings) -> AsyncIterator[Finding]:
    if settings.auth != "key":
        yield Finding("key", True, "DUETIME_AUTH=none: nobody needs one")
    elif settings.api_key is not None:
        yield Finding("key", True, "API_KEY is set")
    else:
        path = (settings.database_path or Path("duetime.db")).parent / KEY_FILE
        says = f"is in {path}" if path.exists() else f"there is none yet: the first start makes {path}"
        yield Finding("key", True, says)


async def _store(settings: Settings) -> AsyncIterator[Finding]:
    if settings.on_server:
        try:
            version, offset_ms = await PostgresStore(settings.database_url).examine(SystemClock())
        except DuetimeError as error:
            yield Finding("store", False, f"{error}: is DATABASE_URL right, and does the server run?")
            return
        yield Finding("store", True, f"{settings.database_shown}, version {version}")
        quarter_ms = settings.lease_ttl_ms // 4
        right = abs(offset_ms) <= quarter_ms
        says = f"is {offset_ms} ms off the database's" if offset_ms else "agrees with the database's"
        advice = f": at {quarter_ms} ms an instance gives its shards up, so set it right (NTP)"
        yield Finding("clock", right, says + ("" if right else advice))
    elif settings.database_path is None:
        yield Finding("store", True, "memory: everything is gone when the process ends")
    else:
        path = settings.database_path.resolve()
        folder = path.parent if path.parent.exists() else Path()
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            yield Finding("store", False, f"{folder} can't be written to: choose another DATABASE_URL")
        elif free < DISK_BYTES_MIN:
            yield Finding("store", False, f"only {free >> 20} MiB are free where {path} is: make room")
        elif problem := too_many_names(path) or open_to_others(path):
            yield Finding("store", False, problem)
        elif process := holder(path):
            yield Finding("store", True, f"{path} is in use by process {process}")
        else:
            yield Finding("store", True, f"{path} is {'there' if path.exists() else 'made at the first start'}")


async def _broker(settings: Settings) -> AsyncIterator[Finding]:
    broker = build_broker(settings)
    if broker is None:
        yield Finding("broker", True, "none: TIMER_BROKER_URL is not set")
        return
    problems = await broker.examine()
    if not problems:
        yield Finding("broker", True, "connected, and its streams are as they should be")
    for problem in problems:
        yield Finding("broker", False, problem)


async def _service(settings: Settings) -> AsyncIterator[Finding]:
    host = "localhost" if settings.host in ("0.0.0.0", "::", "127.0.0.1") else settings.host
    url = f"http://{host}:{settings.port}"

    def ask() -> tuple[str, Readiness]:
        with Client(url, settings.api_key, attempts_max=1, timeout_seconds=ASK_SECONDS) as client:
            return client.health().status, _readiness(host, settings.port)

    try:
        health, readiness = await asyncio.to_thread(ask)
    except ConnectionFailed:
        yield Finding("service", True, f"does not run at {url}: `duetime serve` starts it")
        return
    except (DuetimeClientError, OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        yield Finding("service", False, f"{url} answers, but not as it should: {error}")
        return
    if readiness.reason is not None:
        yield Finding("service", False, f"{url} is not ready: {readiness.reason}")
    else:
        yield Finding("service", health == "up", f"{url} is {health}")
    for reason in Reason:
        if count := readiness.overdue.get(reason):
            yield Finding("overdue", reason not in OURS, f"{count} {_ADVICE[reason]}")
    if not readiness.overdue:
        yield Finding("overdue", True, "no timer is overdue")
    aside = readiness.quarantined
    if aside.timers:
        yield Finding("rows", False, f"{aside.timers} timers are quarantined: {_QUARANTINE_ADVICE}")
    if aside.namespaces:
        yield Finding("rows", False, f"{aside.namespaces} namespaces can't be read: {_QUARANTINE_ADVICE}")
    if not aside.timers and not aside.namespaces:
        yield Finding("rows", True, "every row that was met can be read")


def _readiness(host: str, port: int) -> Readiness:
    """What the instance says of itself. The client would raise for a 503 and lose the reason."""
    connection = http.client.HTTPConnection(host, port, timeout=ASK_SECONDS)
    try:
        connection.request("GET", "/readyz")
        return msgspec.json.decode(connection.getresponse().read(READINESS_BYTES_MAX), type=Readiness)
    finally:
        connection.close()
