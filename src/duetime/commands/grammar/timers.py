"""The commands for timers."""

from __future__ import annotations

from duetime.commands.grammar.parser import (
    Commands,
    Parser,
    add_command,
    ahead,
    any_time,
    count,
    count_or_none,
    duration,
    factor,
    header,
    json_value,
    statuses,
)

STATUSES = ("pending", "executing", "completed", "failed", "canceled")
FINAL = ("failed", "completed", "canceled")

_NAMED = "ID, or NAMESPACE/ID; without a namespace the profile's, or 'default'"


def add_timer_commands(commands: Commands) -> None:
    create = add_command(
        commands,
        "create",
        "timers:create",
        "create a timer",
        """\
Create a timer: when it fires, which URL it calls, and with which payload.
When the command returns, the timer is on disk.""",
        """\
  duetime create --in 10m --url http://localhost:8080/hook --payload '{"order": 7}' --id order-7
  duetime create --at 'tomorrow 9am' --url http://localhost:8080/hook --retries 5 --give-up-on 400,404""",
        url=False,
    )
    _add_timer_options(create, new=True)

    get = add_command(
        commands, "get", "timers:get", "show a timer", examples="  duetime get order-7\n  duetime get shop/cart-1"
    )
    get.add_argument("timer", help=_NAMED)

    listing = add_command(
        commands,
        "list",
        "timers:list_timers",
        "list timers",
        """\
List timers, newest first. Pending timers and those of a time range are listed soonest first, finished timers latest
finished first. With a correlation id it is always newest first. A narrow terminal shows fewer columns and cuts long
texts, but no id; --json or a wider terminal shows all. With --json each line is one timer.""",
        "  duetime list --status failed --after yesterday\n  duetime list --namespace shop --all --json > timers.jsonl",
    )
    _add_filters(listing)
    _add_status(listing, STATUSES)
    many = listing.add_mutually_exclusive_group()
    many.add_argument("--limit", type=count, default=20, metavar="N", help="list at most N timers [20]")
    many.add_argument("--all", action="store_true", help="list all timers")

    counting = add_command(
        commands,
        "count",
        "timers:count",
        "count timers",
        """\
Count timers; the filters are those of list. With a correlation id, an id or times the count stops at 10,000, shown as
10000+. A ~ marks an estimate: the service's database keeps no exact number.""",
        "  duetime count --status failed\n  duetime count --namespace shop --before tomorrow",
    )
    _add_filters(counting)
    _add_status(counting, STATUSES)

    update = add_command(
        commands,
        "update",
        "timers:update",
        "change a pending timer",
        "Change a timer that is still pending. Omitted options keep their values.",
        "  duetime update order-7 --in 1h\n  duetime update shop/cart-1 --at 'tomorrow 9:00' --payload null",
        url=False,
    )
    update.add_argument("timer", help=_NAMED)
    _add_timer_options(update, new=False)

    cancel = add_command(
        commands,
        "cancel",
        "cancel_delete_replay:cancel",
        "cancel pending timers; they stay stored",
        """\
Cancel pending timers, by id or by filter. A canceled timer does not fire; it stays stored, so that `duetime get` shows
it and `duetime replay` can fire it. With filters, it shows how many timers match and asks for confirmation.""",
        "  duetime cancel order-7 shop/cart-1\n  duetime cancel --namespace shop --correlation-id customer-5 --yes",
    )
    cancel.add_argument("timers", nargs="*", metavar="timer", help=_NAMED)
    _add_filters(cancel)
    _add_bulk(cancel)

    delete = add_command(
        commands,
        "delete",
        "cancel_delete_replay:delete",
        "delete timers with their history",
        """\
Delete timers for good. A deleted timer does not fire and nothing of it is kept; use cancel to keep it. A timer that is
executing can't be deleted. It asks for confirmation.""",
        "  duetime delete order-7\n  duetime delete order-7 shop/cart-1 --yes",
    )
    delete.add_argument("timers", nargs="+", metavar="timer", help=_NAMED)
    _add_yes(delete)

    replay = add_command(
        commands,
        "replay",
        "cancel_delete_replay:replay",
        "fire finished timers once more",
        """\
Fire finished timers once more, now: those with the given ids, or all with a --status that match the filters. With
filters, it shows how many timers match and asks for confirmation.""",
        "  duetime replay shop/cart-1\n  duetime replay --status failed --namespace shop --limit 10 --yes",
    )
    replay.add_argument("timers", nargs="*", metavar="timer", help=_NAMED)
    _add_filters(replay)
    _add_status(replay, FINAL)
    _add_bulk(replay)

    attempts = add_command(
        commands,
        "attempts",
        "timers:attempts",
        "show the latest attempts of a timer",
        """\
Show the latest ten attempts of a timer, oldest first. A narrow terminal shows fewer columns and cuts long texts; --json
or a wider terminal shows all.""",
        "  duetime attempts shop/cart-1",
    )
    attempts.add_argument("timer", help=_NAMED)

    watch = add_command(
        commands,
        "watch",
        "watch:watch",
        "follow a timer, or show what is due next and what just finished",
        """\
Follow one timer until it is finished; the exit code is 0 if it completed and 1 if it did not. Without a timer, show
what is due next and what just finished until Ctrl-C. A narrow terminal shows fewer columns and cuts long texts, but no
id; --json or a wider terminal shows all. With --json each change is one line: the timer.""",
        "  duetime watch order-7 && echo done\n  duetime watch --namespace shop",
    )
    watch.add_argument("timer", nargs="?", help=_NAMED)
    watch.add_argument("--namespace", help="without a timer: only this namespace; '*' is all [the profile's, or all]")


