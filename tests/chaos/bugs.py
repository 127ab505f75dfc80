"""Bugs to plant in an instance, each a mistake that looks right: the suite must catch every one of them."""

from __future__ import annotations

from collections.abc import Callable

BUGS: dict[str, Callable[[], None]] = {}
