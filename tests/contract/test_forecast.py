"""forecast: how many pending timers fall due in each of several time spans, counted up to a limit."""

from __future__ import annotations

from duetime.instants import EPOCH
from duetime.model import Status
from duetime.store import Store
from tests.clocks import START
from tests.contract.timers import ALICE, ended, holding, spread, timer, with_namespace, with_timers


async def test_forecast_span_includes_its_start_and_excludes_its_end(store: Store) -> None:
    times = (-1, 0, 0, 1, 9, 10, 19, 20)
    await with_timers(store, *(timer(f"t{n}", at=START + ms) for n, ms in enumerate(times)))
    bounds = [START, START + 10, START + 10, START + 20]
    assert await store.forecast(bounds, 100) == [4, 0, 2]
    assert await store.forecast([EPOCH, START], 100) == [1]
    assert await store.forecast([START], 100) == await store.forecast([], 100) == []


async def test_each_forecast_count_stops_at_the_limit(store: Store) -> None:
    await with_timers(store, *spread(30, at=START))
    assert await store.forecast([START, START + 3, START + 20, START + 100], 5) == [3, 5, 5]


async def test_forecast_counts_only_pending_timers_by_fire_at(store: Store) -> None:
    await with_namespace(store, "paused", paused=True)
    await with_timers(
        store,
        timer("retried", at=START, fire_at=START + 15),
        timer("waiting", at=START + 12, namespace="paused"),
        timer("begun", at=START),
        ended("done", Status.COMPLETED, fire_at=START + 11, execute_at=START + 11),
    )
    assert len((await store.begin(ALICE, await holding(store), 5)).timers) == 1
    assert await store.forecast([EPOCH, START + 10, START + 20], 100) == [0, 2]
