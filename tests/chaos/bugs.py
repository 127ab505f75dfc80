"""Bugs to plant in an instance, each a plausible mistake: the suite must catch all of them.

A bug changes one thing of the program in memory, before it starts. It asserts that there was something to change, so a
bug that no longer fits the code does not count as caught. Bugs of the fence's statement belong to one database; all
others apply to every store that instances share.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from duetime.clock import SystemClock
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Timer
from duetime.service import NewTimer, Service
from duetime.store import Begun
from duetime.stores.mysql import statements as mysql
from duetime.stores.mysql.due import Poll
from duetime.stores.mysql.pool import MysqlPool, Result
from duetime.stores.mysql.store import MysqlStore
from duetime.stores.postgres import pool
from duetime.stores.postgres import statements as sql
from duetime.stores.postgres.store import PostgresStore

SHARED: tuple[type[Any], ...] = (PostgresStore, MysqlStore)


def _replaced(statement: str, old: str, new: str) -> str:
    assert old in statement, f"there is no {old!r} in the statement any more"
    return statement.replace(old, new)


def no_share_lock() -> None:
    """The fence is a condition but takes no lock."""
    for name in ("BEGIN", "BEGIN_LANES", "RECORD"):
        setattr(sql, name, _replaced(getattr(sql, name), " FOR SHARE", ""))


def version_only() -> None:
    """The fence compares the version but not the owner."""
    for name in ("BEGIN", "BEGIN_LANES", "RECORD"):
        setattr(sql, name, _replaced(getattr(sql, name), "owner_id = $1", "$1::bytea IS NOT NULL"))


def ungated() -> None:
    """MySQL: the writes of a packet do not check whether the fence let them pass."""
    write = MysqlPool.write

    async def forced(self: MysqlPool, *statements: str, then: Any = ()) -> list[Result]:
        return await write(
            self, *(text.replace("AND @go", "").replace("WHERE @go", "") for text in statements), then=then
        )

    assert "AND @go" in inspect.getsource(mysql), "packets are gated by something else"
    MysqlPool.write = forced  # type: ignore[method-assign]


def forward_cursor() -> None:
    """A look starts after the last timer that was begun."""
    statement, looked_to = sql.BEGIN, 0
    # Alone, and next to other instances.
    dues = "AND fire_at <= (SELECT now FROM clock)", "AND fire_at - 0 <= (SELECT now FROM clock)"
    assert all(due in statement for due in dues)
    eligible = Poll._eligible.fget  # type: ignore[attr-defined]
    Poll._eligible = property(lambda poll: f"{eligible(poll)} AND fire_at > {looked_to}")  # type: ignore[assignment]

    def behind(begin: Callable[..., Any]) -> Callable[..., Any]:
        async def begin_behind(*arguments: Any, **named: Any) -> Begun:
            nonlocal looked_to
            sql.BEGIN = statement
            for due in dues:
                sql.BEGIN = sql.BEGIN.replace(due, f"{due} AND fire_at > {looked_to}")
            begun: Begun = await begin(*arguments, **named)
            looked_to = max([looked_to, *(timer.fire_at for timer in begun.timers)])
            return begun

        return begin_behind

    for store in SHARED:
        store.begin = behind(store.begin)


def answer_before_commit() -> None:
    """A create is acknowledged before it is committed."""
    writing: set[asyncio.Task[None]] = set()

    async def write(self: Service, timer: Timer) -> None:
        try:
            await self._store.put(timer)
            self._nudge(timer.fire_at)
        except StoreError:
            pass

    async def create(self: Service, new: NewTimer) -> tuple[Timer, bool]:
        timer = await self._build(new)
        task = asyncio.create_task(write(self, timer))
        writing.add(task)
        task.add_done_callback(writing.discard)
        return timer, True

    Service.create = create  # type: ignore[method-assign]


def blind_retry() -> None:
    """A begin or a record with a lost response is retried as if nothing had been written."""

    def blind(verb: Callable[..., Any]) -> Callable[..., Any]:
        async def again(*arguments: Any, **named: Any) -> Any:
            try:
                result = await verb(*arguments, **named)
            except StoreIndeterminate as error:
                raise StoreUnavailable(str(error)) from error
            if isinstance(result, Begun):
                return msgspec.structs.replace(result, unknown=frozenset())
            if None in result:
                raise StoreUnavailable("planted")
            return result

        return again

    for store in SHARED:
        for name in ("begin", "begin_lanes", "record"):
            setattr(store, name, blind(getattr(store, name)))


def local_clock() -> None:
    """Leases and due times use the instance's clock."""
    clock = SystemClock()
    PostgresStore._now = lambda self: clock.now()  # type: ignore[method-assign]
    MysqlStore._virtual = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]


def new_delivery_id() -> None:
    """Each attempt has its own delivery id."""
    stable = Timer.delivery_id.fget  # type: ignore[attr-defined]
    Timer.delivery_id = property(lambda timer: f"{stable(timer)}-{timer.attempt}")  # type: ignore[assignment]


def asynchronous_commit() -> None:
    """A commit waits for no disk, neither the server's nor a standby's."""
    assert pool._SESSION["synchronous_commit"] == "on"
    pool._SESSION["synchronous_commit"] = "off"


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__.replace("_", "-"): bug
    for bug in (
        no_share_lock,
        version_only,
        ungated,
        forward_cursor,
        answer_before_commit,
        blind_retry,
        local_clock,
        new_delivery_id,
        asynchronous_commit,
    )
}
