"""Every setting of a Duetime process: where it comes from, what it may be, what it means.

Owns the one table ``SETTINGS``, from which values are parsed and the documentation is tested. A name or value that is
not in it stops the start with a ``SettingsError`` of one line that names the setting, what was given and what is
accepted; values that carry credentials are never repeated in a message or in ``repr``.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
from msgspec import Struct

from duetime.errors import InvalidInput, SettingsError
from duetime.model import DAY_MS, MINUTE_MS, SECOND_MS
from duetime.timetext import DURATION_MS_MAX, format_duration, parse_duration

API_KEY_CHARS_MIN = 32
API_KEY_CHARS_MAX = 512
KEY_FILE = "duetime.key"
ENV_FILE = ".env"
TOML_FILE = "duetime.toml"

_OURS = "DUETIME_"
_KIB = 1024
_MIB = 1024 * _KIB


class Settings(Struct, frozen=True, kw_only=True):
    """What ``load`` made of the three sources. Durations are milliseconds."""

    database_url: str = "sqlite:///./duetime.db"
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 3000
    log_level: str = "info"  # a level of the standard library's logging, in lower case
    timer_polling_interval_ms: int = SECOND_MS
    timer_batch_size: int = 500
    timer_broker_url: str | None = None
    shards: int = 64
    lease_ttl_ms: int = 10 * SECOND_MS
    retention_ms: int | None = 30 * DAY_MS  # None: forever
    auto_namespaces: bool = False
    workers: int = 1
    allow_private_targets: bool | tuple[str, ...] | None = None  # a tuple of CIDRs; None: nobody said
    auth: str = "key"  # or "none"
    metrics_auth: str = "key"  # or "none"
    max_in_flight: int = 4096
    max_per_destination: int = 256
    max_request_bytes: int = 256 * _KIB
    max_batch_bytes: int = 16 * _MIB
    takeover: str = "deadline"  # or "now"
    drain_timeout_ms: int = 25 * SECOND_MS

    @property
    def database_path(self) -> Path | None:
        """The file of an sqlite store, relative to the working directory as it was written; None for memory."""
        if not self.database_url.startswith(_SQLITE):
            return None
        return Path(unquote(self.database_url.removeprefix(_SQLITE)))

    def __repr__(self) -> str:
        shown = (
            f"{field}={'…' if field in _SECRET_FIELDS and value else repr(value)}"
            for field, value in msgspec.structs.asdict(self).items()
        )
        return f"Settings({', '.join(shown)})"


class _Refusal(ValueError):
    """What a setting accepts, raised for a text that is not it."""


# --- one parser per kind of value ----------------------------------------------------------------------------------

_SQLITE = "sqlite:///"
_STORES_TO_COME = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mongodb": "mongodb",
    "cassandra": "cassandra",
    "dynamodb": "dynamodb",
}
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
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?").fullmatch
_KEY = re.compile(rf"[!-~]{{{API_KEY_CHARS_MIN},{API_KEY_CHARS_MAX}}}").fullmatch


def _database_url(text: str) -> str:
    scheme = text.partition(":")[0].partition("+")[0].lower()
    if scheme in _STORES_TO_COME:
        raise _Refusal(f"{_STORES_TO_COME[scheme]} is not supported yet; use sqlite:///path")
    if text in ("memory:", "memory://"):
        return "memory:"
    path = text.removeprefix(_SQLITE)
    if path == text or not _is_file_path(unquote(path)) or "?" in path or "#" in path:
        raise _Refusal(f"must be sqlite:///path (sqlite:////path for an absolute one) or memory:{_not(text)}")
    return text


def _is_file_path(path: str) -> bool:
    return bool(path) and path.isprintable() and not path.endswith("/") and path != ":memory:"


def _not(url: str) -> str:
    """What was given in place of a URL, unless it may hold a password."""
    return "" if "@" in url or "?" in url else f", not {_shown(url)}"


def _database_path(text: str) -> str:
    if not _is_file_path(text):
        raise _Refusal("must be the path of a file")
    return _SQLITE + quote(text, safe="/")


def _api_key(text: str) -> str:
    if not _KEY(text):
        raise _Refusal(
            f"must be {API_KEY_CHARS_MIN} to {API_KEY_CHARS_MAX} visible ASCII characters, and {len(text)} were given"
            if text.isascii() and text.isprintable() and " " not in text
            else "must be visible ASCII characters only"
        )
    return text


def _host(text: str) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        # What ends in a number is an address that was mistyped, never a name.
        if not _HOST_NAME(text) or text.rpartition(".")[2].isdigit():
            raise _Refusal("must be an IP address or a host name to listen on") from None
        return text.lower()


def _log_level(text: str) -> str:
    level = _LEVELS.get(text.lower())
    if level is None:
        raise _Refusal("must be trace, debug, info, warn, error or off")
    return level


def _rust_log(text: str) -> str:
    """The level for everything; levels of single modules (``tower=debug``) are not about us."""
    plain = [part.strip() for part in text.split(",") if "=" not in part]
    return _log_level(plain[-1]) if plain else "info"


def _broker_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("nats", "tls", "ws", "wss") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise _Refusal(f"must be a URL like nats://localhost:4222{_not(text)}")
    return text


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
            raise _Refusal(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _duration(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        accepted = (
            f"must be a duration from {format_duration(low)} to {format_duration(high)}, like 500ms, 30s or 1h30m"
        )
        try:
            ms = parse_duration(text, "")
        except InvalidInput:
            raise _Refusal(accepted) from None
        if not low <= ms <= high:
            raise _Refusal(accepted)
        return ms

    return parse


def _retention(text: str) -> int | None:
    if text == "forever":
        return None
    try:
        return _duration(SECOND_MS, DURATION_MS_MAX)(text)
    except _Refusal:
        raise _Refusal("must be a duration of at least 1s, like 12h or 30d, or forever") from None


def _size(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = _SIZE(text)
        size = int(match[1]) * {"KiB": _KIB, "MiB": _MIB}.get(match[2], 1) if match else -1
        if not low <= size <= high:
            raise _Refusal(
                f"must be a number of bytes from {low // _KIB}KiB to {high // _MIB}MiB, like 262144 or 256KiB"
            )
        return size

    return parse


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise _Refusal("must be on or off")
    return _SWITCH[text.lower()]


def _private_targets(text: str) -> bool | tuple[str, ...]:
    if text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    try:
        return tuple(str(ipaddress.ip_network(part)) for part in re.split(r"[,\s]+", text.strip(", ")))
    except ValueError:
        raise _Refusal("must be on, off or a list of CIDRs, like 10.0.0.0/8,192.168.1.0/24") from None


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise _Refusal(f"must be {' or '.join(words)}")
        return text

    return parse


_FORCED_AUTH = "none-forced"


def _auth(text: str) -> str:
    """``none-forced`` stays as it is until the host is known, in ``load``."""
    if text not in ("key", "none", _FORCED_AUTH):
        raise _Refusal(f"must be key, none (loopback HOST only) or {_FORCED_AUTH}")
    return text


# --- the table -----------------------------------------------------------------------------------------------------


class Setting(Struct, frozen=True, kw_only=True):
    """One row: the name outside, the field of ``Settings`` inside, and what people read about it."""

    name: str
    field: str
    default: str  # as one would write it; empty when there is none
    meaning: str
    parse: Callable[[str], Any]
    secret: bool = False


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="DATABASE_URL",
        field="database_url",
        default="sqlite:///./duetime.db",
        meaning="Where timers are kept: sqlite:///path, or memory: for trials, which forgets everything at the end.",
        parse=_database_url,
        secret=True,
    ),
    Setting(
        name="TIMER_DB_PATH",
        field="database_url",
        default="",
        meaning="The path form of DATABASE_URL: the file of the sqlite store.",
        parse=_database_path,
    ),
    Setting(
        name="API_KEY",
        field="api_key",
        default="",
        meaning="The key that clients send, at least 32 characters; without it one is made and kept in duetime.key.",
        parse=_api_key,
        secret=True,
    ),
    Setting(
        name="HOST",
        field="host",
        default="0.0.0.0 with API_KEY, else 127.0.0.1",
        meaning="The address to listen on.",
        parse=_host,
    ),
    Setting(
        name="PORT",
        field="port",
        default="3000",
        meaning="The port to listen on; 0 takes any free one.",
        parse=_number(0, 65535),
    ),
    Setting(
        name="LOG_LEVEL",
        field="log_level",
        default="info",
        meaning="The least level that is logged: trace, debug, info, warn, error or off.",
        parse=_log_level,
    ),
    Setting(
        name="RUST_LOG",
        field="log_level",
        default="",
        meaning="An older name of LOG_LEVEL; levels of single modules in it are skipped.",
        parse=_rust_log,
    ),
    Setting(
        name="TIMER_POLLING_INTERVAL",
        field="timer_polling_interval_ms",
        default="1000",
        meaning="The longest time between two looks for due timers, in milliseconds.",
        parse=_number(10, MINUTE_MS),
    ),
    Setting(
        name="TIMER_BATCH_SIZE",
        field="timer_batch_size",
        default="500",
        meaning="The most timers that one round begins.",
        parse=_number(1, 10_000),
    ),
    Setting(
        name="TIMER_BROKER_URL",
        field="timer_broker_url",
        default="",
        meaning="The NATS server of the broker door.",
        parse=_broker_url,
        secret=True,
    ),
    Setting(
        name="DUETIME_SHARDS",
        field="shards",
        default="64",
        meaning="How many shards all timers are spread over; fixed once the store was made.",
        parse=_number(1, 1024),
    ),
    Setting(
        name="DUETIME_LEASE_TTL",
        field="lease_ttl_ms",
        default="10s",
        meaning="How long an instance owns a shard without renewing it.",
        parse=_duration(SECOND_MS, 5 * MINUTE_MS),
    ),
    Setting(
        name="DUETIME_RETENTION",
        field="retention_ms",
        default="30d",
        meaning="How long finished timers are kept; forever keeps them all.",
        parse=_retention,
    ),
    Setting(
        name="DUETIME_AUTO_NAMESPACES",
        field="auto_namespaces",
        default="off",
        meaning="Whether a create in an unknown namespace makes the namespace.",
        parse=_switch,
    ),
    Setting(
        name="DUETIME_WORKERS",
        field="workers",
        default="1",
        meaning="How many processes serve; more than one needs a server store.",
        parse=_number(1, 64),
    ),
    Setting(
        name="DUETIME_ALLOW_PRIVATE_TARGETS",
        field="allow_private_targets",
        default="",
        meaning="Which addresses that are not public callbacks may go to: on, off or a list of CIDRs; "
        "unset means none, or loopback alone when there is no API_KEY.",
        parse=_private_targets,
    ),
    Setting(
        name="DUETIME_AUTH",
        field="auth",
        default="key",
        meaning="Whether clients need the key; none needs a loopback HOST, and none-forced is none on any HOST.",
        parse=_auth,
    ),
    Setting(
        name="DUETIME_METRICS_AUTH",
        field="metrics_auth",
        default="key",
        meaning="Whether /metrics needs the key: key or none.",
        parse=_choice("key", "none"),
    ),
    Setting(
        name="DUETIME_MAX_IN_FLIGHT",
        field="max_in_flight",
        default="4096",
        meaning="The most deliveries under way at one time.",
        parse=_number(1, 65536),
    ),
    Setting(
        name="DUETIME_MAX_PER_DESTINATION",
        field="max_per_destination",
        default="256",
        meaning="The most deliveries under way to one destination.",
        parse=_number(1, 65536),
    ),
    Setting(
        name="DUETIME_MAX_REQUEST_BYTES",
        field="max_request_bytes",
        default="256KiB",
        meaning="The largest request that makes or changes one timer.",
        parse=_size(_KIB, 64 * _MIB),
    ),
    Setting(
        name="DUETIME_MAX_BATCH_BYTES",
        field="max_batch_bytes",
        default="16MiB",
        meaning="The largest request that makes a batch of timers.",
        parse=_size(_KIB, 256 * _MIB),
    ),
    Setting(
        name="DUETIME_TAKEOVER",
        field="takeover",
        default="deadline",
        meaning="When the attempts of an owner that died fire again: at their deadline, or now.",
        parse=_choice("deadline", "now"),
    ),
    Setting(
        name="DUETIME_DRAIN_TIMEOUT",
        field="drain_timeout_ms",
        default="25s",
        meaning="How long a stop waits for deliveries that are under way.",
        parse=_duration(0, 10 * MINUTE_MS),
    ),
)

_BY_NAME = {setting.name: setting for setting in SETTINGS}
_SECRET_FIELDS = frozenset(setting.field for setting in SETTINGS if setting.secret)


# --- loading -------------------------------------------------------------------------------------------------------


def load(environ: Mapping[str, str], directory: Path) -> Settings:
    """The settings from the environment, then ``.env``, then ``duetime.toml`` in ``directory``; the first one counts.

    ``duetime.toml`` has the same names as keys at its top level, in upper or lower case (``port = 3000``,
    ``duetime_lease_ttl = "10s"``); numbers, true and false may be written as such, and a list of CIDRs as a list. In
    the environment and in ``.env``, which others share, only an unknown name with our prefix is an error; in
    ``duetime.toml`` every unknown name is. An empty value counts as not given. Where two names mean one setting
    (``TIMER_DB_PATH``, ``RUST_LOG``), a source's own choice stands before any later source, and within one source the
    name that comes first in ``SETTINGS`` does.
    """
    given: dict[str, Any] = {}
    sources = (
        _ours(environ, "the environment"),
        _ours(_read_env(directory / ENV_FILE), ENV_FILE),
        _read_toml(directory / TOML_FILE),
    )
    for source in sources:
        for setting in SETTINGS:
            text = source.get(setting.name, "").strip()
            if text and setting.field not in given:
                given[setting.field] = _parse(setting, text)
    given.setdefault("host", "0.0.0.0" if "api_key" in given else "127.0.0.1")
    forced = given.get("auth") == _FORCED_AUTH
    if forced:
        given["auth"] = "none"
    settings = Settings(**given)
    _judge_together(settings, auth_forced=forced)
    return settings


def _parse(setting: Setting, text: str) -> Any:
    try:
        if not text.isprintable():
            raise _Refusal("must not have characters that cannot be printed")
        return setting.parse(text)
    except _Refusal as refusal:
        raise SettingsError(f"{setting.name}{'' if setting.secret else f'={_shown(text)}'}: {refusal}") from None


def _judge_together(settings: Settings, *, auth_forced: bool) -> None:
    if settings.workers > 1:
        scheme = settings.database_url.partition(":")[0]
        raise SettingsError(
            f"DUETIME_WORKERS={settings.workers}: must be 1 with a {scheme} store, which belongs to one process"
        )
    if settings.auth == "none" and not auth_forced and not _is_loopback(settings.host):
        raise SettingsError(
            f"DUETIME_AUTH=none: needs a loopback HOST like 127.0.0.1, not {settings.host}; "
            f"DUETIME_AUTH={_FORCED_AUTH} accepts any"
        )
    if settings.max_batch_bytes < settings.max_request_bytes:
        raise SettingsError(
            f"DUETIME_MAX_BATCH_BYTES={settings.max_batch_bytes}: "
            f"must be at least DUETIME_MAX_REQUEST_BYTES ({settings.max_request_bytes})"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ours(source: Mapping[str, str], where: str) -> Mapping[str, str]:
    for name in source:
        if name.startswith(_OURS) and name not in _BY_NAME:
            raise _unknown(name, where)
    return source


def _unknown(name: str, where: str) -> SettingsError:
    # The shared prefix is left out, or it would make any two names look alike.
    stems = {known.removeprefix(_OURS): known for known in _BY_NAME}
    near = difflib.get_close_matches(name.upper().removeprefix(_OURS), stems, n=1)
    hint = f"; did you mean {stems[near[0]]}?" if near else ""
    return SettingsError(f"{_shown(name)} in {where} is not a setting{hint}")


def _shown(text: str) -> str:
    """What was given, on one line and no longer than a glance."""
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= 80 else text[:79] + "…"


_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.]*)\s*=(.*)").fullmatch
_SINGLE_QUOTED = re.compile(r"'([^']*)'\s*(?:#.*)?").fullmatch
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?').fullmatch
_COMMENT = re.compile(r"\s#.*")


def _read_env(path: Path) -> dict[str, str]:
    """``KEY=value`` lines. The last of two lines for one name counts; inside double quotes a backslash quotes."""
    values: dict[str, str] = {}
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ENV_LINE(line.rstrip())
        if match is None:
            raise SettingsError(f"{path.name} line {number}: must be KEY=value")
        values[match[1]] = _env_value(match[2], f"{path.name} line {number}")
    return values


def _env_value(text: str, where: str) -> str:
    bare = text.lstrip()
    if not bare.startswith(("'", '"')):
        return _COMMENT.sub("", text).strip()
    quoted = _SINGLE_QUOTED(bare) or _DOUBLE_QUOTED(bare)
    if quoted is None:
        raise SettingsError(f"{where}: must close its quote and end there")
    return quoted[1] if bare.startswith("'") else re.sub(r"\\(.)", r"\1", quoted[1])


def _read_toml(path: Path) -> dict[str, str]:
    try:
        document = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path.name}: {_shown(str(error))}") from None
    values: dict[str, str] = {}
    for key, value in document.items():
        name = key.upper()
        if name not in _BY_NAME or key not in (name, name.lower()):
            raise _unknown(key, path.name)
        if name in values:
            raise SettingsError(f"{name} is twice in {path.name}")
        values[name] = _toml_text(name, value)
    return values


def _toml_text(name: str, value: object) -> str:
    if isinstance(value, str | int):  # true and false are ints too, and read as a switch
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    raise SettingsError(f"{name} in {TOML_FILE}: must be a string, a whole number, true, false or a list of strings")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path.name}: must be UTF-8") from None


# --- the key that makes itself -------------------------------------------------------------------------------------


def ensure_api_key(settings: Settings, directory: Path) -> tuple[str, Path | None]:
    """The key clients must send: the one that was set, or that of ``duetime.key`` in ``directory``, made when missing.

    The path comes with it when the key is the file's, so that the start can say where it is.
    """
    if settings.api_key is not None:
        return settings.api_key, None
    path = directory / KEY_FILE
    try:
        try:
            key = path.read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            key = _make_key(path)
    except OSError as error:
        raise SettingsError(f"cannot read or make {path}: {error.strerror}; set API_KEY instead") from None
    if not _KEY(key):
        raise SettingsError(
            f"{path} holds no key of {API_KEY_CHARS_MIN} to {API_KEY_CHARS_MAX} visible ASCII characters: "
            "delete it to have a new one made, or set API_KEY"
        )
    return key, path


def _make_key(path: Path) -> str:
    key = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
            file.write(key + "\n")
            file.flush()
            os.fsync(descriptor)  # a key that clients were given must still be there after a power loss
    except OSError:
        path.unlink(missing_ok=True)  # half a key would stop every later start
        raise
    return key
