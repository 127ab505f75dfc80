"""Hints reach all instances of the same database, once each has read the other's row, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from duetime.instants import Instant
from duetime.store import About, Hint
from tests.clocks import ManualClock
from tests.contract.stores import STORES, Contender

ALICE, BOB, CAROL = (bytes([n]) * 16 for n in (1, 2, 3))
LEASE_MS = 60_000
PATIENCE_SECONDS = 20.0


async def eventually(condition: Callable[[], object], meanwhile: Callable[[], None] = lambda: None) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            meanwhile()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", [name for name, contender in STORES.items() if contender.server])
async def test_hint_reaches_instances_of_the_same_database_only(
    name: str, request: pytest.FixtureRequest, clock: ManualClock
) -> None:
    contender: Contender = STORES[name]
    server = request.getfixturevalue(contender.server or "")
    shared = server.fresh()
    stores = {
        owner_id: await contender.opened(url, clock)
        for owner_id, url in ((ALICE, shared), (BOB, shared), (CAROL, server.fresh()))
    }
    heard: dict[bytes, list[Hint]] = {owner_id: [] for owner_id in stores}
    try:
        for owner_id, store in stores.items():
            store.on_hint(heard[owner_id].append)
            await store.renew(owner_id, LEASE_MS, About(serving=owner_id != BOB))
        await stores[ALICE].renew(ALICE, LEASE_MS)
        for speaker, listener, hint in ((ALICE, BOB, Hint(due_at=Instant(5))), (BOB, ALICE, Hint(namespaces=True))):
            await eventually(lambda listener=listener: heard[listener], lambda s=speaker, h=hint: stores[s].hint(h))  # type: ignore[misc]
            assert set(heard[listener]) == {hint}
        assert heard[CAROL] == []
    finally:
        for store in stores.values():
            await store.close()
