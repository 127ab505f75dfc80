"""``duetime watch``: asks every second and shows what changed, in place on a terminal, line by line into a pipe.

A server that goes away is asked again for as long as a client's patience lasts, so that a restart ends no watch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from itertools import islice
from typing import NoReturn

from duetime.client import Client, Status, Timer
from duetime.commands import output
from duetime.commands.session import open_client
from duetime.commands.timers import fetched

INTERVAL_SECONDS = 1.0
PATIENT_ATTEMPTS_MAX = 100
ROWS_MAX = 1_000
ROWS_PIPED = 50


class _Screen:
    """Lines that are drawn over those drawn before."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, lines: list[str]) -> None:
        size = shutil.get_terminal_size()
        # A line that is wrapped, or a picture that scrolls, could not be drawn over.
        lines = [_cut(line, size.columns) for line in lines[: size.lines - 1]]
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        sys.stdout.write(up + "\x1b[J" + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self._drawn = len(lines)


def _cut(line: str, columns: int) -> str:
    """The line's first columns, its colours not counted."""
    shown = 0
    at = 0
    while at < len(line):
        if line[at] == "\x1b":
            at = line.index("m", at) + 1
            continue
        shown += 1
        at += 1
        if shown == columns and at < len(line):
            return line[: at - 1] + "…" + ("\x1b[0m" if "\x1b" in line else "")
    return line


def _can_redraw() -> bool:
    return output.is_terminal() and os.environ.get("TERM") != "dumb"


def watch(client: Client, options: argparse.Namespace) -> int:
    if options.timer is not None:
        first = fetched(client, options.timer)
        with open_client(options, attempts_max=PATIENT_ATTEMPTS_MAX) as patient:
            return _follow(patient, first, options)
    standing = _standing(client, options.namespace, ROWS_PIPED)
    if options.json:
        output.print_json(standing)
        return 0
    with open_client(options, attempts_max=PATIENT_ATTEMPTS_MAX) as patient:
        if _can_redraw():
            _draw_all(patient, options.namespace)
        _tell_all(patient, options.namespace)


def _follow(client: Client, timer: Timer, options: argparse.Namespace) -> int:
    screen = _Screen() if _can_redraw() and not options.json else None
    told = None
    while True:
        if screen is not None:
            screen.draw([output.one_line(timer)])
        elif not options.json and told != (seen := _seen(timer)):
            told = seen
            print(output.one_line(timer), flush=True)
        if timer.status.final:
            break
        time.sleep(INTERVAL_SECONDS)
        timer = fetched(client, f"{timer.namespace}/{timer.id}")
    if options.json:
        output.print_json(timer)
    return 0 if timer.status is Status.COMPLETED else 1


def _seen(timer: Timer) -> tuple[Status, int, object]:
    return timer.status, timer.attempts, timer.fire_at


def _standing(client: Client, namespace: str | None, rows: int) -> dict[str, list[Timer]]:
    """What is due next and what was finished last."""

    def some(status: Status, limit: int) -> list[Timer]:
        number = max(1, min(limit, ROWS_MAX))
        return list(islice(client.list(namespace=namespace, status=status, page_size=number), number))

    due = some(Status.EXECUTING, rows) + some(Status.PENDING, rows)
    done = some(Status.COMPLETED, rows) + some(Status.FAILED, rows)
    done.sort(key=lambda timer: timer.executed_at or timer.updated_at, reverse=True)
    return {"due": due[:rows], "finished": done[:rows]}


def _draw_all(client: Client, namespace: str | None) -> NoReturn:
    screen = _Screen()
    while True:
        rows = max(1, (shutil.get_terminal_size().lines - 7) // 2)
        standing = _standing(client, namespace, rows)
        lines = [f"{client.url}, all namespaces" if namespace is None else f"{client.url}, namespace {namespace}", ""]
        for title, timers in (("due next", standing["due"]), ("just finished", standing["finished"])):
            lines += output.timers_table(timers) if timers else [f"nothing {title}"]
            lines.append("")
        screen.draw(lines[:-1])
        time.sleep(INTERVAL_SECONDS)


def _tell_all(client: Client, namespace: str | None) -> NoReturn:
    told: dict[tuple[str, str], tuple[Status, int, object]] = {}
    while True:
        standing = _standing(client, namespace, ROWS_PIPED)
        now: dict[tuple[str, str], tuple[Status, int, object]] = {}
        for timer in (*reversed(standing["finished"]), *standing["due"]):
            key = timer.namespace, timer.id
            now[key] = seen = _seen(timer)
            if told.get(key) != seen:
                print(output.one_line(timer), flush=True)
        told = now
        time.sleep(INTERVAL_SECONDS)
