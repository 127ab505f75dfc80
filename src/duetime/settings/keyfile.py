"""The API key that makes itself: ``duetime.key`` beside the database, for whoever did not set one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from duetime.errors import SettingsError
from duetime.settings import Settings
from duetime.settings.values import API_KEY_CHARS_MAX, API_KEY_CHARS_MIN, is_key

KEY_FILE = "duetime.key"


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
    if not is_key(key):
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
