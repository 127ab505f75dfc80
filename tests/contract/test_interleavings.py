"""Races between owners and clients on every database server. ``test_postgres_bugs`` and ``test_mysql_bugs`` show that
the audits detect a broken fence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from duetime.stores.postgres import pool as postgres_pool
from tests.clocks import ManualClock
from tests.contract.audits import AUDITS
from tests.contract.races import INTERLEAVINGS, OWNERS, Actors, Interleaving, gathered, play, run_interleaving

SEEDS = {"postgres15": range(1_000), "postgres18": range(1_000), "mariadb": range(200), "mysql9": range(200)}
"""MySQL commits more slowly."""


@pytest.fixture(params=AUDITS)
def actors(request: pytest.FixtureRequest, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    # The races are for rows, not for the disk.
    monkeypatch.setitem(postgres_pool._SESSION, "synchronous_commit", "off")
    yield from gathered(request.param, AUDITS[request.param], request, clock)


async def test_random_schedules_violate_no_guarantee(actors: Actors, request: pytest.FixtureRequest) -> None:
    begun = recorded = 0
    seeds = SEEDS[request.node.callspec.params["actors"]]
    if "DUETIME_SEED" in os.environ:
        seeds = range(int(os.environ["DUETIME_SEED"]), int(os.environ["DUETIME_SEED"]) + 1)
    for seed in seeds:
        await play(actors, seed)
        begun, recorded = begun + len(actors.begun), recorded + len(actors.recorded)
    # The schedules prove little if nothing happens in them.
    assert len(seeds) == 1 or min(begun, recorded) > len(seeds) // 2


async def test_returning_instances_do_not_deadlock(actors: Actors) -> None:
    """Each instance finds the others expired and deletes them, while they renew."""
    for _ in range(300):
        await asyncio.gather(*(actors.owners[owner_id].renew(owner_id, 1) for owner_id in OWNERS))
        actors.clock.advance(1)


@pytest.mark.parametrize("interleaving", INTERLEAVINGS, ids=lambda interleaving: interleaving.__name__)
async def test_forced_interleaving_violates_no_guarantee(actors: Actors, interleaving: Interleaving) -> None:
    await run_interleaving(actors, interleaving)
