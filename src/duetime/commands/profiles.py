"""Profiles: named services, with their keys and namespaces, in the user's configuration file.

A value comes from the flag, else the environment, else the profile, else the default. A typed ``--profile`` counts as a
flag: `duetime --profile staging delete …` must not reach the service of a TIMER_URL that happens to be set. A profile's
key is sent only to the profile's service.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from msgspec import Struct

from duetime.client.exchange import KEY_VARIABLE, URL_VARIABLE
from duetime.commands import output
from duetime.model import DEFAULT_NAMESPACE

PROFILE_VARIABLE = "DUETIME_PROFILE"
ALL_NAMESPACES = "*"


class ProfileError(Exception):
    """The configuration file can't be used, or has no such profile."""


class Profile(Struct, frozen=True, kw_only=True):
    server: str | None = None
    key: str | None = None
    key_file: str | None = None
    namespace: str | None = None


def config_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "duetime" / "config.toml"


def load() -> dict[str, Profile]:
    import tomllib  # only with a profile: it takes milliseconds

    path = config_file()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ProfileError(f"can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ProfileError(f"{path} is not valid TOML: {error}") from None
    found = {name: _profile(path, name, table) for name, table in tables.items()}
    if any(profile.key for profile in found.values()):
        _warn_if_open(path)
    return found


def _profile(path: Path, name: str, table: object) -> Profile:
    if not isinstance(table, dict):
        raise ProfileError(f"{path}: {name} is outside a profile: put it in a table like [prod]")
    for setting, value in table.items():
        if setting not in Profile.__struct_fields__:
            raise ProfileError(
                f"{path}: profile {name}: unknown setting {setting!r}; the settings are "
                f"{', '.join(Profile.__struct_fields__)}"
            )
        if not isinstance(value, str) or not value:
            raise ProfileError(f"{path}: profile {name}: {setting} must be a non-empty string")
    if "key" in table and "key_file" in table:
        raise ProfileError(f"{path}: profile {name}: give key or key_file, not both")
    return Profile(**table)


def _warn_if_open(path: Path) -> None:
    if path.stat().st_mode & 0o044:
        print(
            f"duetime: other users of this machine can read the key in {path}: run `chmod 600 {path}`", file=sys.stderr
        )


def _key(profile: Profile) -> str | None:
    if profile.key_file is None:
        return profile.key
    path = config_file().parent / Path(profile.key_file).expanduser()
    try:
        key = path.read_text(encoding="ascii", errors="replace").strip()
        _warn_if_open(path)
    except OSError as error:
        raise ProfileError(f"can't read the key_file {path}: {error.strerror}") from None
    return key


def chosen(options: argparse.Namespace) -> str | None:
    return options.profile or os.environ.get(PROFILE_VARIABLE, "").strip() or None


def apply(options: argparse.Namespace) -> None:
    """Fill in the address of the service, the key and the namespace that were not given."""
    options.home = DEFAULT_NAMESPACE  # the namespace of a timer that is named by its id alone
    options.namespace_given = getattr(options, "namespace", None) is not None
    name = chosen(options)
    if name is not None:
        _fill_in(options, _named(name))
    if getattr(options, "namespace", None) == ALL_NAMESPACES and options.command != "create":
        options.namespace = None


def _named(name: str) -> Profile:
    known = load()
    if name not in known:
        path = config_file()
        has = f"it has {', '.join(sorted(known))}" if known else "the file has no profiles or does not exist"
        raise ProfileError(f"there is no profile {name!r} in {path}: {has}")
    return known[name]


def _fill_in(options: argparse.Namespace, profile: Profile) -> None:
    def environment(name: str) -> str | None:
        return None if options.profile else os.environ.get(name, "").strip() or None

    options.server = options.server or environment(URL_VARIABLE) or profile.server
    its_own = profile.server is None or options.server == profile.server
    options.key = options.key or environment(KEY_VARIABLE) or (_key(profile) if its_own else None)
    if profile.namespace is not None:
        options.home = profile.namespace
        if hasattr(options, "namespace") and options.namespace is None:
            options.namespace = profile.namespace


def show(options: argparse.Namespace) -> int:
    known, active = load(), chosen(options)
    if options.json:
        shown = [
            {
                "name": name,
                "server": profile.server,
                "namespace": profile.namespace,
                "key": bool(profile.key or profile.key_file),
                "active": name == active,
            }
            for name, profile in known.items()
        ]
        output.print_json({"profiles": shown})
    elif known:
        rows = [
            (
                name,
                "active" if name == active else "",
                profile.server or "default",
                profile.namespace or "",
                "set" if profile.key else profile.key_file or "none",
            )
            for name, profile in known.items()
        ]
        heads = ("PROFILE", "", "SERVER", "NAMESPACE", "KEY")
        print(*output.table(heads, [list(map(output.safe, row)) for row in rows], free_text=(2,)), sep="\n")
    else:
        print(f"no profiles: {config_file()} does not exist or is empty", file=sys.stderr)
    return 0
