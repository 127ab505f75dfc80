"""What went wrong, in the words of the command line: errors name the flag that was typed, and say what to do."""

from __future__ import annotations

import argparse
import re

from duetime.client import ConnectionFailed, DuetimeClientError, Unauthorized, UnexpectedResponse
from duetime.client.failures import in_python
from duetime.commands.times import When

_FLAGS = {
    "callback_url": ("callback_url", "--url"),
    "callback_subject": ("callback_subject", "--subject"),
    "callback_method": ("method", "--method"),
    "callback_headers": ("headers", "--header"),
    "callback_timeout": ("timeout", "--timeout"),
    "response_protocol": ("protocol", "--protocol"),
    "retry_policy.max_retries": ("retries", "--retries"),
    "retry_policy.initial_interval": ("retry_initial_interval", "--retry-initial-interval"),
    "retry_policy.max_interval": ("retry_max_interval", "--retry-max-interval"),
    "retry_policy.backoff_multiplier": ("retry_backoff", "--retry-backoff"),
    "retry_policy.give_up_on": ("give_up_on", "--give-up-on"),
    "retry_policy": ("retries", "--retries"),
    "payload": ("payload", "--payload"),
    "metadata": ("metadata", "--metadata"),
    "correlation_id": ("correlation_id", "--correlation-id"),
    "execute_after": ("after", "--after"),
    "execute_before": ("before", "--before"),
    "status": ("status", "--status"),
    "namespace": ("namespace", "--namespace"),
    "id": ("id", "--id"),
    "name": ("name", "name"),
    "limit": ("limit", "--limit"),
    "retention": ("retention", "--retention"),
    "weight": ("weight", "--weight"),
    "shards": ("shards", "--shards"),
}
"""For each argument of the client the option that sets it, and how that is typed."""


def advice(error: DuetimeClientError, options: argparse.Namespace) -> str:
    match error:
        case ConnectionFailed(sent=False) if "TLS:" in error.message:
            return error.message
        case ConnectionFailed(sent=False) if "refused" not in error.message:
            return f"{error}: check the address of the service (--server, TIMER_URL or the profile)"
        case ConnectionFailed(sent=False):
            return f"{error}: is it running? Start it with `duetime serve`, or give its address with --server"
        case ConnectionFailed():
            return f"{error}; the service may have carried out the request: check before you repeat it"
        case UnexpectedResponse():
            return f"{error}: check the address of the service (--server, TIMER_URL or the profile)"
        case Unauthorized():
            return (
                "the service rejected the API key, or none was given: use --key, API_KEY or a profile, or change to "
                "the directory with the service's duetime.key"
            )
    if error.code in ("UNKNOWN_NAMESPACE", "NAMESPACE_NOT_FOUND"):
        what = error.message.partition(";")[0]
        return f"{what}: create it with `duetime namespaces create`, or list those that exist with `duetime namespaces`"
    if error.code == "TIMER_CONFLICT" and options.command == "create":
        return f"{error}: choose another --id, or replace that timer with --replace"
    return with_flags(error.message, in_python(str(error.details.get("field", ""))), options)


def with_flags(message: str, field: str, options: argparse.Namespace) -> str:
    """The message, with the names of the client's arguments replaced by the flags of this command."""
    if field in ("namespace", "id") and (getattr(options, "timer", None) or getattr(options, "timers", None)):
        return f"timer: {message}"  # it was typed as NAMESPACE/ID
    flags = {name: flag for name, (option, flag) in _FLAGS.items() if hasattr(options, option)}
    if hasattr(options, "delay"):
        at: When | None = options.at
        flags["execute_at"] = "--at" if at is not None else "--in"
        flags["delay"] = "--at" if at is not None and at.delay else "--in"
    whole = field.partition("[")[0]  # a list is typed as one text
    start = f"{flags[whole]}: " if whole in flags else ""
    if start:
        message = message.removeprefix(f"{field} ")
    # Only names that are no English words are replaced within a sentence.
    names = sorted((name for name in flags if "_" in name), key=len, reverse=True)
    return start + re.sub(rf"\b({'|'.join(map(re.escape, names)) or '(?!)'})\b", lambda m: flags[m[1]], message)
