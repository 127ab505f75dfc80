"""Every setting of a Duetime process: where it comes from, what it may be, what it means.

Owns the one table ``SETTINGS``, from which values are parsed and the documentation is tested. A name or value that is
not in it stops the start with a ``SettingsError`` of one line that names the setting, what was given and what is
accepted; values that carry credentials are never repeated in a message or in ``repr``.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from duetime.errors import SettingsError
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from duetime.settings import values as value
from duetime.settings.sources import read_env, read_toml
from duetime.settings.values import FORCED_AUTH, KIB, MIB, POSTGRES, SQLITE, Refusal, shown

ENV_FILE = ".env"
TOML_FILE = "duetime.toml"

_OURS = "DUETIME_"


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
    broker_commands: str = "timer.commands.schedule"
    broker_events: str = "timer.events.due"
    broker_dead_letters: str = "timer.dlq.commands"
    broker_commands_stream: str = "TIMER_COMMANDS"
    broker_events_stream: str = "TIMER_EVENTS"
    broker_dead_letters_stream: str = "TIMER_DLQ"
    shards: int = 64
    lease_ttl_ms: int = 10 * SECOND_MS
    retention_ms: int | None = 30 * DAY_MS  # None: forever
    auto_namespaces: bool = False
    workers: int = 1
    allow_private_targets: bool | tuple[str, ...] | None = None  # a tuple of CIDRs; None: nobody said
    auth: str = "key"  # or "none"
    allowed_hosts: tuple[str, ...] = ()
    cookie_secure: bool | None = None  # None: as the request says
    metrics_auth: str = "key"  # or "none"
    max_in_flight: int = 4096
    max_per_destination: int = 256
    max_connections: int = 10_000
    max_request_bytes: int = 256 * KIB
    max_batch_bytes: int = 16 * MIB
    max_namespaces: int = 10_000
    max_bodies_bytes: int = 64 * MIB
    max_callback_timeout_ms: int = HOUR_MS
    takeover: str = "deadline"  # or "now"
    drain_timeout_ms: int = 25 * SECOND_MS

    @property
    def database_path(self) -> Path | None:
        """The file of an sqlite store, relative to the working directory as it was written; None for memory."""
        if not self.database_url.startswith(SQLITE):
            return None
        return Path(unquote(self.database_url.removeprefix(SQLITE)))

    @property
    def bodies_bytes_max(self) -> int:
        """The memory for request bodies: whatever was set, a batch fits."""
        return max(self.max_bodies_bytes, 2 * self.max_batch_bytes)

    @property
    def on_server(self) -> bool:
        """Whether the store is a server's, which any number of processes share."""
        return self.database_url.startswith(POSTGRES)

    @property
    def database_shown(self) -> str:
        """Where timers are kept, for people: without the password."""
        if not self.on_server:
            return str(self.database_path or "memory, and lost when this process ends")
        parts = urlsplit(self.database_url)
        return f"PostgreSQL at {parts.netloc.rpartition('@')[2] or 'a local socket'}{parts.path}"

    def __repr__(self) -> str:
        shown = (
            f"{field}={'…' if field in _SECRET_FIELDS and held else repr(held)}"
            for field, held in msgspec.structs.asdict(self).items()
        )
        return f"Settings({', '.join(shown)})"


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
        meaning="Where timers are kept: sqlite:///path, postgresql://user:password@host/database, which any number of "
        "instances share, or memory: for trials, which forgets everything at the end.",
        parse=value.database_url,
        secret=True,
    ),
    Setting(
        name="TIMER_DB_PATH",
        field="database_url",
        default="",
        meaning="The path form of DATABASE_URL: the file of the sqlite store.",
        parse=value.database_path,
    ),
    Setting(
        name="API_KEY",
        field="api_key",
        default="",
        meaning="The key that clients send, at least 32 characters; without it one is made and kept in duetime.key.",
        parse=value.api_key,
        secret=True,
    ),
    Setting(
        name="HOST",
        field="host",
        default="0.0.0.0 with API_KEY, else 127.0.0.1",
        meaning="The address to listen on.",
        parse=value.host,
    ),
    Setting(
        name="PORT",
        field="port",
        default="3000",
        meaning="The port to listen on; 0 takes any free one.",
        parse=value.number(0, 65535),
    ),
    Setting(
        name="LOG_LEVEL",
        field="log_level",
        default="info",
        meaning="The least level that is logged: trace, debug, info, warn, error or off.",
        parse=value.log_level,
    ),
    Setting(
        name="RUST_LOG",
        field="log_level",
        default="",
        meaning="An older name of LOG_LEVEL; levels of single modules in it are skipped.",
        parse=value.rust_log,
    ),
    Setting(
        name="TIMER_POLLING_INTERVAL",
        field="timer_polling_interval_ms",
        default="1000",
        meaning="The longest time between two looks for due timers, in milliseconds.",
        parse=value.number(10, MINUTE_MS),
    ),
    Setting(
        name="TIMER_BATCH_SIZE",
        field="timer_batch_size",
        default="500",
        meaning="The most timers that one round begins.",
        parse=value.number(1, 10_000),
    ),
    Setting(
        name="TIMER_BROKER_URL",
        field="timer_broker_url",
        default="",
        meaning="The NATS server (or several, with commas) of the broker door and of callbacks to NATS; "
        "without it there are none.",
        parse=value.broker_url,
        secret=True,
    ),
    Setting(
        name="DUETIME_BROKER_COMMANDS",
        field="broker_commands",
        default="timer.commands.schedule",
        meaning="The subject of ScheduleTimer commands, without the tenant that ends it.",
        parse=value.subject,
    ),
    Setting(
        name="DUETIME_BROKER_EVENTS",
        field="broker_events",
        default="timer.events.due",
        meaning="The subject of DueTimeReached events, without the tenant that ends it.",
        parse=value.subject,
    ),
    Setting(
        name="DUETIME_BROKER_DEAD_LETTERS",
        field="broker_dead_letters",
        default="timer.dlq.commands",
        meaning="The subject for commands that can't be taken.",
        parse=value.subject,
    ),
    Setting(
        name="DUETIME_BROKER_COMMANDS_STREAM",
        field="broker_commands_stream",
        default="TIMER_COMMANDS",
        meaning="The stream that commands come from.",
        parse=value.stream,
    ),
    Setting(
        name="DUETIME_BROKER_EVENTS_STREAM",
        field="broker_events_stream",
        default="TIMER_EVENTS",
        meaning="The stream that events go to.",
        parse=value.stream,
    ),
    Setting(
        name="DUETIME_BROKER_DEAD_LETTERS_STREAM",
        field="broker_dead_letters_stream",
        default="TIMER_DLQ",
        meaning="The stream of commands that can't be taken.",
        parse=value.stream,
    ),
    Setting(
        name="DUETIME_SHARDS",
        field="shards",
        default="64",
        meaning="How many shards all timers are spread over; fixed once the store was made.",
        parse=value.number(1, 1024),
    ),
    Setting(
        name="DUETIME_LEASE_TTL",
        field="lease_ttl_ms",
        default="10s",
        meaning="How long an instance owns a shard without renewing it.",
        parse=value.duration(SECOND_MS, 5 * MINUTE_MS),
    ),
    Setting(
        name="DUETIME_RETENTION",
        field="retention_ms",
        default="30d",
        meaning="How long finished timers are kept; forever keeps them all.",
        parse=value.retention,
    ),
    Setting(
        name="DUETIME_AUTO_NAMESPACES",
        field="auto_namespaces",
        default="off",
        meaning="Whether a create in an unknown namespace makes the namespace.",
        parse=value.switch,
    ),
    Setting(
        name="DUETIME_WORKERS",
        field="workers",
        default="1",
        meaning="How many processes serve; more than one needs a server store.",
        parse=value.number(1, 64),
    ),
    Setting(
        name="DUETIME_ALLOW_PRIVATE_TARGETS",
        field="allow_private_targets",
        default="",
        meaning="Which addresses that are not public callbacks may go to: on, off or a list of CIDRs; "
        "unset means none, or loopback alone when there is no API_KEY.",
        parse=value.private_targets,
    ),
    Setting(
        name="DUETIME_AUTH",
        field="auth",
        default="key",
        meaning="Whether clients need the key; none needs a loopback HOST, and none-forced is none on any HOST.",
        parse=value.auth,
    ),
    Setting(
        name="DUETIME_ALLOWED_HOSTS",
        field="allowed_hosts",
        default="",
        meaning="With DUETIME_AUTH=none: the host names of this service besides localhost and HOST, with commas, like "
        "timers.example; * accepts any.",
        parse=value.hosts,
    ),
    Setting(
        name="DUETIME_COOKIE_SECURE",
        field="cookie_secure",
        default="auto",
        meaning="Whether browsers send the session cookie over HTTPS alone: on, off, or auto, which is on when the "
        "browser or a proxy says that it uses HTTPS.",
        parse=value.auto_switch,
    ),
    Setting(
        name="DUETIME_METRICS_AUTH",
        field="metrics_auth",
        default="key",
        meaning="Whether /metrics needs the key: key or none.",
        parse=value.choice("key", "none"),
    ),
    Setting(
        name="DUETIME_MAX_IN_FLIGHT",
        field="max_in_flight",
        default="4096",
        meaning="The most deliveries under way at one time.",
        parse=value.number(1, 65536),
    ),
    Setting(
        name="DUETIME_MAX_PER_DESTINATION",
        field="max_per_destination",
        default="256",
        meaning="The most deliveries under way to one destination.",
        parse=value.number(1, 65536),
    ),
    Setting(
        name="DUETIME_MAX_CONNECTIONS",
        field="max_connections",
        default="10000",
        meaning="The most connections that clients may have open at one time; a low limit on open files lowers it.",
        parse=value.number(16, 1_000_000),
    ),
    Setting(
        name="DUETIME_MAX_REQUEST_BYTES",
        field="max_request_bytes",
        default="256KiB",
        meaning="The largest request that makes or changes one timer.",
        parse=value.size(KIB, 64 * MIB),
    ),
    Setting(
        name="DUETIME_MAX_BATCH_BYTES",
        field="max_batch_bytes",
        default="16MiB",
        meaning="The largest request that makes a batch of timers.",
        parse=value.size(KIB, 256 * MIB),
    ),
    Setting(
        name="DUETIME_MAX_NAMESPACES",
        field="max_namespaces",
        default="10000",
        meaning="The most namespaces that there may be; those that are there already stay.",
        parse=value.number(1, 1_000_000),
    ),
    Setting(
        name="DUETIME_MAX_BODIES_BYTES",
        field="max_bodies_bytes",
        default="64MiB",
        meaning="The memory that the bodies of all requests may take at one time; no less than twice "
        "DUETIME_MAX_BATCH_BYTES counts.",
        parse=value.size(MIB, 64 * KIB * MIB),
    ),
    Setting(
        name="DUETIME_MAX_CALLBACK_TIMEOUT",
        field="max_callback_timeout_ms",
        default="1h",
        meaning="The longest callbackTimeout that a timer may ask for.",
        parse=value.duration(SECOND_MS, DAY_MS),
    ),
    Setting(
        name="DUETIME_TAKEOVER",
        field="takeover",
        default="deadline",
        meaning="When the attempts of an owner that died fire again: at their deadline, or now.",
        parse=value.choice("deadline", "now"),
    ),
    Setting(
        name="DUETIME_DRAIN_TIMEOUT",
        field="drain_timeout_ms",
        default="25s",
        meaning="How long a stop waits for deliveries that are under way.",
        parse=value.duration(0, 10 * MINUTE_MS),
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
        _ours(read_env(directory / ENV_FILE), ENV_FILE),
        _ours(read_toml(directory / TOML_FILE), TOML_FILE, prefix=""),
    )
    for source in sources:
        for setting in SETTINGS:
            text = source.get(setting.name, "").strip()
            if text and setting.field not in given:
                given[setting.field] = _parse(setting, text)
    given.setdefault("host", "0.0.0.0" if "api_key" in given else "127.0.0.1")
    forced = given.get("auth") == FORCED_AUTH
    if forced:
        given["auth"] = "none"
    settings = Settings(**given)
    _judge_together(settings, auth_forced=forced)
    return settings


