"""Every setting of a Duetime process: its source, its accepted values and its meaning.

Owns the one table ``SETTINGS``, which parses the values and which the documentation is tested against. An unknown name
or a bad value raises a one-line ``SettingsError`` that names the setting, the given value and the accepted ones, and
the process does not start. Values that carry credentials never appear in a message or in ``repr``.
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

from duetime.databases import DATABASES, database_of
from duetime.errors import SettingsError
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from duetime.settings import values as value
from duetime.settings.sources import read_env, read_toml
from duetime.settings.values import FORCED_AUTH, KIB, MIB, SQLITE, Refusal, shown

ENV_FILE = ".env"
TOML_FILE = "duetime.toml"

_OURS = "DUETIME_"
_OF_COMMANDS = {"DUETIME_PROFILE"}
"""Variables of the environment that are for the commands that talk to a server, not for the server."""


class Settings(Struct, frozen=True, kw_only=True):
    """The settings that ``load`` read from the three sources. Durations are in milliseconds."""

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
    allow_private_targets: bool | tuple[str, ...] | None = None  # a tuple of CIDRs; None: not set
    auth: str = "key"  # or "none"
    allowed_hosts: tuple[str, ...] = ()
    cookie_secure: bool | None = None  # None: decided per request
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
        """The file of a SQLite store, relative to the working directory if written so; None for memory."""
        if not self.database_url.startswith(SQLITE):
            return None
        return Path(unquote(self.database_url.removeprefix(SQLITE)))

    @property
    def loopback_targets(self) -> bool:
        """Whether callbacks may go to loopback addresses although no setting allows it: this is a developer's machine,
        which only its own programs can reach."""
        return self.allow_private_targets is None and self.api_key is None and _is_loopback(self.host)

    @property
    def bodies_bytes_max(self) -> int:
        """The memory for request bodies: always enough for one batch."""
        return max(self.max_bodies_bytes, 2 * self.max_batch_bytes)

    @property
    def on_server(self) -> bool:
        """Whether the store is a database server, which any number of processes can share."""
        return database_of(self.database_url) is not None

    @property
    def database_shown(self) -> str:
        """Where timers are stored, for logs: without the password."""
        if (database := database_of(self.database_url)) is None:
            return str(self.database_path or "memory and lost when this process ends")
        parts = urlsplit(self.database_url)
        return f"{database.name} at {parts.netloc.rpartition('@')[2] or 'a local socket'}{parts.path}"

    def __repr__(self) -> str:
        shown = (
            f"{field}={'…' if field in _SECRET_FIELDS and held else repr(held)}"
            for field, held in msgspec.structs.asdict(self).items()
        )
        return f"Settings({', '.join(shown)})"


# --- the table -----------------------------------------------------------------------------------------------------


class Setting(Struct, frozen=True, kw_only=True):
    """One row: the public name, the field of ``Settings``, and the description that users read."""

    name: str
    field: str
    default: str  # as a user would write it; empty if none
    meaning: str
    parse: Callable[[str], Any]
    secret: bool = False


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="DATABASE_URL",
        field="database_url",
        default="sqlite:///./duetime.db",
        meaning=f"Where timers are stored: sqlite:///path; {' or '.join(each.example for each in DATABASES)}, which "
        "many instances can share; or memory: for trials, which loses everything when the process ends.",
        parse=value.database_url,
        secret=True,
    ),
    Setting(
        name="TIMER_DB_PATH",
        field="database_url",
        default="",
        meaning="The path of the SQLite file, instead of DATABASE_URL.",
        parse=value.database_path,
    ),
    Setting(
        name="API_KEY",
        field="api_key",
        default="",
        meaning="The API key that clients send, at least 32 characters; if unset, one is generated and stored in "
        "duetime.key.",
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
        meaning="The port to listen on; 0 picks a free one.",
        parse=value.number(0, 65535),
    ),
    Setting(
        name="LOG_LEVEL",
        field="log_level",
        default="info",
        meaning="The minimum level of log messages: trace, debug, info, warn, error or off.",
        parse=value.log_level,
    ),
    Setting(
        name="RUST_LOG",
        field="log_level",
        default="",
        meaning="Alias of LOG_LEVEL for Rust deployments; per-module levels are ignored.",
        parse=value.rust_log,
    ),
    Setting(
        name="TIMER_POLLING_INTERVAL",
        field="timer_polling_interval_ms",
        default="1000",
        meaning="The longest time between two polls for due timers, in milliseconds.",
        parse=value.number(10, MINUTE_MS),
    ),
    Setting(
        name="TIMER_BATCH_SIZE",
        field="timer_batch_size",
        default="500",
        meaning="The maximum number of due timers that one poll begins.",
        parse=value.number(1, 10_000),
    ),
    Setting(
        name="TIMER_BROKER_URL",
        field="timer_broker_url",
        default="",
        meaning="The NATS server, or several separated by commas; if unset, the NATS API and callbacks to NATS are "
        "off.",
        parse=value.broker_url,
        secret=True,
    ),
    Setting(
        name="DUETIME_BROKER_COMMANDS",
        field="broker_commands",
        default="timer.commands.schedule",
        meaning="The subject of ScheduleTimer commands, without the tenant at its end.",
        parse=value.subject,
    ),
    Setting(
        name="DUETIME_BROKER_EVENTS",
        field="broker_events",
        default="timer.events.due",
        meaning="The subject of DueTimeReached events, without the tenant at its end.",
        parse=value.subject,
    ),
    Setting(
        name="DUETIME_BROKER_DEAD_LETTERS",
        field="broker_dead_letters",
        default="timer.dlq.commands",
        meaning="The subject for rejected commands (dead letters).",
        parse=value.subject,
    ),
    Setting(
        name="DUETIME_BROKER_COMMANDS_STREAM",
        field="broker_commands_stream",
        default="TIMER_COMMANDS",
        meaning="The stream that commands are read from.",
        parse=value.stream,
    ),
    Setting(
        name="DUETIME_BROKER_EVENTS_STREAM",
        field="broker_events_stream",
        default="TIMER_EVENTS",
        meaning="The stream that events are published to.",
        parse=value.stream,
    ),
    Setting(
        name="DUETIME_BROKER_DEAD_LETTERS_STREAM",
        field="broker_dead_letters_stream",
        default="TIMER_DLQ",
        meaning="The stream for rejected commands (dead letters).",
        parse=value.stream,
    ),
    Setting(
        name="DUETIME_SHARDS",
        field="shards",
        default="64",
        meaning="The number of shards that timers are spread over; fixed once the store is created.",
        parse=value.number(1, 1024),
    ),
    Setting(
        name="DUETIME_LEASE_TTL",
        field="lease_ttl_ms",
        default="10s",
        meaning="How long an instance keeps a shard without renewing its lease.",
        parse=value.duration(SECOND_MS, 5 * MINUTE_MS),
    ),
    Setting(
        name="DUETIME_RETENTION",
        field="retention_ms",
        default="30d",
        meaning="How long finished timers are retained; forever retains them all.",
        parse=value.retention,
    ),
    Setting(
        name="DUETIME_AUTO_NAMESPACES",
        field="auto_namespaces",
        default="off",
        meaning="Whether creating a timer in an unknown namespace creates the namespace.",
        parse=value.switch,
    ),
    Setting(
        name="DUETIME_WORKERS",
        field="workers",
        default="1",
        meaning="The number of worker processes; more than one needs a database server.",
        parse=value.number(1, 64),
    ),
    Setting(
        name="DUETIME_ALLOW_PRIVATE_TARGETS",
        field="allow_private_targets",
        default="",
        meaning="Which private addresses callbacks may go to: on (all), off (none) or a list of CIDRs; "
        "if unset, none, or loopback only when API_KEY is unset and HOST is loopback.",
        parse=value.private_targets,
    ),
    Setting(
        name="DUETIME_AUTH",
        field="auth",
        default="key",
        meaning="Whether clients need the API key: key or none. none needs a loopback HOST; none-forced allows any "
        "HOST.",
        parse=value.auth,
    ),
    Setting(
        name="DUETIME_ALLOWED_HOSTS",
        field="allowed_hosts",
        default="",
        meaning="With DUETIME_AUTH=none: the host names of this service besides localhost and HOST, separated by "
        "commas, like timers.example; * accepts any.",
        parse=value.hosts,
    ),
    Setting(
        name="DUETIME_COOKIE_SECURE",
        field="cookie_secure",
        default="auto",
        meaning="Whether the session cookie is Secure (sent over HTTPS only): on, off, or auto, which is on when the "
        "headers of the browser or a proxy indicate HTTPS.",
        parse=value.auto_switch,
    ),
    Setting(
        name="DUETIME_METRICS_AUTH",
        field="metrics_auth",
        default="key",
        meaning="Whether /metrics needs the API key: key or none.",
        parse=value.choice("key", "none"),
    ),
    Setting(
        name="DUETIME_MAX_IN_FLIGHT",
        field="max_in_flight",
        default="4096",
        meaning="The maximum number of attempts in flight per instance; a timer with 64 KiB or more of payload and "
        "metadata counts several times.",
        parse=value.number(1, 65536),
    ),
    Setting(
        name="DUETIME_MAX_PER_DESTINATION",
        field="max_per_destination",
        default="256",
        meaning="The maximum number of attempts in flight to one destination.",
        parse=value.number(1, 65536),
    ),
    Setting(
        name="DUETIME_MAX_CONNECTIONS",
        field="max_connections",
        default="10000",
        meaning="The maximum number of open client connections; a low limit on open files lowers it.",
        parse=value.number(16, 1_000_000),
    ),
    Setting(
        name="DUETIME_MAX_REQUEST_BYTES",
        field="max_request_bytes",
        default="256KiB",
        meaning="The largest request that creates or changes one timer.",
        parse=value.size(KIB, 64 * MIB),
    ),
    Setting(
        name="DUETIME_MAX_BATCH_BYTES",
        field="max_batch_bytes",
        default="16MiB",
        meaning="The largest request that creates a batch of timers.",
        parse=value.size(KIB, 256 * MIB),
    ),
    Setting(
        name="DUETIME_MAX_NAMESPACES",
        field="max_namespaces",
        default="10000",
        meaning="The maximum number of namespaces; existing ones above the limit stay.",
        parse=value.number(1, 1_000_000),
    ),
    Setting(
        name="DUETIME_MAX_BODIES_BYTES",
        field="max_bodies_bytes",
        default="64MiB",
        meaning="The memory for the bodies of all current requests; at least twice DUETIME_MAX_BATCH_BYTES is used.",
        parse=value.size(MIB, 64 * KIB * MIB),
    ),
    Setting(
        name="DUETIME_MAX_CALLBACK_TIMEOUT",
        field="max_callback_timeout_ms",
        default="1h",
        meaning="The longest callbackTimeout that a timer may have.",
        parse=value.duration(SECOND_MS, DAY_MS),
    ),
    Setting(
        name="DUETIME_TAKEOVER",
        field="takeover",
        default="deadline",
        meaning="When to repeat the attempts of a dead instance: at their deadline, or now (as soon as its shards are "
        "taken over).",
        parse=value.choice("deadline", "now"),
    ),
    Setting(
        name="DUETIME_DRAIN_TIMEOUT",
        field="drain_timeout_ms",
        default="25s",
        meaning="How long shutdown waits for attempts in flight.",
        parse=value.duration(0, 10 * MINUTE_MS),
    ),
)

_BY_NAME = {setting.name: setting for setting in SETTINGS}
_SECRET_FIELDS = frozenset(setting.field for setting in SETTINGS if setting.secret)


# --- loading -------------------------------------------------------------------------------------------------------


def load(environ: Mapping[str, str], directory: Path) -> Settings:
    """Read the settings from the environment, ``.env`` and ``duetime.toml`` in ``directory``; the first source wins.

    ``duetime.toml`` has the same names as top-level keys, in upper or lower case (``port = 3000``,
    ``duetime_lease_ttl = "10s"``); numbers and booleans may be TOML values, and a list of CIDRs a TOML list. Other
    programs share the environment and ``.env``, so there only an unknown name with our prefix is an error; in
    ``duetime.toml`` every unknown name is. An empty value counts as unset. When two names set the same field
    (``TIMER_DB_PATH``, ``RUST_LOG``), the earlier source wins; within one source, the name that comes first in
    ``SETTINGS`` wins.
    """
    given: dict[str, Any] = {}
    sources = (
        _ours({name: text for name, text in environ.items() if name not in _OF_COMMANDS}, "the environment"),
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
            raise Refusal("must not contain unprintable characters")
        return setting.parse(text)
    except Refusal as refusal:
        raise SettingsError(f"{setting.name}{'' if setting.secret else f'={shown(text)}'}: {refusal}") from None


def _judge_together(settings: Settings, *, auth_forced: bool) -> None:
    if settings.workers > 1 and not settings.on_server:
        scheme = settings.database_url.partition(":")[0]
        raise SettingsError(
            f"DUETIME_WORKERS={settings.workers}: must be 1 with a {scheme} store, which only one process can use; "
            f"several need a {' or '.join(f'{each.schemes[0]}://' for each in DATABASES)} store"
        )
    if settings.auth == "none" and not auth_forced and not _is_loopback(settings.host):
        raise SettingsError(
            f"DUETIME_AUTH=none: needs a loopback HOST like 127.0.0.1, not {settings.host}; "
            f"DUETIME_AUTH={FORCED_AUTH} allows any HOST"
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
    """Return the source after checking that every name with the prefix is a setting."""
    for name in source:
        if name.startswith(prefix) and name not in _BY_NAME:
            raise _unknown(name, where)
    return source


def _unknown(name: str, where: str) -> SettingsError:
    # Compare without the shared prefix, which would make any two names similar.
    stems = {known.removeprefix(_OURS): known for known in _BY_NAME}
    near = difflib.get_close_matches(name.upper().removeprefix(_OURS), stems, n=1)
    hint = f"; did you mean {stems[near[0]]}?" if near else ""
    return SettingsError(f"{shown(name)} in {where} is not a setting{hint}")
