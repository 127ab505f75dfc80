"""What ``duetime doctor`` found: one line for each check."""

from __future__ import annotations

from msgspec import Struct


class Finding(Struct, frozen=True):
    check: str
    ok: bool
    message: str
