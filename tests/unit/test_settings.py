"""Settings: precedence of the sources, accepted values, and one-line errors."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from duetime.errors import SettingsError
from duetime.model import DAY_MS, HOUR_MS
from duetime.settings import SETTINGS, Settings, load
from duetime.settings.keyfile import ensure_api_key

KEY = "k" * 32


def refusal(tmp_path: Path, **environ: str) -> str:
    with pytest.raises(SettingsError) as raised:
        load(environ, tmp_path)
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_no_settings_mean_the_defaults(tmp_path: Path) -> None:
    assert load({}, tmp_path) == Settings()
    assert load({"PATH": "/bin", "HOME": "/root"}, tmp_path) == Settings()


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, True),
        ({"HOST": "::1"}, True),
        ({"HOST": "localhost"}, True),
        ({"HOST": "0.0.0.0"}, False),
        ({"HOST": "::"}, False),
        ({"HOST": "10.0.0.1"}, False),
        ({"API_KEY": KEY}, False),
        ({"API_KEY": KEY, "HOST": "127.0.0.1"}, False),
        ({"DUETIME_ALLOW_PRIVATE_TARGETS": "off"}, False),
    ],
    ids=str,
)
def test_only_a_service_for_this_machine_may_call_this_machine(
    tmp_path: Path, environ: dict[str, str], allowed: bool
) -> None:
    assert load(environ, tmp_path).loopback_targets is allowed


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_documented_defaults_are_correct(setting: Any, tmp_path: Path) -> None:
    if setting.default and setting.name != "HOST":
        assert load({setting.name: setting.default}, tmp_path) == Settings()
    assert setting.meaning.endswith(".") and setting.meaning[0].isupper()


def test_every_field_has_a_setting_and_names_are_unique() -> None:
    assert {setting.field for setting in SETTINGS} == set(Settings.__struct_fields__)
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


SEVERAL = "postgresql://user@one:5432,[::2]:5433,three/database?target_session_attrs=read-write"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("DATABASE_URL", "sqlite:////var/lib/d.db", "database_url", "sqlite:////var/lib/d.db"),
        ("DATABASE_URL", SEVERAL, "database_url", SEVERAL),
        ("DATABASE_URL", "memory:", "database_url", "memory:"),
        ("DATABASE_URL", "memory://", "database_url", "memory:"),
        ("TIMER_DB_PATH", "./a b.db", "database_url", "sqlite:///./a%20b.db"),
        ("API_KEY", KEY, "api_key", KEY),
        ("HOST", "::1", "host", "::1"),
        ("HOST", "[::1]", "host", "::1"),
        ("HOST", "localhost", "host", "localhost"),
        ("PORT", "0", "port", 0),
        ("PORT", " 8080 ", "port", 8080),
        ("LOG_LEVEL", "WARN", "log_level", "warning"),
        ("RUST_LOG", "debug", "log_level", "debug"),
        ("RUST_LOG", "tower=trace,error,hyper=off", "log_level", "error"),
        ("RUST_LOG", "tower=trace", "log_level", "info"),
        ("TIMER_POLLING_INTERVAL", "250", "timer_polling_interval_ms", 250),
        ("TIMER_BATCH_SIZE", "100", "timer_batch_size", 100),
        ("TIMER_BROKER_URL", "nats://user:pw@broker:4222", "timer_broker_url", "nats://user:pw@broker:4222"),
        ("DUETIME_SHARDS", "1024", "shards", 1024),
        ("DUETIME_LEASE_TTL", "1m30s", "lease_ttl_ms", 90_000),
        ("DUETIME_RETENTION", "12h", "retention_ms", 12 * HOUR_MS),
        ("DUETIME_RETENTION", "forever", "retention_ms", None),
        ("DUETIME_AUTO_NAMESPACES", "On", "auto_namespaces", True),
        ("DUETIME_WORKERS", "1", "workers", 1),
        ("DUETIME_ALLOW_PRIVATE_TARGETS", "on", "allow_private_targets", True),
        ("DUETIME_ALLOW_PRIVATE_TARGETS", "off", "allow_private_targets", False),
        ("DUETIME_ALLOW_PRIVATE_TARGETS", "", "allow_private_targets", None),
        ("DUETIME_ALLOW_PRIVATE_TARGETS", "10.0.0.0/8, fd00::/8 1.2.3.4", "allow_private_targets",
         ("10.0.0.0/8", "fd00::/8", "1.2.3.4/32")),
        ("DUETIME_AUTH", "none", "auth", "none"),
        ("DUETIME_AUTH", "none-forced", "auth", "none"),
        ("DUETIME_ALLOWED_HOSTS", "Timers.Example., my_host  [::1],10.0.0.1", "allowed_hosts",
         ("timers.example", "my_host", "::1", "10.0.0.1")),
        ("DUETIME_ALLOWED_HOSTS", "*", "allowed_hosts", ("*",)),
        ("DUETIME_COOKIE_SECURE", "auto", "cookie_secure", None),
        ("DUETIME_COOKIE_SECURE", "on", "cookie_secure", True),
        ("DUETIME_COOKIE_SECURE", "Off", "cookie_secure", False),
        ("DUETIME_METRICS_AUTH", "none", "metrics_auth", "none"),
        ("DUETIME_MAX_IN_FLIGHT", "10", "max_in_flight", 10),
        ("DUETIME_MAX_PER_DESTINATION", "10", "max_per_destination", 10),
        ("DUETIME_MAX_REQUEST_BYTES", "1 MiB", "max_request_bytes", 1024 * 1024),
        ("DUETIME_MAX_BATCH_BYTES", "1048576", "max_batch_bytes", 1024 * 1024),
        ("DUETIME_MAX_NAMESPACES", "20", "max_namespaces", 20),
        ("DUETIME_MAX_BODIES_BYTES", "128MiB", "max_bodies_bytes", 128 * 1024 * 1024),
        ("DUETIME_MAX_CALLBACK_TIMEOUT", "5m", "max_callback_timeout_ms", 300_000),
        ("DUETIME_TAKEOVER", "now", "takeover", "now"),
        ("DUETIME_DRAIN_TIMEOUT", "0s", "drain_timeout_ms", 0),
    ],
)  # fmt: skip
def test_a_valid_value_is_parsed(name: str, text: str, field: str, value: object, tmp_path: Path) -> None:
    assert getattr(load({name: text}, tmp_path), field) == value


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("DATABASE_URL", "duetime.db", "must be sqlite:///path"),
        ("DATABASE_URL", "sqlite://duetime.db", "must be sqlite:///path"),
        ("DATABASE_URL", "sqlite:///", "must be sqlite:///path"),
        ("DATABASE_URL", "sqlite:///:memory:", "must be sqlite:///path"),
        ("DATABASE_URL", "sqlite:///a.db?mode=rwc", "must be sqlite:///path"),
        ("DATABASE_URL", "sqlite:///a%00b", "must be sqlite:///path"),
        ("TIMER_DB_PATH", "data/", "must be the path of a file"),
        ("HOST", "256.0.0.1", "must be an IP address or a host name"),
        ("HOST", "http://x", "must be an IP address or a host name"),
        ("PORT", "65536", "must be a whole number from 0 to 65535"),
        ("PORT", "-1", "must be a whole number"),
        ("PORT", "3_000", "must be a whole number"),
        ("PORT", "\uff13\uff10\uff10\uff10", "must be a whole number"),
        ("PORT", "9" * 5_000, "must be a whole number"),
        ("LOG_LEVEL", "loud", "must be trace, debug, info, warn, error or off"),
        ("RUST_LOG", "loud", "must be trace, debug, info, warn, error or off"),
        ("TIMER_POLLING_INTERVAL", "1s", "must be a whole number from 10 to 60000"),
        ("TIMER_BATCH_SIZE", "0", "must be a whole number from 1 to 10000"),
        ("TIMER_BROKER_URL", "localhost:4222", "must be a URL like nats://localhost:4222"),
        ("TIMER_BROKER_URL", "nats://host:notaport", "must be a URL like nats://localhost:4222"),
        ("DUETIME_SHARDS", "0", "must be a whole number from 1 to 1024"),
        ("DUETIME_SHARDS", "1025", "must be a whole number from 1 to 1024"),
        ("DUETIME_LEASE_TTL", "10", "must be a duration from 1s to 5m"),
        ("DUETIME_LEASE_TTL", "999ms", "must be a duration from 1s to 5m"),
        ("DUETIME_RETENTION", "never", "must be a duration of at least 1s, like 12h or 30d, or forever"),
        ("DUETIME_AUTO_NAMESPACES", "maybe", "must be on or off"),
        ("DUETIME_WORKERS", "2", "must be 1 with a sqlite store"),
        ("DUETIME_ALLOW_PRIVATE_TARGETS", "10.0.0.1/8", "must be on, off or a list of CIDRs"),
        ("DUETIME_ALLOW_PRIVATE_TARGETS", ",", "must be on, off or a list of CIDRs"),
        ("DUETIME_AUTH", "None", "must be key, none (loopback HOST only) or none-forced"),
        ("DUETIME_ALLOWED_HOSTS", "timers.example:443", "must be host names without ports"),
        ("DUETIME_ALLOWED_HOSTS", "https://timers.example", "must be host names without ports"),
        ("DUETIME_ALLOWED_HOSTS", "*.example", "must be host names without ports"),
        ("DUETIME_ALLOWED_HOSTS", ",", "must be host names without ports"),
        ("DUETIME_COOKIE_SECURE", "maybe", "must be on, off or auto"),
        ("DUETIME_METRICS_AUTH", "off", "must be key or none"),
        ("DUETIME_MAX_IN_FLIGHT", "0", "must be a whole number"),
        ("DUETIME_MAX_PER_DESTINATION", "x", "must be a whole number"),
        ("DUETIME_MAX_REQUEST_BYTES", "1023", "must be a number of bytes from 1KiB to 64MiB"),
        ("DUETIME_MAX_REQUEST_BYTES", "32MiB", "must be at least DUETIME_MAX_REQUEST_BYTES"),
        ("DUETIME_MAX_BATCH_BYTES", "16MB", "must be a number of bytes from 1KiB to 256MiB"),
        ("DUETIME_TAKEOVER", "later", "must be deadline or now"),
        ("DUETIME_DRAIN_TIMEOUT", "11m", "must be a duration from 0s to 10m"),
        ("HOST", "a\x1bb", "must not contain unprintable characters"),
    ],
)
def test_an_invalid_value_is_a_one_line_error_with_the_accepted_values(
    name: str, text: str, accepted: str, tmp_path: Path
) -> None:
    line = refusal(tmp_path, **{name: text})
    assert line.startswith(("DUETIME_MAX_BATCH_BYTES" if "at least DUETIME" in accepted else name, name))
    assert accepted in line
    assert len(line) < 300
    if len(text) < 80 and text.isprintable() and "?" not in text and "at least DUETIME" not in accepted:
        assert text in line


def test_the_memory_for_bodies_always_fits_a_batch(tmp_path: Path) -> None:
    mib = 1024 * 1024
    assert load({}, tmp_path).bodies_bytes_max == 64 * mib
    assert load({"DUETIME_MAX_BATCH_BYTES": "100MiB"}, tmp_path).bodies_bytes_max == 200 * mib
    assert load({"DUETIME_MAX_BODIES_BYTES": "1MiB"}, tmp_path).bodies_bytes_max == 32 * mib


@pytest.mark.parametrize("scheme", ["mongodb", "dynamodb"])
def test_an_unsupported_database_is_rejected_without_showing_the_password(scheme: str, tmp_path: Path) -> None:
    line = refusal(tmp_path, DATABASE_URL=f"{scheme}://me:hunter2@db/x")
    assert line.startswith(f"DATABASE_URL: {scheme} is not supported yet; use sqlite:///path, postgresql://")
    assert "hunter2" not in line


def test_a_server_store_allows_workers_and_is_shown_without_its_password(tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@db.example:5433/timers?sslmode=require"
    settings = load({"DATABASE_URL": url, "DUETIME_WORKERS": "4"}, tmp_path)
    assert settings.on_server and settings.workers == 4 and settings.database_url == url
    assert settings.database_shown == "PostgreSQL at db.example:5433/timers"
    assert "hunter2" not in repr(settings)
    shown = load({"DATABASE_URL": "mysql://me:hunter2@db.example/timers"}, tmp_path).database_shown
    assert shown == "MySQL at db.example/timers"
    assert load({"DATABASE_URL": "postgres:///timers?host=/run/postgresql"}, tmp_path).on_server
    for bad in (
        "postgresql://",
        "postgresql:///x",
        "postgresql://me:hunter2@db:port/x",
        "postgresql://me:hunter2@db/#x",
    ):
        line = refusal(tmp_path, DATABASE_URL=bad)
        assert "must name the server, like postgresql://" in line and "hunter2" not in line


def test_credentials_never_appear_in_errors(tmp_path: Path) -> None:
    for bad in ("short-secret", "sécret" * 8, "secret with a blank in it, long enough", "secret" * 100):
        line = refusal(tmp_path, API_KEY=bad)
        assert line.startswith("API_KEY: must be ") and "cret" not in line
    assert "32 to 512 visible ASCII characters, but has 12" in refusal(tmp_path, API_KEY="short-secret")
    assert "hunter2" not in refusal(tmp_path, TIMER_BROKER_URL="http://me:hunter2@broker")
    shown = repr(load({"API_KEY": KEY, "TIMER_BROKER_URL": "nats://me:hunter2@b"}, tmp_path))
    assert KEY not in shown and "hunter2" not in shown and "port=3000" in shown


def test_the_default_host_depends_on_the_api_key(tmp_path: Path) -> None:
    assert load({"API_KEY": KEY}, tmp_path).host == "0.0.0.0"
    assert load({"API_KEY": KEY, "HOST": "10.1.2.3"}, tmp_path).host == "10.1.2.3"
    assert load({"API_KEY": ""}, tmp_path).host == "127.0.0.1"
    assert load({"HOST": "0.0.0.0"}, tmp_path).host == "0.0.0.0"


def test_no_auth_needs_a_loopback_host_unless_forced(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert load({"DUETIME_AUTH": "none", "HOST": host}, tmp_path).auth == "none"
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com"):
        line = refusal(tmp_path, DUETIME_AUTH="none", HOST=host)
        assert line.startswith("DUETIME_AUTH=none: needs a loopback HOST") and host in line
        assert load({"DUETIME_AUTH": "none-forced", "HOST": host}, tmp_path).auth == "none"
    assert "loopback" in refusal(tmp_path, DUETIME_AUTH="none", API_KEY=KEY)


def test_a_memory_store_allows_one_process_only(tmp_path: Path) -> None:
    assert "memory store" in refusal(tmp_path, DATABASE_URL="memory:", DUETIME_WORKERS="2")


def test_database_path_comes_from_the_url_or_timer_db_path(tmp_path: Path) -> None:
    assert load({}, tmp_path).database_path == Path("duetime.db")
    assert load({"DATABASE_URL": "sqlite:////var/d.db"}, tmp_path).database_path == Path("/var/d.db")
    assert load({"TIMER_DB_PATH": "/var/a b%20?.db"}, tmp_path).database_path == Path("/var/a b%20?.db")
    assert load({"DATABASE_URL": "memory:"}, tmp_path).database_path is None


def test_an_unknown_duetime_name_is_an_error(tmp_path: Path) -> None:
    assert refusal(tmp_path, DUETIME_SHARD="4") == (
        "DUETIME_SHARD in the environment is not a setting; did you mean DUETIME_SHARDS?"
    )
    load({"DUETIME_PROFILE": "prod"}, tmp_path)  # for the commands that talk to a server
    assert refusal(tmp_path, DUETIME_XYZZYQ="") == "DUETIME_XYZZYQ in the environment is not a setting"
    (tmp_path / ".env").write_text("DUETIME_LEASETTL=10s\n")
    assert refusal(tmp_path) == "DUETIME_LEASETTL in .env is not a setting; did you mean DUETIME_LEASE_TTL?"


def test_precedence_is_environment_then_env_file_then_toml(tmp_path: Path) -> None:
    (tmp_path / "duetime.toml").write_text('port = 1\nlog_level = "error"\nduetime_shards = 7\n')
    assert (load({}, tmp_path).port, load({}, tmp_path).shards) == (1, 7)
    (tmp_path / ".env").write_text("PORT=2\nLOG_LEVEL=debug\n")
    assert (load({}, tmp_path).port, load({}, tmp_path).log_level, load({}, tmp_path).shards) == (2, "debug", 7)
    assert load({"PORT": "3"}, tmp_path).port == 3
    assert load({"PORT": ""}, tmp_path).port == 2


def test_an_older_name_in_an_earlier_source_wins(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("LOG_LEVEL=debug\nDATABASE_URL=memory:\n")
    assert load({"RUST_LOG": "error"}, tmp_path).log_level == "error"
    assert load({"TIMER_DB_PATH": "x.db"}, tmp_path).database_path == Path("x.db")
    assert load({"RUST_LOG": "error", "LOG_LEVEL": "warn"}, tmp_path).log_level == "warning"


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("TIMER_DB_PATH=a.db", "a.db"),
        ("export TIMER_DB_PATH=a.db", "a.db"),
        ("  TIMER_DB_PATH = a.db  ", "a.db"),
        ("TIMER_DB_PATH=a.db # where", "a.db"),
        ("TIMER_DB_PATH=a#b.db", "a#b.db"),
        ("TIMER_DB_PATH=a b.db", "a b.db"),
        ("TIMER_DB_PATH='a # b.db' # where", "a # b.db"),
        ('TIMER_DB_PATH="a # \\"b\\".db"', 'a # "b".db'),
        ("TIMER_DB_PATH='a\\b.db'", "a\\b.db"),
        ("TIMER_DB_PATH=first.db\nTIMER_DB_PATH=a.db", "a.db"),
        ("# a comment\n\n  # another\nTIMER_DB_PATH=a.db\r\nOTHER=x", "a.db"),
        ("\ufeffTIMER_DB_PATH=a.db", "a.db"),
        ("TIMER_DB_PATH= # nothing", "duetime.db"),
        ('TIMER_DB_PATH=""', "duetime.db"),
    ],
)
def test_the_env_file_is_parsed_like_a_shell(line: str, url: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(line)
    assert load({}, tmp_path).database_path == Path(url)


@pytest.mark.parametrize(
    "line", ["PORT", "PORT: 3000", "=3000", "PORT='3000", 'PORT="3000', "PORT='30'00", 'PORT="\\"']
)
def test_an_invalid_line_in_the_env_file_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"HOST=localhost\n{line}\n")
    assert refusal(tmp_path).startswith(".env line 2: must ")


def test_toml_accepts_typed_values_and_names_in_either_case(tmp_path: Path) -> None:
    (tmp_path / "duetime.toml").write_text(
        'PORT = 8080\nduetime_auto_namespaces = true\nduetime_retention = "7d"\n'
        'duetime_allow_private_targets = ["10.0.0.0/8", "fd00::/8"]\n'
    )
    settings = load({}, tmp_path)
    assert (settings.port, settings.auto_namespaces, settings.retention_ms) == (8080, True, 7 * DAY_MS)
    assert settings.allow_private_targets == ("10.0.0.0/8", "fd00::/8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shards = 4", "SHARDS in duetime.toml is not a setting; did you mean DUETIME_SHARDS?"),
        ("Port = 4", "Port in duetime.toml must be all upper case or all lower case"),
        ("port = 4\nPORT = 5", "PORT appears twice in duetime.toml"),
        ("port = 1.5", "PORT in duetime.toml: must be a string, a whole number"),
        ("[server]\nport = 4", "SERVER in duetime.toml: must be a string"),
        ("port = ", "duetime.toml: Invalid value"),
        ("port = 99999", "PORT=99999: must be a whole number"),
    ],
)
def test_an_invalid_toml_file_is_a_one_line_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "duetime.toml").write_text(text)
    assert refusal(tmp_path).startswith(message)


@pytest.mark.parametrize("name", [".env", "duetime.toml"])
def test_an_unreadable_file_is_a_one_line_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PORT='\xff'\n")
    assert refusal(tmp_path) == f"{name}: must be UTF-8"
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert refusal(tmp_path).startswith("can't read ")


def test_a_configured_key_creates_no_file(tmp_path: Path) -> None:
    assert ensure_api_key(Settings(api_key=KEY), tmp_path) == (KEY, None)
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_generated_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    umask = os.umask(0o277)
    try:
        key, path = ensure_api_key(Settings(), tmp_path)
    finally:
        os.umask(umask)
    assert path == tmp_path / "duetime.key"
    assert len(key) == 43
    assert path.read_text() == key + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_api_key(Settings(), tmp_path) == (key, path)
    path.unlink()
    assert ensure_api_key(Settings(), tmp_path)[0] != key


def test_a_damaged_or_unwritable_key_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "duetime.key").write_text("short\n")
    with pytest.raises(SettingsError, match=r"duetime\.key does not contain a key of 32 to 512") as raised:
        ensure_api_key(Settings(), tmp_path)
    assert "short" not in str(raised.value)
    with pytest.raises(SettingsError, match=r"can't read or create .*No such file"):
        ensure_api_key(Settings(), tmp_path / "absent")


def test_a_symlink_in_place_of_the_key_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "duetime.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="File exists"):
        ensure_api_key(Settings(), tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_key_that_could_not_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingsError, match="No space left"):
        ensure_api_key(Settings(), tmp_path)
    assert list(tmp_path.iterdir()) == []
