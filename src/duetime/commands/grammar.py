"""What can be typed after ``duetime``, as argparse knows it, with help that teaches by example.

A command's ``handler`` is the name of the function that does it, which is looked up once it is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

STATUSES = ("pending", "executing", "completed", "failed", "canceled")
FINAL = ("failed", "completed", "canceled")

_NAMED = "ID, or namespace/ID when it is not in the namespace 'default'"


class Parser(argparse.ArgumentParser):
    """Complains in one line, and takes no abbreviations, which would change their meaning with a new option."""

    def __init__(self, *, late_epilog: Callable[[], str] | None = None, **options: Any) -> None:
        """``late_epilog`` is the epilog, when it costs something to make."""
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._late_epilog = late_epilog

    def format_help(self) -> str:
        if self._late_epilog is not None:
            self.epilog = self._late_epilog()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        print(f"duetime: {message} (usage: {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


Commands = Any  # argparse keeps the type of what add_subparsers returns to itself


def add_server_options(parser: Parser, *, url: bool = True, default: Any = None) -> None:
    """Where the server is and how to print: taken before the command and after it."""
    names = ["--server", "--url"] if url else ["--server"]
    group = parser.add_argument_group("server and output")
    group.add_argument(
        *names, dest="server", metavar="URL", default=default, help="the server [TIMER_URL, or http://localhost:3000]"
    )
    group.add_argument("--key", default=default, help="the API key [API_KEY, or what ./duetime.key holds]")
    flag = default if default is argparse.SUPPRESS else False
    group.add_argument("--json", action="store_true", default=flag, help="print one JSON document, for machines")


def add_commands(commands: Commands) -> None:
    def add(name: str, handler: str, help: str, description: str, examples: str = "", *, url: bool = True) -> Parser:
        parser: Parser = commands.add_parser(
            name, help=help, description=description, epilog=f"examples:\n{examples}" if examples else None
        )
        parser.set_defaults(handler=handler)
        add_server_options(parser, url=url, default=argparse.SUPPRESS)
        return parser

    create = add(
        "create",
        "timers:create",
        "make a timer",
        "Make a timer: when, where to, and what with. It is on disk when this returns.",
        """\
  duetime create --in 10m --url https://example.com/hook --payload '{"order": 7}'
  duetime create --at 2030-01-31T09:00:00Z --url https://example.com/hook --id new-year
  duetime create --in 1d --url https://example.com/hook --payload @order.json --retries 5 --timeout 10s
  duetime --server https://timers.example.com create --in 30s --url https://example.com/hook""",
        url=False,
    )
    _add_timer_options(create, new=True)

    get = add(
        "get", "timers:get", "look at a timer", "Look at a timer.", "  duetime get new-year\n  duetime get shop/7"
    )
    get.add_argument("timer", help=_NAMED)

    listing = add(
        "list",
        "timers:list_timers",
        "list timers",
        """\
List timers, newest first; pending ones and those between two times soonest first, finished ones latest finished first.
With a correlation id it is always newest first.""",
        """\
  duetime list --status failed
  duetime list --status pending --before 2030-01-01T00:00:00Z --namespace shop
  duetime list --all --json > timers.json""",
    )
    listing.add_argument("--namespace", help="only of this namespace")
    listing.add_argument("--status", choices=STATUSES, help="only with this status")
    listing.add_argument("--correlation-id", metavar="TEXT", help="only with this correlation id")
    listing.add_argument("--after", metavar="TIME", help="only those due at this time or later, soonest first")
    listing.add_argument("--before", metavar="TIME", help="only those due before this time, soonest first")
    many = listing.add_mutually_exclusive_group()
    many.add_argument("--limit", type=_count, default=20, metavar="N", help="how many at most [20]")
    many.add_argument("--all", action="store_true", help="all that there are")

    update = add(
        "update",
        "timers:update",
        "change a pending timer",
        "Change a timer that is still pending. What is not given stays.",
        "  duetime update new-year --in 1h\n  duetime update shop/7 --url https://example.com/other --payload null",
        url=False,
    )
    update.add_argument("timer", help=_NAMED)
    _add_timer_options(update, new=False)

    cancel = add(
        "cancel",
        "timers:cancel",
        "remove a timer, so that it does not fire",
        """\
Remove a timer, through DELETE /api/v1/timers/{namespace}/{id}. One that was removed does not fire, and nothing of it
is left to look at. One that is executing can't be removed; a finished one is removed from the history.""",
        "  duetime cancel new-year\n  duetime cancel shop/7 shop/8",
    )
    cancel.add_argument("timers", nargs="+", metavar="timer", help=_NAMED)

    replay = add(
        "replay",
        "timers:replay",
        "fire finished timers once more",
        "Fire a finished timer once more, now; or, with --status, all those with a status.",
        "  duetime replay shop/7\n  duetime replay --status failed --namespace shop --yes",
    )
    replay.add_argument("timer", nargs="?", help=_NAMED)
    replay.add_argument("--status", choices=FINAL, help="all with this status, latest finished first")
    replay.add_argument("--namespace", help="with --status: only of this namespace")
    replay.add_argument("--correlation-id", metavar="TEXT", help="with --status: only with this correlation id")
    replay.add_argument("--limit", type=_count, default=100, metavar="N", help="with --status: how many at most [100]")
    replay.add_argument("--yes", action="store_true", help="do not ask")

    attempts = add(
        "attempts",
        "timers:attempts",
        "what became of the attempts of a timer",
        "The latest ten attempts of a timer.",
        "  duetime attempts shop/7",
    )
    attempts.add_argument("timer", help=_NAMED)

    watch = add(
        "watch",
        "watch:watch",
        "follow a timer, or what is due and done",
        """\
Follow one timer until it is finished, or, without a timer, what is due next and what was just finished, until Ctrl-C.
With a timer the exit code is 0 when it was completed and 1 when it was not. With --json one document is printed: the
timer once it is finished, or, without a timer, how things stand now.""",
        "  duetime watch\n  duetime watch new-year && echo done",
    )
    watch.add_argument("timer", nargs="?", help=_NAMED)
    watch.add_argument("--namespace", help="without a timer: only of this namespace")

    _add_namespaces(commands)
    add(
        "doctor",
        "",
        "check the settings, the store, the clock and the broker",
        """\
Check what a start here would need: the settings, the key, the store, the clock, the broker and whether the service
runs; and say what to do about what is wrong. A service that runs is asked why timers are overdue. It changes nothing.
The exit code is 1 when something is wrong.""",
        "  duetime doctor\n  DATABASE_URL=postgresql://me@db.example/timers duetime doctor",
    )
    add(
        "cluster",
        "cluster:show",
        "who takes part, and who owns which shard",
        "The instances that share the store: what each owns, its version, and how far its clock is off the store's.",
        "  duetime cluster",
    )


