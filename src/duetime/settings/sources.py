"""Reads ``.env`` and ``duetime.toml`` into names and text values."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from duetime.errors import SettingsError
from duetime.settings.values import shown

_ENV_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.]*)\s*=(.*)").fullmatch
_SINGLE_QUOTED = re.compile(r"'([^']*)'\s*(?:#.*)?").fullmatch
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?').fullmatch
_COMMENT = re.compile(r"\s#.*")


def read_env(path: Path) -> dict[str, str]:
    """Read ``KEY=value`` lines. The last line for a name wins; inside double quotes a backslash escapes."""
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
        raise SettingsError(f"{where}: must end with the closing quote of its value")
    return quoted[1] if bare.startswith("'") else re.sub(r"\\(.)", r"\1", quoted[1])


def read_toml(path: Path) -> dict[str, str]:
    try:
        document = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path.name}: {shown(str(error))}") from None
    values: dict[str, str] = {}
    for key, value in document.items():
        name = key.upper()
        if key not in (name, name.lower()):
            raise SettingsError(f"{shown(key)} in {path.name} must be all upper case or all lower case")
        if name in values:
            raise SettingsError(f"{name} appears twice in {path.name}")
        values[name] = _toml_text(name, value)
    return values


def _toml_text(name: str, value: object) -> str:
    if isinstance(value, str | int):  # bool is an int, and its text parses as a switch
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    raise SettingsError(f"{name} in duetime.toml: must be a string, a whole number, true, false or a list of strings")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path.name}: must be UTF-8") from None
