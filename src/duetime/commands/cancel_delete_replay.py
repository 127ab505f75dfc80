"""``duetime cancel``, ``delete`` and ``replay``: timers by id, one after another, or all that match filters.

With filters, the matching timers are counted first. Then they are changed in steps, but no more of them than were
counted: a replayed timer can fail again at once and match again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from duetime.client import Client, Conflict, Count, NotFound, NotPending, Timer
from duetime.commands import output, tables
from duetime.commands.advice import advice
from duetime.commands.profiles import ALL_NAMESPACES
from duetime.commands.session import UsageError, complain, confirm, note
from duetime.commands.timers import check_namespace, filters, missing, named

STEP = 500
UNCOUNTED_MAX = 100_000
"""How many timers one command changes at most if their exact number is not known."""


def cancel(client: Client, options: argparse.Namespace) -> int:
    if options.timers:
        return _each(options, lambda namespace, id: client.cancel(id, namespace=namespace))
    if not _filtered(options):
        raise UsageError(
            "give timer ids or filters: --namespace, --id, --correlation-id, --after, --before (--namespace '*' is all)"
        )
    selected = filters(options)
    found = client.count(**selected, status="pending")
    if not found.timers:
        check_namespace(client, options)
    if not any(selected.values()):
        selected["namespace"] = ALL_NAMESPACES
    return _in_steps(
        options, "cancel", "canceled", "pending", found, lambda limit: client.cancel_all(**selected, limit=limit)
    )


def replay(client: Client, options: argparse.Namespace) -> int:
    if options.timers:
        return _each(options, lambda namespace, id: client.replay(id, namespace=namespace))
    if options.status is None:
        raise UsageError("give timer ids, or --status with other filters")
    selected = filters(options)
    found = client.count(**selected, status=options.status)
    if not found.timers:
        check_namespace(client, options)
    return _in_steps(
        options,
        "replay",
        "replayed",
        options.status,
        found,
        lambda limit: client.replay_all(**selected, status=options.status, limit=limit),
    )


def delete(client: Client, options: argparse.Namespace) -> int:
    names = ["/".join(named(text, options)) for text in options.timers]
    what = names[0] if len(names) == 1 else f"{len(names)} timers ({', '.join(names)})"
    if not confirm(options, f"Delete {what} for good?"):
        return complain("nothing was deleted", 2)
    return _each(options, lambda namespace, id: client.delete(id, namespace=namespace))


def _filtered(options: argparse.Namespace) -> bool:
    chosen = (options.id, options.correlation_id, options.after, options.before)
    return options.namespace_given or any(value is not None for value in chosen)


def _each(options: argparse.Namespace, change: Callable[[str, str], Timer | None]) -> int:
    """Change every named timer, even if the change of another one was rejected."""
    if options.command != "delete" and (_filtered(options) or options.limit or getattr(options, "status", None)):
        raise UsageError("give timer ids or filters, not both")
    code = 0
    for namespace, id in [named(text, options) for text in options.timers]:
        try:
            changed = change(namespace, id)
        except NotFound as error:
            code = complain(advice(missing(error, namespace, id), options), 1)
            continue
        except (NotPending, Conflict) as error:
            code = complain(f"{namespace}/{id}: {advice(error, options)}", 1)
            continue
        if options.json:
            output.print_json_line(changed or {"deleted": {"namespace": namespace, "id": id}})
        else:
            print(tables.one_line(changed) if changed else f"{output.safe(f'{namespace}/{id}')}  deleted", flush=True)
    return code


def _in_steps(
    options: argparse.Namespace, verb: str, done_word: str, status: str, found: Count, step: Callable[[int], int]
) -> int:
    exact = not (found.more or found.estimated)
    most = found.timers if exact else UNCOUNTED_MAX
    if verb == "replay" and found.estimated and not found.more:
        most = max(found.timers, STEP)  # not for as long as they fail again
    most = min(most, options.limit or most)
    if exact and options.limit and options.limit < found.timers:
        number = f"{options.limit} of {found.timers}"
    else:
        number = output.counted(found)
        if not exact and options.limit:
            number = f"up to {options.limit} of {number}"
    noun = f"{status} {'timer' if found.timers == 1 and exact else 'timers'}"
    if most and not confirm(options, f"{verb.capitalize()} {number} {noun} {_where(options)}?"):
        return complain(f"nothing was {done_word}", 2)
    done = 0
    showing = sys.stderr.isatty() and not options.json
    try:
        while done < most:
            changed = step(min(STEP, most - done))
            if not changed:
                break
            done += changed
            if showing:
                print(f"\r\x1b[K{done_word} {done} of {number}", end="", file=sys.stderr, flush=True)
    except BaseException:
        if showing:
            print(file=sys.stderr)
        note(f"stopped: {output.plural(done, 'timer')} {done_word} so far")
        raise
    if showing:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if options.json:
        output.print_json({done_word: done})
    else:
        print(f"{output.plural(done, 'timer')} {done_word}")
    return 0


def _where(options: argparse.Namespace) -> str:
    """The filters in words, for the question."""
    words = [f"in namespace {options.namespace}" if options.namespace else "in all namespaces"]
    if options.id is not None:
        words.append(f"with id {options.id}")
    if options.correlation_id is not None:
        words.append(f"with correlation id {options.correlation_id}")
    if options.after is not None:
        words.append(f"scheduled at or after {options.after}")
    if options.before is not None:
        words.append(f"scheduled before {options.before}")
    return " ".join(words)