def _add_timer_options(parser: Parser, *, new: bool) -> None:
    when = parser.add_mutually_exclusive_group(required=new)
    when.add_argument("--in", dest="delay", metavar="DURATION", help="so long from now: 500ms, 30s, 10m, 1h30m, 7d")
    when.add_argument("--at", metavar="TIME", help="at this time, with its offset: 2030-01-31T09:00:00Z")
    parser.add_argument("--url", dest="callback_url", metavar="URL", required=new, help="where the callback goes")
    if new:
        parser.add_argument("--id", help="an id of your own; the same create again then makes no second timer")
        parser.add_argument("--namespace", help="the namespace it belongs to [default]")
        parser.add_argument("--replace", action="store_true", help="in the place of the timer that has the id")
    parser.add_argument("--payload", type=_json, metavar="JSON", help="what it carries; @FILE reads it, - is stdin")
    parser.add_argument("--metadata", type=_json, metavar="JSON", help="what is kept with it and not sent")
    parser.add_argument("--method", choices=("POST", "PUT", "PATCH"), help="of the callback [POST]")
    parser.add_argument(
        "--header", dest="headers", action="append", type=_header, metavar="'NAME: VALUE'", help="may be given again"
    )
    parser.add_argument("--correlation-id", metavar="TEXT", help="what belongs together, to list it by")
    parser.add_argument(
        "--retries", type=_count_or_none, metavar="N", help="how often a failed attempt is repeated [3]"
    )
    parser.add_argument("--timeout", metavar="DURATION", help="how long an attempt may take [30s]")
    parser.add_argument(
        "--protocol",
        choices=("answer", "status"),
        help='what completes it: 200 with {"ok": true}, or any 2xx [answer]',
    )


