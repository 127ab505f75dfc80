"""Generates and stores the API key in ``duetime.key``, beside the database, when ``API_KEY`` is not set."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from duetime.errors import SettingsError
from duetime.settings import Settings
from duetime.settings.values import API_KEY_CHARS_MAX, API_KEY_CHARS_MIN, is_key

KEY_FILE = "duetime.key"


def ensure_api_key(settings: Settings, directory: Path) -> tuple[str, Path | None]:
    """Return the key that clients must send: ``API_KEY``, or else the key in ``duetime.key`` in ``directory``.

    Generates the file if it is missing. Returns its path too when the key comes from the file, for the log.
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
        raise SettingsError(f"can't read or create {path}: {error.strerror}; set API_KEY instead") from None
    if not is_key(key):
        raise SettingsError(
            f"{path} does not contain a key of {API_KEY_CHARS_MIN} to {API_KEY_CHARS_MAX} visible ASCII characters: "
            "delete it to generate a new one, or set API_KEY"
        )
    return key, path


def _make_key(path: Path) -> str:
    key = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # the umask may have removed bits
            file.write(key + "\n")
            file.flush()
            os.fsync(descriptor)  # clients will use this key: it must survive a power loss
    except OSError:
        path.unlink(missing_ok=True)  # a partial key would make every later start fail
        raise
    return key
