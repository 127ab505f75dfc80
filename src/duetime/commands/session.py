"""One command from its options to its exit code: finds the handler, opens the client, and puts errors in one line."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable

from duetime.client import Client, ConnectionFailed, DuetimeClientError, Unauthorized
from duetime.commands.output import safe

ATTEMPTS_MAX = 3
INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell gives for a command that SIGINT or SIGPIPE ended


class UsageError(Exception):
    """The options make no sense together."""


Handler = Callable[[Client, argparse.Namespace], int]


def open_client(options: argparse.Namespace, *, attempts_max: int = ATTEMPTS_MAX) -> Client:
    """A client that soon gives up: somebody sits and waits."""
    return Client(options.server, options.key, attempts_max=attempts_max)


def run(options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        module, _, name = options.handler.partition(":")
        handler: Handler = getattr(importlib.import_module(f"duetime.commands.{module}"), name)
        with open_client(options) as client:
            code = handler(client, options)
        sys.stdout.flush()
        return code
    except DuetimeClientError as error:
        return complain(_advice(error), 1)
    except UsageError as error:
        return complain(str(error), 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough. What is still buffered must not fail once more at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def complain(message: str, code: int) -> int:
    print(f"duetime: {safe(message)}", file=sys.stderr)
    return code


def _advice(error: DuetimeClientError) -> str:
    """What went wrong, and what to do about it."""
    match error:
        case ConnectionFailed(sent=False):
            return f"{error}: is it running? Start it with `duetime serve`, or say where it is with --server"
        case ConnectionFailed():
            return f"{error}; it may have been done all the same: look before you repeat it"
        case Unauthorized():
            return "the key is missing or wrong: give --key, set API_KEY, or be where the server's duetime.key is"
    if error.code in ("UNKNOWN_NAMESPACE", "NAMESPACE_NOT_FOUND"):
        return f"{error}: make it with `duetime namespaces create`, or see `duetime namespaces`"
    if error.code == "TIMER_CONFLICT" and error.status == 409 and "replay" not in error.message:
        return f"{error}: choose another --id, or put this one in its place with --replace"
    return str(error)