def _add_namespaces(commands: Commands) -> None:
    examples = """\
examples:
  duetime namespaces
  duetime namespaces create shop --retention 90d
  duetime namespaces update shop --weight 3
  duetime namespaces pause shop
  duetime namespaces secret add shop"""
    top: Parser = commands.add_parser(
        "namespaces",
        help="list, make, change, pause and resume namespaces; make signing secrets",
        description="List the namespaces, or do one of these:",
        epilog=examples,
    )
    top.set_defaults(handler="namespaces:list_namespaces")
    add_server_options(top, default=argparse.SUPPRESS)
    inner = top.add_subparsers(metavar="what", title="what")

    def add(within: Commands, name: str, handler: str, help: str) -> Parser:
        parser: Parser = within.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        parser.set_defaults(handler=f"namespaces:{handler}")
        add_server_options(parser, default=argparse.SUPPRESS)
        return parser

    add(inner, "list", "list_namespaces", "list the namespaces")
    create = add(inner, "create", "create", "make a namespace")
    create.add_argument("name")
    create.add_argument("--shards", type=_count, metavar="N", help="how many shards to spread over; fixed [all]")
    update = add(inner, "update", "update", "change a namespace; what is not given stays")
    update.add_argument("name")
    for parser in (create, update):
        parser.add_argument("--retention", metavar="DURATION", help="how long finished timers are kept: 30d, forever")
    share = "its share when more is due than can be delivered: 1 to 100"
    create.add_argument("--weight", type=_count, metavar="N", help=f"{share} [1]")
    update.add_argument("--weight", type=_count, metavar="N", help=share)
    add(inner, "show", "show", "look at a namespace").add_argument("name")
    add(inner, "pause", "pause", "let nothing of a namespace fire; creates are still taken").add_argument("name")
    add(inner, "resume", "resume", "let a namespace fire again").add_argument("name")
    secret = inner.add_parser("secret", help="make and delete signing secrets", description="Signing secrets.")
    secrets = secret.add_subparsers(metavar="what", title="what", required=True)
    text = "make a signing secret, shown this once; the one before it signs too for 24 hours"
    add(secrets, "add", "add_secret", text).add_argument("name", help="of the namespace")
    delete = add(secrets, "delete", "delete_secret", "stop signing with a secret")
    delete.add_argument("name", help="of the namespace")
    delete.add_argument("id", help="of the secret, as 'namespaces show' lists it")


# --- single arguments ----------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError("must be a whole number from 1 on")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError("must be 'NAME: VALUE'")
    return name.strip(), value.strip()


def _json(text: str) -> Any:
    """The value's own bytes, once it is known that they are JSON."""
    import msgspec

    try:
        if text == "-":
            given = sys.stdin.buffer.read()
        elif text.startswith("@"):
            with open(text[1:], "rb") as file:
                given = file.read()
        else:
            given = text.encode()
        msgspec.json.decode(given)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't read {text[1:]}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeError):
        raise argparse.ArgumentTypeError(
            """is not JSON: write '{"a": 1}' in single quotes, and a text as '"text"'"""
        ) from None
    return msgspec.Raw(given.strip())
