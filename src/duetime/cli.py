"""The command line: ``duetime serve``. Errors are one line on stderr and a non-zero exit."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from duetime import __version__
from duetime.errors import DuetimeError, SettingsError
from duetime.node import serve
from duetime.settings import SETTINGS, load


def _settings_help() -> str:
    lines = ["settings (environment, then .env, then duetime.toml):"]
    width = max(len(setting.name) for setting in SETTINGS)
    for setting in SETTINGS:
        default = f" [{setting.default}]" if setting.default else ""
        lines.append(f"  {setting.name:<{width}}  {setting.meaning}{default}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="duetime", description="Durable timers that call you back.")
    parser.add_argument("--version", action="version", version=f"duetime {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    serving = commands.add_parser(
        "serve",
        help="run the service in the foreground",
        description="Run the service in the foreground until Ctrl-C or SIGTERM; it finishes what is in flight first.",
        epilog=_settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serving.add_argument(
        "--virtual-clock",
        action="store_true",
        help='for development: a clock that POST /clock {"advance": "3d"} moves forward',
    )
    return parser


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        settings = load(os.environ, Path.cwd())
        logging.basicConfig(
            level=settings.log_level.upper(),
            stream=sys.stderr,
            format="%(asctime)s %(levelname)-7s %(message)s",
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, virtual_clock=options.virtual_clock))
    except (DuetimeError, BaseExceptionGroup) as raised:
        error = _first(raised)
        if not isinstance(error, DuetimeError):
            raise
        print(f"duetime: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0
