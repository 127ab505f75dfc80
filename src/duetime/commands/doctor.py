"""``duetime doctor``: checks what the service needs to start here, checks the service if it runs, and says how to fix
what is wrong.

It reads the settings as ``duetime serve`` would in the same directory. If the address of a service is given, it checks
that one instead: nothing in this directory concerns it. It changes and creates nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from duetime.client.exchange import URL_VARIABLE
from duetime.clock import SystemClock
from duetime.commands import output, profiles, server_checks
from duetime.commands.findings import Finding
from duetime.databases import database_of
from duetime.errors import DuetimeError, SettingsError
from duetime.node import build_broker
from duetime.settings import Settings, load
from duetime.settings.keyfile import KEY_FILE
from duetime.store import Abilities, TimeSource
from duetime.stores.connecting import Misconfigured
from duetime.stores.sqlite.lock import holder, open_to_others, too_many_names

DISK_BYTES_MIN = 1 << 30


def run(options: argparse.Namespace) -> int:
    profiles.apply(options)
    found = asyncio.run(_gathered(options))
    if options.json:
        output.print_json({"ok": all(each.ok for each in found), "findings": found})
    else:
        for each in found:
            print(f"{'ok  ' if each.ok else 'FAIL'}  {each.check:<9} {output.safe(each.message)}")
    return 0 if all(each.ok for each in found) else 1


async def _gathered(options: argparse.Namespace) -> list[Finding]:
    server = options.server or os.environ.get(URL_VARIABLE, "").strip()
    if server:
        return await asyncio.to_thread(server_checks.named, server, options.key)
    try:
        settings = load(os.environ, Path.cwd())
    except SettingsError as error:
        return [Finding("settings", False, str(error))]
    found = [Finding("settings", True, "every value is valid")]
    for check in (_key, _store, _broker):
        found += [each async for each in check(settings)]
    return found + await asyncio.to_thread(server_checks.local, settings.host, settings.port, settings.api_key)


async def _key(settings: Settings) -> AsyncIterator[Finding]:
    if settings.auth != "key":
        yield Finding("key", True, "not needed: DUETIME_AUTH=none")
    elif settings.api_key is not None:
        yield Finding("key", True, "API_KEY is set")
    else:
        path = (settings.database_path or Path("duetime.db")).parent / KEY_FILE
        says = f"is in {path}" if path.exists() else f"no key yet: the first start creates {path}"
        yield Finding("key", True, says)


async def _store(settings: Settings) -> AsyncIterator[Finding]:
    if (database := database_of(settings.database_url)) is not None:
        where = settings.database_shown
        try:
            store = database.load()
            version, offset_ms = await store(settings.database_url).examine(SystemClock())
        except SettingsError as error:
            yield Finding("store", False, str(error))
            return
        except Misconfigured as error:
            yield Finding("store", False, f"{where}: {error}; change DATABASE_URL or the database's configuration")
            return
        except DuetimeError as error:
            yield Finding("store", False, f"{where}: {error}; check DATABASE_URL, and that the database runs")
            return
        yield Finding("store", True, f"{where}, version {version}")
        quarter_ms = settings.lease_ttl_ms // 4
        right = abs(offset_ms) <= quarter_ms
        says = f"differs from the database's by {offset_ms} ms" if offset_ms else "agrees with the database's"
        advice = f": above {quarter_ms} ms an instance releases its shards; synchronize the clock with NTP"
        yield Finding("clock", right, says + ("" if right else advice))
        for finding in _abilities(store.abilities):
            yield finding
    elif settings.database_path is None:
        yield Finding("store", True, "memory: all timers are lost when the process ends")
    else:
        path = settings.database_path.resolve()
        folder = path.parent if path.parent.exists() else Path()
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            yield Finding("store", False, f"{folder} can't be written to: choose another DATABASE_URL")
        elif free < DISK_BYTES_MIN:
            yield Finding("store", False, f"only {free >> 20} MiB are free on the disk of {path}: free some space")
        elif problem := too_many_names(path) or open_to_others(path):
            yield Finding("store", False, problem)
        elif process := holder(path):
            yield Finding("store", True, f"{path} is in use by process {process}")
        else:
            yield Finding("store", True, f"{path} {'exists' if path.exists() else 'is created at the first start'}")


def _abilities(abilities: Abilities) -> Iterator[Finding]:
    """What an operator has to know about this database."""
    if abilities.time_source is TimeSource.STORE:
        yield Finding("clock", True, "the database's clock decides what is due")
    else:
        says = "each instance uses the clock of its own machine: synchronize all of them with NTP"
        yield Finding("clock", True, says)
    if abilities.expires_history:
        yield Finding("history", True, "the database itself removes old finished timers: Duetime does not purge")
    if not abilities.counts_exactly:
        yield Finding("counts", True, "are estimates, shown with a ~; so is the metric duetime_timers")


async def _broker(settings: Settings) -> AsyncIterator[Finding]:
    broker = build_broker(settings)
    if broker is None:
        yield Finding("broker", True, "none: TIMER_BROKER_URL is not set")
        return
    problems = await broker.examine()
    if not problems:
        yield Finding("broker", True, "connected, and its streams have the right configuration")
    for problem in problems:
        yield Finding("broker", False, problem)
