"""``duetime doctor``: looks at everything that a start needs and says what to do about what is wrong.

It reads the settings as ``duetime serve`` in the same place would, changes nothing, and makes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec import Struct

from duetime.client import Client, DuetimeClientError
from duetime.clock import SystemClock
from duetime.commands import output
from duetime.errors import DuetimeError, SettingsError
from duetime.node import build_broker
from duetime.settings import Settings, load
from duetime.settings.keyfile import KEY_FILE
from duetime.stores.postgres import PostgresStore
from duetime.stores.sqlite_file import holder

DISK_BYTES_MIN = 1 << 30


class Finding(Struct, frozen=True):
    about: str
    ok: bool
    says: str


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
        path = settings.database_path
        folder = path.parent if path.parent.exists() else Path()
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            yield Finding("store", False, f"{folder} can't be written to: choose another DATABASE_URL")
        elif free < DISK_BYTES_MIN:
            yield Finding("store", False, f"only {free >> 20} MiB are free where {path} is: make room")
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

    def ask() -> str:
        with Client(url, settings.api_key, attempts_max=1, timeout_seconds=3) as client:
            return client.health().status

    try:
        status = await asyncio.to_thread(ask)
        yield Finding("service", status == "up", f"{url} is {status}")
    except DuetimeClientError:
        yield Finding("service", True, f"does not run at {url}: `duetime serve` starts it")
