"""``duetime create``, ``get``, ``list``, ``update``, ``cancel``, ``replay`` and ``attempts``."""

from __future__ import annotations

import argparse
import sys

from duetime.client import Changes, Client, NewTimer, NotFound, Timer, TimerPage
from duetime.commands import output
from duetime.commands.session import UsageError
from duetime.model import DEFAULT_NAMESPACE

PAGE_SIZE_MAX = 1_000


def named(text: str) -> tuple[str, str]:
    """Namespace and id of a timer as it was typed: the first slash ends the namespace."""
    namespace, slash, id = text.partition("/")
    if not slash:
        namespace, id = DEFAULT_NAMESPACE, text
    if not namespace or not id:
        raise UsageError(f"{text!r} names no timer: write ID or namespace/ID")
    return namespace, id


def fetched(client: Client, text: str) -> Timer:
    namespace, id = named(text)
    try:
        return client.get(id, namespace=namespace)
    except NotFound as error:
        raise _missing(error, namespace, id) from None


def _missing(error: NotFound, namespace: str, id: str) -> NotFound:
    message = f"there is no timer {namespace}/{id}; `duetime list` shows those there are"
    return NotFound(message, code=error.code, status=error.status)


def _changes(options: argparse.Namespace) -> Changes:
    changes = Changes(
        execute_at=options.at,
        delay=options.delay,
        callback_url=options.callback_url,
        callback_method=options.method,
        callback_headers=None if options.headers is None else dict(options.headers),
        correlation_id=options.correlation_id,
        retry_policy=None if options.retries is None else {"max_retries": options.retries},
        callback_timeout=options.timeout,
        response_protocol=options.protocol,
    )
    if options.payload is not None:
        changes["payload"] = options.payload
    if options.metadata is not None:
        changes["metadata"] = options.metadata
    return changes


def _say(timer: Timer, options: argparse.Namespace) -> int:
    if options.json:
        output.print_json(timer)
    else:
        print(output.one_line(timer))
    return 0


def create(client: Client, options: argparse.Namespace) -> int:
    new: NewTimer = {**_changes(options), "id": options.id, "namespace": options.namespace}
    if options.replace and options.id is None:
        raise UsageError("--replace needs the --id of the timer that is to be replaced")
    return _say(client.upsert(**new) if options.replace else client.create(**new), options)


def get(client: Client, options: argparse.Namespace) -> int:
    timer = fetched(client, options.timer)
    if options.json:
        output.print_json(timer)
    else:
        print(*output.timer_fields(timer), sep="\n")
    return 0


def update(client: Client, options: argparse.Namespace) -> int:
    namespace, id = named(options.timer)
    changes = _changes(options)
    if all(value is None for value in changes.values()):
        raise UsageError("there is nothing to change: give --in, --at, --url, --payload or another option")
    try:
        return _say(client.update(id, namespace=namespace, **changes), options)
    except NotFound as error:
        raise _missing(error, namespace, id) from None


def cancel(client: Client, options: argparse.Namespace) -> int:
    removed = []
    for namespace, id in [named(text) for text in options.timers]:
        try:
            client.delete(id, namespace=namespace)
        except NotFound as error:
            raise _missing(error, namespace, id) from None
        removed.append(f"{namespace}/{id}")
        if not options.json:
            print(f"{output.safe(removed[-1])}  removed")
    if options.json:
        output.print_json({"removed": removed})
    return 0


def list_timers(client: Client, options: argparse.Namespace) -> int:
    timers: list[Timer] = []
    cursor: str | None = None
    while True:
        wanted = PAGE_SIZE_MAX if options.all else min(PAGE_SIZE_MAX, options.limit - len(timers))
        page = client.page(
            namespace=options.namespace,
            status=options.status,
            correlation_id=options.correlation_id,
            execute_after=options.after,
            execute_before=options.before,
            limit=wanted,
            cursor=cursor,
        )
        timers += page.timers
        cursor = page.next_cursor
        if cursor is None or (not options.all and len(timers) >= options.limit):
            break
    if options.json:
        output.print_json(TimerPage(timers=timers, next_cursor=cursor))
    elif timers:
        print(*output.timers_table(timers), sep="\n")
        if cursor is not None:
            print(f"and more: these are {len(timers)}; --limit N shows more, --all shows all", file=sys.stderr)
    else:
        print("no timers", file=sys.stderr)
    return 0


def replay(client: Client, options: argparse.Namespace) -> int:
    if options.timer is not None:
        if options.status or options.namespace or options.correlation_id:
            raise UsageError("name a timer, or choose timers with --status: not both")
        namespace, id = named(options.timer)
        try:
            return _say(client.replay(id, namespace=namespace), options)
        except NotFound as error:
            raise _missing(error, namespace, id) from None
    if options.status is None:
        raise UsageError("name a timer, or choose timers with --status")
    _confirm(options)
    count = client.replay_all(
        status=options.status,
        namespace=options.namespace,
        correlation_id=options.correlation_id,
        limit=options.limit,
    )
    if options.json:
        output.print_json({"replayed": count})
    else:
        print(f"{count} {'timer' if count == 1 else 'timers'} replayed")
    return 0


def _confirm(options: argparse.Namespace) -> None:
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("to replay many timers without being asked, give --yes")
    where = f"of {options.namespace}" if options.namespace else "of all namespaces"
    which = f" with correlation id {options.correlation_id}" if options.correlation_id else ""
    question = f"Fire up to {options.limit} {options.status} timers {where}{which} once more? [y/N] "
    print(output.safe(question), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was replayed")


def attempts(client: Client, options: argparse.Namespace) -> int:
    namespace, id = named(options.timer)
    try:
        made = client.attempts(id, namespace=namespace)
    except NotFound as error:
        raise _missing(error, namespace, id) from None
    if options.json:
        output.print_json({"attempts": made})
    elif made:
        print(*output.attempts_table(made), sep="\n")
    else:
        print("no attempts yet", file=sys.stderr)
    return 0