def _add_filters(parser: Parser) -> None:
    group = parser.add_argument_group("filters")
    group.add_argument("--namespace", metavar="NAME", help="only this namespace; '*' is all [the profile's, or all]")
    group.add_argument("--id", metavar="ID", help="only timers with exactly this id, in any namespace")
    group.add_argument("--correlation-id", metavar="TEXT", help="only timers with this correlation id")
    group.add_argument("--after", type=any_time, metavar="TIME", help="only timers scheduled at this time or later")
    group.add_argument(
        "--before", type=any_time, metavar="TIME", help="only timers scheduled before this time: today, 2 hours ago, …"
    )


def _add_status(parser: Parser, statuses: tuple[str, ...]) -> None:
    parser.add_argument("--status", choices=statuses, help="only timers with this status")


def _add_yes(parser: Parser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add_bulk(parser: Parser) -> None:
    parser.add_argument("--limit", type=count, metavar="N", help="with filters: at most N timers [all that match]")
    _add_yes(parser)


def _add_timer_options(parser: Parser, *, new: bool) -> None:
    def with_default(help: str, default: str) -> str:
        return f"{help} [{default}]" if new else help

    when = parser.add_mutually_exclusive_group(required=new)
    when.add_argument(
        "--in", dest="delay", type=duration, metavar="DURATION", help="how long from now: 500ms, 30s, 1h30m, 7d"
    )
    when.add_argument(
        "--at",
        type=ahead,
        metavar="TIME",
        help="at a local time ('tomorrow 9am', 'next monday 8:30', noon, '2030-12-24 18:00'), in RFC 3339, or now",
    )
    target = parser.add_mutually_exclusive_group(required=new)
    target.add_argument("--url", dest="callback_url", metavar="URL", help="the URL to call")
    target.add_argument(
        "--subject",
        dest="callback_subject",
        metavar="SUBJECT",
        help="the NATS subject to publish to, in place of --url; the service needs a broker",
    )
    if new:
        parser.add_argument("--id", help="your own id: a repeated create with it creates no second timer")
        parser.add_argument("--namespace", metavar="NAME", help="the timer's namespace [the profile's, or default]")
        parser.add_argument("--replace", action="store_true", help="replace the timer that has this id")
    parser.add_argument(
        "--payload", type=json_value, metavar="JSON", help="the payload of the callback; @FILE reads a file, - stdin"
    )
    parser.add_argument("--metadata", type=json_value, metavar="JSON", help="stored with the timer, never sent")
    parser.add_argument(
        "--method", choices=("POST", "PUT", "PATCH"), help=with_default("the method of the callback", "POST")
    )
    parser.add_argument(
        "--header",
        dest="headers",
        action="append",
        type=header,
        metavar="'NAME: VALUE'",
        help="a header of the callback; repeatable",
    )
    parser.add_argument("--correlation-id", metavar="TEXT", help="a text shared by timers that belong together")
    parser.add_argument(
        "--retries", type=count_or_none, metavar="N", help=with_default("how often a failed attempt is retried", "3")
    )
    parser.add_argument(
        "--retry-initial-interval",
        type=duration,
        metavar="DURATION",
        help=with_default("the wait before the first retry", "30s"),
    )
    parser.add_argument(
        "--retry-max-interval", type=duration, metavar="DURATION", help=with_default("the longest wait", "10m")
    )
    parser.add_argument(
        "--retry-backoff",
        type=factor,
        metavar="FACTOR",
        help=with_default("the factor from each wait to the next", "2"),
    )
    parser.add_argument(
        "--give-up-on",
        type=statuses,
        metavar="STATUSES",
        help=with_default("HTTP statuses that fail the timer at once, like 400,404, or none", "none"),
    )
    parser.add_argument(
        "--timeout", type=duration, metavar="DURATION", help=with_default("the timeout of an attempt", "30s")
    )
    parser.add_argument(
        "--protocol",
        choices=("answer", "status"),
        help=with_default(
            'which response completes the timer; answer: any 2xx with an empty body, or 200 with {"ok": true}; '
            "status: any 2xx",
            "answer",
        ),
    )
