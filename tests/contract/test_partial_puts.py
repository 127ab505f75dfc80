"""A put that fails after it has written some of its timers never reports that nothing was written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from duetime.errors import Contended, StoreIndeterminate, StoreUnavailable
from duetime.model import Status
from duetime.store import Store
from duetime.stores.mysql.store import MysqlStore
from tests.contract.timers import another, timer, with_timers

SERVERS_ONLY = True
"""The stores whose puts insert first and then read the existing timers."""


def fail_reads(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> Any:
        raise StoreUnavailable("the connection broke")

    monkeypatch.setattr(store._pool, "read", broken)


def hide_existing_timers(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the existing timers always disappeared after the insert had found them."""

    async def nothing(*statements: str) -> list[Any]:
        return [[] for _ in statements] if isinstance(store, MysqlStore) else []

    monkeypatch.setattr(store._pool, "read", nothing)


async def test_partly_written_put_is_indeterminate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await with_timers(store, there := timer("there"))
    with monkeypatch.context() as patch:
        fail_reads(store, patch)
        with pytest.raises(StoreIndeterminate):
            await store.put_many([another(there), timer("new")])
    assert (await store.tally())[Status.PENDING] == 2


async def test_partly_written_group_of_puts_is_indeterminate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await with_timers(store, there := timer("there"))
    with monkeypatch.context() as patch:
        fail_reads(store, patch)
        puts = (store.put(t) for t in (another(there), timer("new"), timer("other")))
        errors = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(error) for error in errors] == [StoreIndeterminate] * 3
    assert (await store.tally())[Status.PENDING] == 3


async def test_put_that_wrote_nothing_is_unavailable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await with_timers(store, there := timer("there"))
    fail_reads(store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        await store.put_many([another(there)])


async def test_contended_put_is_indeterminate_if_some_timers_were_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_timers(store, there := timer("there"))
    with monkeypatch.context() as patch:
        hide_existing_timers(store, patch)
        with pytest.raises(Contended):
            await store.put_many([another(there)])
        with pytest.raises(StoreIndeterminate):
            await store.put_many([another(there), timer("new")])
    assert (await store.tally())[Status.PENDING] == 2
