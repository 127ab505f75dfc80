"""``duetime watch``: polls every second and shows what changed, in place on a terminal, line by line into a pipe.

If the service goes away, the client retries for as long as its timeout, so that a restart does not end a watch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import NoReturn

from duetime.client import Client, Status, Timer, Unsupported
from duetime.commands import output, tables
from duetime.commands.session import open_client
from duetime.commands.timers import fetched, named

INTERVAL_SECONDS = 1.0
PATIENT_ATTEMPTS_MAX = 100
ROWS_MAX = 1_000
ROWS_PIPED = 50
ROWS_BESIDES = 4
"""The rows of a screen besides the two sections: the head line, two blank ones, and the last one for the cursor."""

_SECTIONS = {"due": (Status.EXECUTING, Status.PENDING), "finished": (Status.COMPLETED, Status.FAILED)}
_EMPTY = {"due": "no pending timers", "finished": "no finished timers"}


class _Screen:
    """Redraws its lines in place."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, lines: list[str]) -> None:
        size = shutil.get_terminal_size()
        lines = _fitting(lines, size.lines - 1, size.columns)  # a scrolled screen could not be redrawn
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        sys.stdout.write(up + "\x1b[J" + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._drawn = sum(_height(line, size.columns) for line in lines)


def _height(line: str, columns: int) -> int:
    """How many rows of the terminal the line takes; escape sequences for colors take no columns."""
    return max(1, -(-len(re.sub(r"\x1b\[\d*m", "", line)) // columns))


def _fitting(lines: list[str], rows: int, columns: int) -> list[str]:
    """The first lines, as many as fit into this many rows."""
    fitting: list[str] = []
    for line in lines:
        rows -= _height(line, columns)
        if rows < 0:
            break
        fitting.append(line)
    return fitting


def _can_redraw() -> bool:
    return output.is_terminal() and os.environ.get("TERM") != "dumb"


def watch(client: Client, options: argparse.Namespace) -> int:
    if options.timer is not None:
        first = fetched(client, *named(options.timer, options))
        with open_client(options, attempts_max=PATIENT_ATTEMPTS_MAX) as patient:
            return _follow(patient, first, options)
    listed = _listed(client)
    with open_client(options, attempts_max=PATIENT_ATTEMPTS_MAX) as patient:
        if _can_redraw() and not options.json:
            _draw_all(patient, options.namespace, listed)
        _tell_all(patient, options.namespace, listed, _teller(options))


def _teller(options: argparse.Namespace) -> Callable[[Timer], None]:
    return output.print_json_line if options.json else lambda timer: print(tables.one_line(timer), flush=True)


def _follow(client: Client, timer: Timer, options: argparse.Namespace) -> int:
    screen = _Screen() if _can_redraw() and not options.json else None
    tell = _teller(options)
    told = None
    while True:
        if screen is not None:
            screen.draw([tables.one_line(timer)])
        elif told != (seen := _seen(timer)):
            told = seen
            tell(timer)
        if timer.status.final:
            return 0 if timer.status is Status.COMPLETED else 1
        time.sleep(INTERVAL_SECONDS)
        timer = fetched(client, timer.namespace, timer.id)


def _seen(timer: Timer) -> tuple[Status, int, object]:
    return timer.status, timer.attempts, timer.fire_at


def _listed(client: Client) -> set[Status]:
    """The statuses that the service's database can list; tells the user which others it does not show."""
    listed: set[Status] = set()
    refused: list[Unsupported] = []
    for status in (status for statuses in _SECTIONS.values() for status in statuses):
        try:
            client.page(status=status, limit=1)
            listed.add(status)
        except Unsupported as error:
            refused.append(error)
    if not listed:
        raise refused[0]
    for refusal in refused:
        print(f"not shown: {output.safe(refusal.message)}", file=sys.stderr)
    return listed


def _standing(client: Client, namespace: str | None, rows: int, listed: Collection[Status]) -> dict[str, list[Timer]]:
    """What is due next and what finished last, as far as it can be listed."""
    number = max(1, min(rows, ROWS_MAX))
    standing: dict[str, list[Timer]] = {}
    for name, statuses in _SECTIONS.items():
        some = [status for status in statuses if status in listed]
        if some:
            lists = (client.list(namespace=namespace, status=status, page_size=number) for status in some)
            standing[name] = [timer for each in lists for timer in islice(each, number)]
    standing.get("finished", []).sort(key=lambda timer: timer.executed_at or timer.updated_at, reverse=True)
    return {name: timers[:rows] for name, timers in standing.items()}


def _draw_all(client: Client, namespace: str | None, listed: Collection[Status]) -> NoReturn:
    screen = _Screen()
    while True:
        size = shutil.get_terminal_size()
        rows = max(1, (size.lines - ROWS_BESIDES) // 2)  # of each section
        standing = _standing(client, namespace, rows, listed)
        lines = [f"{client.url}, all namespaces" if namespace is None else f"{client.url}, namespace {namespace}", ""]
        for name, timers in standing.items():
            lines += _fitting(tables.timers_table(timers), rows, size.columns) if timers else [_EMPTY[name]]
            lines.append("")
        screen.draw(lines[:-1])
        time.sleep(INTERVAL_SECONDS)


def _tell_all(
    client: Client, namespace: str | None, listed: Collection[Status], tell: Callable[[Timer], None]
) -> NoReturn:
    told: dict[tuple[str, str], tuple[Status, int, object]] = {}
    while True:
        standing = _standing(client, namespace, ROWS_PIPED, listed)
        now: dict[tuple[str, str], tuple[Status, int, object]] = {}
        for timer in (*reversed(standing.get("finished", [])), *standing.get("due", [])):
            key = timer.namespace, timer.id
            now[key] = seen = _seen(timer)
            if told.get(key) != seen:
                tell(timer)
        told = now
        time.sleep(INTERVAL_SECONDS)
