"""One parser per kind of setting: turns text into a value, or raises a ``Refusal`` that names what is accepted."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import quote, unquote, urlsplit

from duetime.databases import DATABASES, Database, database_of, each_host
from duetime.errors import InvalidInput
from duetime.model import SECOND_MS
from duetime.timetext import DURATION_MS_MAX, format_duration, parse_duration

API_KEY_CHARS_MIN = 32
API_KEY_CHARS_MAX = 512
KIB = 1024
MIB = 1024 * KIB
SQLITE = "sqlite:///"
FORCED_AUTH = "none-forced"


class Refusal(ValueError):
    """The text is not a valid value; the message says what the setting accepts."""


_STORES_TO_COME = ("mongodb", "dynamodb")
_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "critical": "critical",
    "off": "critical",
}
_SIZE = re.compile(r"([0-9]{1,12}) ?(KiB|MiB)?").fullmatch
_SUBJECT = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,15}").fullmatch
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?").fullmatch
_HEADER_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?").fullmatch
is_key = re.compile(rf"[!-~]{{{API_KEY_CHARS_MIN},{API_KEY_CHARS_MAX}}}").fullmatch


_ACCEPTED = ", ".join(["sqlite:///path", *(database.example for database in DATABASES)])


def database_url(text: str) -> str:
    scheme = text.partition(":")[0].partition("+")[0].lower()
    if scheme in _STORES_TO_COME:
        raise Refusal(f"{scheme} is not supported yet; use {_ACCEPTED}")
    if (database := database_of(text)) is not None:
        return _server_url(text, database)
    if text in ("memory:", "memory://"):
        return "memory:"
    path = text.removeprefix(SQLITE)
    if path == text or not _is_file_path(unquote(path)) or "?" in path or "#" in path:
        raise Refusal(f"must be {_ACCEPTED}, or memory:{_not(text)}")
    return text


def _server_url(text: str, database: Database) -> str:
    try:
        each = [urlsplit(url) for url in each_host(text)]
        named = all(parts.hostname or (database.local and "host=" in parts.query) for parts in each)
        usable = named and all(parts.port != 0 and not parts.fragment for parts in each)
    except ValueError:
        usable = False
    if not usable:
        raise Refusal(f"must name the server, like {database.example}")
    return text


def _is_file_path(path: str) -> bool:
    return bool(path) and path.isprintable() and not path.endswith("/") and path != ":memory:"


def _not(url: str) -> str:
    """``, not <url>`` for an error message; empty if the URL may contain a password."""
    return "" if "@" in url or "?" in url else f", not {shown(url)}"


def database_path(text: str) -> str:
    if not _is_file_path(text):
        raise Refusal("must be the path of a file")
    return SQLITE + quote(text, safe="/")


def api_key(text: str) -> str:
    if not is_key(text):
        raise Refusal(
            f"must be {API_KEY_CHARS_MIN} to {API_KEY_CHARS_MAX} visible ASCII characters, but has {len(text)}"
            if text.isascii() and text.isprintable() and " " not in text
            else "must be visible ASCII characters only"
        )
    return text


def host(text: str) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        # A text that ends in a number is a mistyped address, never a name.
        if not _HOST_NAME(text) or text.rpartition(".")[2].isdigit():
            raise Refusal("must be an IP address or a host name to listen on") from None
        return text.lower()


def hosts(text: str) -> tuple[str, ...]:
    """Host names as in a Host header, without ports."""
    found = []
    for part in re.split(r"[,\s]+", text.strip(", ").lower()):
        bare = part[1:-1] if part.startswith("[") and part.endswith("]") else part
        try:
            found.append(str(ipaddress.ip_address(bare)))
        except ValueError:
            if part != "*" and not _HEADER_HOST(part):
                raise Refusal("must be host names without ports, separated by commas, or *") from None
            found.append(part.removesuffix("."))
    return tuple(found)


def log_level(text: str) -> str:
    level = _LEVELS.get(text.lower())
    if level is None:
        raise Refusal("must be trace, debug, info, warn, error or off")
    return level


def rust_log(text: str) -> str:
    """The default level; ignores levels of single modules (``tower=debug``), which name another program's modules."""
    plain = [part.strip() for part in text.split(",") if "=" not in part]
    return log_level(plain[-1]) if plain else "info"


def broker_url(text: str) -> str:
    try:
        servers = [urlsplit(server.strip()) for server in text.split(",")]
        usable = all(s.scheme in ("nats", "tls", "ws", "wss") and s.hostname and s.port != 0 for s in servers)
    except ValueError:
        usable = False
    if not usable:
        raise Refusal(f"must be a URL like nats://localhost:4222, or several separated by commas{_not(text)}")
    return text


def subject(text: str) -> str:
    if not _SUBJECT(text):
        raise Refusal("must be a NATS subject like timer.events.due")
    return text


def stream(text: str) -> str:
    if not _STREAM(text):
        raise Refusal("must be a stream name of letters, digits, _ and -")
    return text


def number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise Refusal(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def duration(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        accepted = (
            f"must be a duration from {format_duration(low)} to {format_duration(high)}, like 500ms, 30s or 1h30m"
        )
        try:
            ms = parse_duration(text, "")
        except InvalidInput:
            raise Refusal(accepted) from None
        if not low <= ms <= high:
            raise Refusal(accepted)
        return ms

    return parse


def retention(text: str) -> int | None:
    if text == "forever":
        return None
    try:
        return duration(SECOND_MS, DURATION_MS_MAX)(text)
    except Refusal:
        raise Refusal("must be a duration of at least 1s, like 12h or 30d, or forever") from None


def size(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = _SIZE(text)
        size = int(match[1]) * {"KiB": KIB, "MiB": MIB}.get(match[2], 1) if match else -1
        if not low <= size <= high:
            raise Refusal(f"must be a number of bytes from {low // KIB}KiB to {high // MIB}MiB, like 262144 or 256KiB")
        return size

    return parse


def switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise Refusal("must be on or off")
    return _SWITCH[text.lower()]


def auto_switch(text: str) -> bool | None:
    if text.lower() == "auto":
        return None
    try:
        return switch(text)
    except Refusal:
        raise Refusal("must be on, off or auto") from None


def private_targets(text: str) -> bool | tuple[str, ...]:
    if text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    try:
        return tuple(str(ipaddress.ip_network(part)) for part in re.split(r"[,\s]+", text.strip(", ")))
    except ValueError:
        raise Refusal("must be on, off or a list of CIDRs, like 10.0.0.0/8,192.168.1.0/24") from None


def choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise Refusal(f"must be {' or '.join(words)}")
        return text

    return parse


def auth(text: str) -> str:
    """Returns ``none-forced`` unchanged: ``load`` handles it once the host is known."""
    if text not in ("key", "none", FORCED_AUTH):
        raise Refusal(f"must be key, none (loopback HOST only) or {FORCED_AUTH}")
    return text


def shown(text: str) -> str:
    """The given text for an error message: printable and at most 80 characters."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= 80 else text[:79] + "…"
