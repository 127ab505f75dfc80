"""One command from its options to its exit code: applies the profile, imports the handler, opens the client and reports
errors on one line."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

from duetime.client import Client, DuetimeClientError
from duetime.commands import profiles
from duetime.commands.advice import advice
from duetime.commands.output import safe
from duetime.commands.times import When, shown

ATTEMPTS_MAX = 3
INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell gives for a command that SIGINT or SIGPIPE ended


class UsageError(Exception):
    """The options make no sense together."""


def open_client(options: argparse.Namespace, *, attempts_max: int = ATTEMPTS_MAX) -> Client:
    """A client that gives up soon: a person is waiting."""
    return Client(options.server, options.key, attempts_max=attempts_max)


def run(options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        module, _, name = options.handler.partition(":")
        handler = getattr(importlib.import_module(f"duetime.commands.{module}"), name)
        if options.offline:
            code: int = handler(options)
        else:
            profiles.apply(options)
            _say_local_times(options)
            with open_client(options) as client:
                code = handler(client, options)
        sys.stdout.flush()
        return code
    except DuetimeClientError as error:
        return complain(advice(error, options), 1)
    except (UsageError, profiles.ProfileError) as error:
        return complain(str(error), 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has closed it. What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _say_local_times(options: argparse.Namespace) -> None:
    """Say which instant each local time was taken for."""
    for flag in ("at", "after", "before"):
        when = getattr(options, flag, None)
        if isinstance(when, When) and when.local is not None:
            note(f"--{flag} is {shown(when.local)} ({when.at})")


def complain(message: str, code: int) -> int:
    note(message)
    return code


def note(message: str) -> None:
    print(f"duetime: {safe(message)}", file=sys.stderr)


def confirm(options: argparse.Namespace, question: str) -> bool:
    """Ask on the terminal, unless --yes was given."""
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{options.command} asks for confirmation, but stdin is not a terminal: add --yes")
    print(f"{safe(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
