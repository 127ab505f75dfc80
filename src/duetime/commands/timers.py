"""``duetime create``, ``get``, ``list``, ``count``, ``update`` and ``attempts``."""

from __future__ import annotations

import argparse
import sys
from typing import TypedDict, cast

from duetime.client import Changes, Client, NewTimer, NotFound, RetryOptions, Status, Timer
from duetime.commands import output, tables
from duetime.commands.session import UsageError, note

PAGE_SIZE_MAX = 1_000


class Filters(TypedDict):
    """What --namespace, --id, --correlation-id, --after and --before select."""

    namespace: str | None
    id: str | None
    correlation_id: str | None
    execute_after: str | None
    execute_before: str | None


def filters(options: argparse.Namespace) -> Filters:
    return Filters(
        namespace=options.namespace,
        id=options.id,
        correlation_id=options.correlation_id,
        execute_after=options.after and options.after.at,
        execute_before=options.before and options.before.at,
    )


def named(text: str, options: argparse.Namespace) -> tuple[str, str]:
    """Namespace and id of a timer as it was typed: the first slash ends the namespace."""
    namespace, slash, id = text.partition("/")
    if not slash:
        namespace, id = options.home, text
    if not namespace or not id:
        raise UsageError(f"{text!r} names no timer: give ID or NAMESPACE/ID")
    return namespace, id


def fetched(client: Client, namespace: str, id: str) -> Timer:
    try:
        return client.get(id, namespace=namespace)
    except NotFound as error:
        raise missing(error, namespace, id) from None


def missing(error: NotFound, namespace: str, id: str) -> NotFound:
    message = f"timer {namespace}/{id} not found; `duetime list` shows the timers that exist"
    return NotFound(message, code=error.code, status=error.status)


def _changes(options: argparse.Namespace) -> Changes:
    changes = Changes(
        execute_at=options.at and options.at.at,
        delay=options.delay or (options.at and options.at.delay),
        callback_url=options.callback_url,
        callback_subject=options.callback_subject,
        callback_method=options.method,
        callback_headers=None if options.headers is None else dict(options.headers),
        correlation_id=options.correlation_id,
        retry_policy=_retry_policy(options),
        callback_timeout=options.timeout,
        response_protocol=options.protocol,
    )
    if options.payload is not None:
        changes["payload"] = options.payload
    if options.metadata is not None:
        changes["metadata"] = options.metadata
    return changes


def _retry_policy(options: argparse.Namespace) -> RetryOptions | None:
    given = {
        "max_retries": options.retries,
        "initial_interval": options.retry_initial_interval,
        "max_interval": options.retry_max_interval,
        "backoff_multiplier": options.retry_backoff,
        "give_up_on": options.give_up_on,
    }
    return cast(RetryOptions, {name: value for name, value in given.items() if value is not None}) or None


def _say(timer: Timer, options: argparse.Namespace) -> int:
    if options.json:
        output.print_json(timer)
    else:
        print(tables.one_line(timer))
    return 0


def create(client: Client, options: argparse.Namespace) -> int:
    new: NewTimer = {**_changes(options), "id": options.id, "namespace": options.namespace}
    if options.replace and options.id is None:
        raise UsageError("--replace needs --id, the id of the timer to replace")
    if options.replace:
        return _say(client.upsert(**new), options)
    timer = client.create(**new)
    if options.id is not None and (timer.status is not Status.PENDING or timer.updated_at != timer.created_at):
        note(f"this timer already exists and is {timer.status}: nothing was changed; --replace creates it anew")
    return _say(timer, options)


def get(client: Client, options: argparse.Namespace) -> int:
    timer = fetched(client, *named(options.timer, options))
    if options.json:
        output.print_json(timer)
    else:
        print(*tables.timer_fields(timer), sep="\n")
    return 0


def update(client: Client, options: argparse.Namespace) -> int:
    namespace, id = named(options.timer, options)
    changes = _changes(options)
    if all(value is None for value in changes.values()):
        raise UsageError("nothing to change: give --in, --at, --url, --payload or another option")
    try:
        return _say(client.update(id, namespace=namespace, **changes), options)
    except NotFound as error:
        raise missing(error, namespace, id) from None


def list_timers(client: Client, options: argparse.Namespace) -> int:
    """A table of all rows, as their widths depend on each other; as JSON, page by page."""
    timers: list[Timer] = []
    number = 0
    cursor: str | None = None
    while True:
        wanted = PAGE_SIZE_MAX if options.all else min(PAGE_SIZE_MAX, options.limit - number)
        page = client.page(**filters(options), status=options.status, limit=wanted, cursor=cursor)
        number += len(page.timers)
        if options.json:
            for timer in page.timers:
                output.print_json_line(timer)
        else:
            timers += page.timers
        cursor = page.next_cursor
        if cursor is None or (not options.all and number >= options.limit):
            break
    if not number:
        check_namespace(client, options)
    if timers:
        print(*tables.timers_table(timers), sep="\n")
    if cursor is not None:
        print(f"showing {number}; more available: --limit N shows more, --all shows all", file=sys.stderr)
    elif not number and not options.json:
        print("no timers", file=sys.stderr)
    return 0


def check_namespace(client: Client, options: argparse.Namespace) -> None:
    """Raise if the namespace that has no timers does not exist: its name may be mistyped."""
    if options.namespace is not None:
        client.namespace(options.namespace)


def count(client: Client, options: argparse.Namespace) -> int:
    found = client.count(**filters(options), status=options.status)
    if not found.timers:
        check_namespace(client, options)
    if options.json:
        output.print_json(found)
    else:
        print(output.counted(found))
    return 0


def attempts(client: Client, options: argparse.Namespace) -> int:
    namespace, id = named(options.timer, options)
    try:
        made = client.attempts(id, namespace=namespace)
    except NotFound as error:
        raise missing(error, namespace, id) from None
    if options.json:
        output.print_json({"attempts": made})
    elif made:
        print(*tables.attempts_table(made), sep="\n")
    else:
        print("no attempts yet", file=sys.stderr)
    return 0
