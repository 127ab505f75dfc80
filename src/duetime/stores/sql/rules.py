"""The rules of ``lifecycle`` in SQL that every dialect understands, for statements that change timers themselves.

``tests/unit/test_sql_rules.py`` compares them with ``lifecycle``, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping

from duetime.lifecycle import ATTEMPT_GRACE_MS
from duetime.stores.sql.columns import MOVE, TIMER, values_of
from duetime.stores.unreadable import QUARANTINED


def begun(*, now: str, version: str, of: str = "") -> dict[str, str]:
    """``lifecycle.begin`` as column assignments. MySQL evaluates assignments in order and sees earlier ones, so each
    comes after those that read its column. ``of`` is the table name with a dot, where column names are ambiguous."""
    return {
        "lost": f"{of}lost + CASE WHEN {of}status = 'executing' THEN 1 ELSE 0 END",
        "status": "'executing'",
        "attempt": f"{of}attempt + 1",
        "started_at": f"coalesce({of}started_at, {now})",
        "deadline_at": f"{now} + {of}timeout_ms + {ATTEMPT_GRACE_MS}",
        "version": version,
        "updated_at": now,
        "revision": f"{of}revision + 1",
    }


NEVER_AT = 1 << 62
"""The ``fire_at`` of a quarantined timer: no poll finds it."""


def quarantined() -> dict[str, str]:
    """Column assignments that quarantine a begun timer and undo its begin, as ``lifecycle.defer`` would; in an order
    that suits MySQL."""
    return {
        "status": f"'{QUARANTINED}'",
        "fire_at": str(NEVER_AT),
        "revision": "revision + 1",
        "started_at": "CASE WHEN attempt > 1 THEN started_at END",
        "attempt": "attempt - 1",
        "deadline_at": "NULL",
        "version": "0",
    }


def assigned(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def ended(revision: str) -> dict[str, str]:
    """The assignments common to all executing timers of this revision that become final."""
    return {"revision": f"{revision} + 1", "deadline_at": "NULL", "version": "0"}


def completed(revision: str, now: str) -> dict[str, str]:
    """The assignments common to all executing timers of this revision that complete at ``now``."""
    return ended(revision) | {"status": "'completed'", "last_error": "NULL", "executed_at": now}


END = tuple(name for name in MOVE if name not in (*ended(""), "firing", "execute_at", "fire_at", "started_at"))
"""The other columns that change when an executing timer becomes final."""
COMPLETE = tuple(name for name in END if name not in (*completed("", ""), "attempt", "failures", "lost"))
"""The other columns that change when an executing timer completes."""

end_row, complete_row = values_of(END), values_of(COMPLETE)

QUARANTINED_TIMER = ", ".join(
    f"quarantine.{name}" if name == "status" else f"timers.{name}" for name in TIMER.split(", ")
)
"""The columns ``TIMER`` of a quarantined timer, with the status to restore."""