def _parse(setting: Setting, text: str) -> Any:
    try:
        if not text.isprintable():
            raise Refusal("must not have characters that cannot be printed")
        return setting.parse(text)
    except Refusal as refusal:
        raise SettingsError(f"{setting.name}{'' if setting.secret else f'={shown(text)}'}: {refusal}") from None


def _judge_together(settings: Settings, *, auth_forced: bool) -> None:
    if settings.workers > 1 and not settings.on_server:
        scheme = settings.database_url.partition(":")[0]
        raise SettingsError(
            f"DUETIME_WORKERS={settings.workers}: must be 1 with a {scheme} store, which belongs to one process; "
            "a postgresql:// store takes many"
        )
    if settings.auth == "none" and not auth_forced and not _is_loopback(settings.host):
        raise SettingsError(
            f"DUETIME_AUTH=none: needs a loopback HOST like 127.0.0.1, not {settings.host}; "
            f"DUETIME_AUTH={FORCED_AUTH} accepts any"
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


def _ours(source: Mapping[str, str], where: str, *, prefix: str = _OURS) -> Mapping[str, str]:
    """The source, once it is known that every name in it that must be ours is a setting."""
    for name in source:
        if name.startswith(prefix) and name not in _BY_NAME:
            raise _unknown(name, where)
    return source


def _unknown(name: str, where: str) -> SettingsError:
    # The shared prefix is left out, or it would make any two names look alike.
    stems = {known.removeprefix(_OURS): known for known in _BY_NAME}
    near = difflib.get_close_matches(name.upper().removeprefix(_OURS), stems, n=1)
    hint = f"; did you mean {stems[near[0]]}?" if near else ""
    return SettingsError(f"{shown(name)} in {where} is not a setting{hint}")
