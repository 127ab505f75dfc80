"""The command line: ``duetime serve``, and the commands that talk to a service. Errors are one line on stderr and a
non-zero exit code.

Imports wait until the command is known: ``serve`` does not load the client, and the other commands do not load the
service.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from duetime.commands.grammar import Parser, add_commands, add_server_options
from duetime.version import __version__

_EXAMPLES = """\
examples:
  duetime serve                                        run the service, on http://localhost:3000
  duetime create --in 10m --url http://localhost:8080/hook --payload '{"order": 7}'
  duetime list --status pending
  duetime watch

`duetime COMMAND --help` explains a command. The options above come before the command or after it. After `create` and
`update`, --url is the URL of the callback, so use --server for the service there."""


def _settings_help() -> str:
    from duetime.settings import SETTINGS

    lines = ["settings (from the environment, then .env, then duetime.toml; the first one wins):"]
    width = max(len(setting.name) for setting in SETTINGS)
    for setting in SETTINGS:
        default = f" [{setting.default}]" if setting.default else ""
        lines.append(f"  {setting.name:<{width}}  {setting.meaning}{default}")
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(prog="duetime", description="Durable timers that call you back.", epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"duetime {__version__}")
    add_server_options(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", title="commands")
    serving = commands.add_parser(
        "serve",
        help="run the service in the foreground",
        description="Run the service in the foreground until Ctrl-C or SIGTERM. It finishes running attempts first.",
        late_epilog=_settings_help,
    )
    serving.add_argument(
        "--virtual-clock",
        action="store_true",
        help='for development: a clock that POST /clock {"advance": "3d"} moves forward',
    )
    serving.add_argument("--worker", help=argparse.SUPPRESS)  # how DUETIME_WORKERS starts its processes
    serving.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    serving.add_argument("--metrics-directory", help=argparse.SUPPRESS)
    add_commands(commands)
    return parser


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _serve(options: argparse.Namespace) -> int:
    import asyncio
    import os
    import socket
    from pathlib import Path

    import uvloop

    from duetime import logs
    from duetime.errors import DuetimeError, SettingsError
    from duetime.node import serve, serve_many
    from duetime.settings import load
    from duetime.workers import WorkerContext

    try:
        settings = load(os.environ, Path.cwd())
        logs.configure(settings.log_level.upper(), f"[worker {options.worker}] " if options.worker else "")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if options.worker is not None:
                listener = socket.socket(fileno=options.listener)
                runner.run(
                    serve(settings, worker=WorkerContext(options.worker, listener, Path(options.metrics_directory)))
                )
            elif settings.workers > 1:
                if options.virtual_clock:
                    raise SettingsError("--virtual-clock can't be used with DUETIME_WORKERS above 1")
                return runner.run(serve_many(settings))
            else:
                runner.run(serve(settings, virtual_clock=options.virtual_clock))
    except (DuetimeError, BaseExceptionGroup) as raised:
        error = _first(raised)
        if not isinstance(error, DuetimeError):
            raise
        print(f"duetime: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    options = parser.parse_args(given)
    if options.command == "serve":
        return _serve(options)
    if options.command == "completion":
        from duetime.commands.completion import script

        print(script(options.shell, parser), end="")
        return 0
    from duetime.commands.session import run

    return run(options)
