"""Bugs to plant in an instance, each a mistake that looks right: the suite must catch every one of them.

A bug changes one thing of the program in memory, before it starts. It asserts that there was something to change, so
that a bug which the program has outgrown does not pass for one that was caught.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from duetime.clock import SystemClock
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Timer
from duetime.service import NewTimer, Service
from duetime.store import Begun
from duetime.stores import postgres_statements as sql
from duetime.stores.postgres import PostgresStore


def _replaced(statement: str, old: str, new: str) -> str:
    assert old in statement, f"there is no {old!r} in the statement any more"
    return statement.replace(old, new)


def no_share_lock() -> None:
    """The fence is a condition and takes no lock."""
    for name in ("BEGIN", "BEGIN_LANES", "RECORD"):
        setattr(sql, name, _replaced(getattr(sql, name), " FOR SHARE", ""))


def version_only() -> None:
    """The fence compares the version and not the owner."""
    for name in ("BEGIN", "BEGIN_LANES", "RECORD"):
        setattr(sql, name, _replaced(getattr(sql, name), "owner_id = $1", "$1::bytea IS NOT NULL"))


def forward_cursor() -> None:
    """A look starts behind the last timer that was begun."""
    statement, begin, looked_to = sql.BEGIN, PostgresStore.begin, 0
    # Alone, and beside other instances.
    dues = "AND fire_at <= (SELECT now FROM clock)", "AND fire_at - 0 <= (SELECT now FROM clock)"

    async def begin_behind(self: PostgresStore, *arguments: Any, **named: Any) -> Begun:
        nonlocal looked_to
        sql.BEGIN = statement
        for due in dues:
            sql.BEGIN = _replaced(sql.BEGIN, due, f"{due} AND fire_at > {looked_to}")
        begun = await begin(self, *arguments, **named)
        looked_to = max([looked_to, *(timer.fire_at for timer in begun.timers)])
        return begun

    PostgresStore.begin = begin_behind  # type: ignore[method-assign, assignment]


def answer_before_commit() -> None:
    """A create is answered while its write is under way."""
    writing: set[asyncio.Task[None]] = set()

    async def write(self: Service, timer: Timer) -> None:
        try:
            await self._store.put(timer)
            self._nudge(timer.fire_at)
        except StoreError:
            pass

    async def create(self: Service, new: NewTimer) -> tuple[Timer, bool]:
        timer = await self._made(new)
        task = asyncio.create_task(write(self, timer))
        writing.add(task)
        task.add_done_callback(writing.discard)
        return timer, True

    Service.create = create  # type: ignore[method-assign]


def blind_retry() -> None:
    """A begin or a record whose answer was lost is tried again as if nothing had been written."""

    def blind(verb: Callable[..., Any]) -> Callable[..., Any]:
        async def again(*arguments: Any, **named: Any) -> Any:
            try:
                return await verb(*arguments, **named)
            except StoreIndeterminate as error:
                raise StoreUnavailable(str(error)) from error

        return again

    PostgresStore.begin = blind(PostgresStore.begin)  # type: ignore[method-assign]
    PostgresStore.begin_lanes = blind(PostgresStore.begin_lanes)  # type: ignore[method-assign]
    PostgresStore.record = blind(PostgresStore.record)  # type: ignore[method-assign]


def local_clock() -> None:
    """Leases and due times are judged by the instance's clock."""
    clock = SystemClock()
    PostgresStore._now = lambda self: clock.now()  # type: ignore[method-assign]


def new_delivery_id() -> None:
    """Each attempt has a delivery id of its own."""
    stable = Timer.delivery_id.fget  # type: ignore[attr-defined]
    Timer.delivery_id = property(lambda timer: f"{stable(timer)}-{timer.attempt}")  # type: ignore[assignment]


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__.replace("_", "-"): bug
    for bug in (
        no_share_lock,
        version_only,
        forward_cursor,
        answer_before_commit,
        blind_retry,
        local_clock,
        new_delivery_id,
    )
}
