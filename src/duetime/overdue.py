"""When a timer is overdue, and why: the same reasons in the metric, the log, the web page and the command line.

paused         the namespace is paused
destination    the destination is full or slow, or its circuit breaker is open
no_owner       no instance owns the shard
behind         the instance does not keep up, or has stopped polling
store          the store is slow or does not respond
"""

from __future__ import annotations

import enum

from duetime.model import SECOND_MS

OVERDUE_MS = 2 * SECOND_MS
"""A timer that has been due for this long is overdue."""


class Reason(enum.StrEnum):
    PAUSED = "paused"
    DESTINATION = "destination"
    NO_OWNER = "no_owner"
    BEHIND = "behind"
    STORE = "store"


OPERATOR_REASONS = (Reason.NO_OWNER, Reason.BEHIND, Reason.STORE)
"""Reasons that operators have to fix. The other two depend on clients (paused) and receivers (destination)."""

TEXTS = {
    Reason.PAUSED: "in paused namespaces",
    Reason.DESTINATION: "for destinations that are full, slow or do not respond",
    Reason.NO_OWNER: "in shards without an owner",
    Reason.BEHIND: "because the instances do not keep up",
    Reason.STORE: "because the store is slow or does not respond",
}
"""How a sentence about waiting timers goes on. The web page has the same texts in ``overview.js``."""
