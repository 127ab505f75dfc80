"""What went wrong, in the words of the command line: errors name the flag that was typed, and say what to do."""

from __future__ import annotations

import argparse
import re

from duetime.client import ConnectionFailed, DuetimeClientError, Unauthorized, UnexpectedResponse
from duetime.commands.times import When

_FLAGS = {
    "callbackUrl": ("callback_url", "--url"),
    "callbackMethod": ("method", "--method"),
    "callbackHeaders": ("headers", "--header"),
    "callbackTimeout": ("timeout", "--timeout"),
    "responseProtocol": ("protocol", "--protocol"),
    "retryPolicy.maxRetries": ("retries", "--retries"),
    "retryPolicy": ("retries", "--retries"),
    "payload": ("payload", "--payload"),
    "metadata": ("metadata", "--metadata"),
    "correlationId": ("correlation_id", "--correlation-id"),
    "executeAfter": ("after", "--after"),
    "executeBefore": ("before", "--before"),
    "status": ("status", "--status"),
    "namespace": ("namespace", "--namespace"),
    "id": ("id", "--id"),
    "limit": ("limit", "--limit"),
    "retention": ("retention", "--retention"),
    "weight": ("weight", "--weight"),
    "shards": ("shards", "--shards"),
}
"""For each field of the API the option that sets it, and how that is typed."""


def advice(error: DuetimeClientError, options: argparse.Namespace) -> str:
    match error:
        case ConnectionFailed(sent=False) if "TLS:" in error.message:
            return error.message
        case ConnectionFailed(sent=False) if "refused" not in error.message:
            return f"{error}: check the address of the server (--server, TIMER_URL or the profile)"
        case ConnectionFailed(sent=False):
            return f"{error}: is it running? Start it with `duetime serve`, or give its address with --server"
        case ConnectionFailed():
            return f"{error}; the server may have carried out the request: check before you repeat it"
        case UnexpectedResponse():
            return f"{error}: check the address of the server (--server, TIMER_URL or the profile)"
        case Unauthorized():
            return (
                "the server rejected the API key, or none was given: use --key, API_KEY or a profile, or change to the "
                "directory with the server's duetime.key"
            )
    if error.code in ("UNKNOWN_NAMESPACE", "NAMESPACE_NOT_FOUND"):
        what = error.message.partition(";")[0]
        return f"{what}: create it with `duetime namespaces create`, or list those that exist with `duetime namespaces`"
    if error.code == "TIMER_CONFLICT" and options.command == "create":
        return f"{error}: choose another --id, or replace that timer with --replace"
    return with_flags(error.message, str(error.details.get("field", "")), options)


def with_flags(message: str, field: str, options: argparse.Namespace) -> str:
    """The message, with the names of fields replaced by the flags of this command."""
    flags = {name: flag for name, (option, flag) in _FLAGS.items() if hasattr(options, option)}
    if hasattr(options, "delay"):
        at: When | None = options.at
        flags["executeAt"] = "--at" if at is not None else "--in"
        flags["delay"] = "--at" if at is not None and at.delay else "--in"
    start = f"{flags[field]}: " if field in flags else ""
    if start:
        message = message.removeprefix(f"{field} ")
    # Only names that are no English words are replaced within a sentence.
    names = sorted((name for name in flags if re.search("[A-Z]", name)), key=len, reverse=True)
    return start + re.sub(rf"\b({'|'.join(map(re.escape, names)) or '(?!)'})\b", lambda m: flags[m[1]], message)
