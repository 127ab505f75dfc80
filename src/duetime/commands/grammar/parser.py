"""The argument parser of ``duetime``, the options that every command takes, and the types of single arguments."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from duetime.commands.times import When

Commands = Any  # argparse keeps the type that add_subparsers returns to itself

_OTHER_NAMES = {"--delay": "--in", "--body": "--payload", "server": "serve", "ls": "list", "rm": "delete"}
"""Names that people try, which resemble none."""
_NEGATIVE = re.compile(r"-[0-9]").match


class Parser(argparse.ArgumentParser):
    """Reports errors on one line. Takes no abbreviations: their meaning would change with each new option."""

    def __init__(self, *, late_epilog: Callable[[], str] | None = None, **options: Any) -> None:
        """``late_epilog`` returns an epilog that is expensive to build."""
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._late_epilog = late_epilog

    def format_help(self) -> str:
        if self._late_epilog is not None:
            self.epilog = self._late_epilog()
        return super().format_help()

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Rejects an unknown option first: otherwise argparse asks for the required one that it was meant to be."""
        given = self._with_negative_values(sys.argv[1:] if args is None else args)
        if not any(_commands(self)):  # whose options are its own
            self._check_options(given)
        parsed, rest = super().parse_known_args(given, namespace)
        if rest:
            self._check_options(rest)
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest

    def _with_negative_values(self, given: Iterable[str]) -> list[str]:
        """``--in -5s`` as ``--in=-5s``: otherwise argparse takes -5s for an option."""
        known = self._option_string_actions
        joined: list[str] = []
        for text in given:
            if joined and joined[-1] in known and known[joined[-1]].nargs != 0 and _NEGATIVE(text):
                joined[-1] += f"={text}"
            else:
                joined.append(text)
        return joined

    def _check_options(self, given: Iterable[str]) -> None:
        known = self._option_string_actions
        for text in given:
            if text == "--":
                return
            name = text.partition("=")[0]
            taken = name in known or text == "-" or " " in text or self._negative_number_matcher.match(text)
            if text[:1] == "-" and not taken:
                self.error(f"unknown option {name}{_guess(name, {one: one for one in known})}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = _guess(value, {parser.prog.split()[-1]: f"`{parser.prog}`" for parser in _commands(self)})
            self.error(f"unknown command {value!r}{near}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        print(f"duetime: {message} (usage: {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of its commands: inner ones first, so that an outer one of the same name wins."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _commands(inner)
            yield from action.choices.values()


def _guess(typed: str, known: dict[str, str]) -> str:
    """The known name that is probably meant: one with the same ending, or a similar one."""
    from difflib import get_close_matches

    ends = [name for name in known if typed.endswith(name.replace("--", "-"))]
    for name in (_OTHER_NAMES.get(typed, ""), *ends, *get_close_matches(typed, known, 1)):
        if name in known:
            return f"; did you mean {known[name]}?"
    return ""


def add_command(
    commands: Commands,
    name: str,
    handler: str,
    help: str,
    description: str = "",
    examples: str = "",
    *,
    url: bool = True,
    offline: bool = False,
) -> Parser:
    """Add a command. ``handler`` is ``module:function`` within ``duetime.commands``, imported when the command runs;
    an ``offline`` handler takes no client."""
    parser: Parser = commands.add_parser(
        name,
        help=help,
        description=description or help[0].upper() + help[1:] + ".",
        epilog=f"examples:\n{examples}" if examples else None,
    )
    parser.set_defaults(handler=handler, offline=offline)
    add_server_options(parser, url=url, default=argparse.SUPPRESS)
    return parser


def add_server_options(parser: Parser, *, url: bool = True, default: Any = None) -> None:
    """Which service, and how to print: taken before the command and after it."""
    names = ["--server", "--url"] if url else ["--server"]
    group = parser.add_argument_group("service and output")
    group.add_argument(
        *names,
        dest="server",
        metavar="URL",
        default=default,
        help="the address of the service [TIMER_URL, the profile's, or http://localhost:3000]",
    )
    group.add_argument("--key", default=default, help="the API key [API_KEY, the profile's, or the file duetime.key]")
    group.add_argument(
        "--profile", default=default, metavar="NAME", help="a profile of the configuration file [DUETIME_PROFILE]"
    )
    flag = default if default is argparse.SUPPRESS else False
    group.add_argument(
        "--json", action="store_true", default=flag, help="print JSON; list and watch print one timer per line"
    )


# --- types of single arguments -------------------------------------------------------------------------------------


def count(text: str) -> int:
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}")
    return int(text)


def factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError("must be a number, at least 1")
    return number


def statuses(text: str) -> list[int]:
    parts = [] if text == "none" else [part.strip() for part in text.split(",")]
    if not all(len(part) == 3 and part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError("must be HTTP statuses like 400,404, or none")
    return list(map(int, parts))


def header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError("must be 'NAME: VALUE'")
    return name.strip(), value.strip()


def duration(text: str) -> str:
    from duetime.commands import times

    try:
        return times.duration(text)
    except times.NotUnderstood as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def ahead(text: str) -> When:
    return _time(text, past=False)


def any_time(text: str) -> When:
    return _time(text, past=True)


def _time(text: str, *, past: bool) -> When:
    from datetime import UTC, datetime

    from duetime.clock import SystemClock
    from duetime.commands import times

    now = datetime.fromtimestamp(SystemClock().now() / 1000, UTC)
    try:
        return times.any_time(text, now) if past else times.ahead(text, now)
    except times.NotUnderstood as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_value(text: str) -> Any:
    """The value's own bytes, checked to be JSON."""
    import msgspec

    source = "stdin" if text == "-" else text[1:] if text.startswith("@") else None
    try:
        if source is None:
            given = text.encode()
        elif text == "-":
            given = sys.stdin.buffer.read()
        else:
            with open(source, "rb") as file:
                given = file.read()
        msgspec.json.decode(given)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't read {source}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeError):
        raise argparse.ArgumentTypeError(
            f"{source} is not valid JSON"
            if source is not None
            else """is not valid JSON: put JSON in single quotes, like '{"a": 1}' or '"text"'"""
        ) from None
    return msgspec.Raw(given.strip())
