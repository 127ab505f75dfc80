"""The Cassandra store on three nodes, of which one is killed or paused under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest

from duetime.clock import SystemClock
from duetime.errors import StoreError
from duetime.stores.cassandra.store import CassandraStore
from tests.cassandra import Cassandra
from tests.conftest import _started
from tests.contract.stores import SHARDS
from tests.contract.timers import ALICE, BOB, completed, ids, timer

pytestmark = pytest.mark.cassandra

FINISH_SECONDS_MAX = 60.0


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cassandra]:
    with _started(lambda: Cassandra(3, sync="periodic")) as server:
        yield server


async def test_timers_survive_the_loss_and_the_pause_of_a_node(three_nodes: Cassandra) -> None:
    url = three_nodes.fresh()
    put: set[str] = set()
    unsure: set[str] = set()
    begun: Counter[str] = Counter()
    recorded: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    putting = True
    mine, theirs = (CassandraStore(url, shards=SHARDS, takeover_now=True) for _ in range(2))
    for store in (mine, theirs):
        await store.open()

    async def client(store: CassandraStore, name: str) -> None:
        for number in count():
            if not putting:
                return
            at = SystemClock().now()
            some = [timer(f"{name}-{number}-{n}", at=at, shard=number % SHARDS) for n in range(5)]
            try:
                await store.put_many(some)
                put.update(ids(some))
            except StoreError as error:
                errors[type(error).__name__] += 1
                unsure.update(ids(some))
            await asyncio.sleep(0.01)

    async def owner(store: CassandraStore, owner_id: bytes, shards: range) -> None:
        held: dict[int, int] = {}
        while putting or put - recorded.keys():
            try:
                missing = [shard for shard in shards if shard not in held]
                if missing:
                    held |= await store.claim(owner_id, missing, 60_000)
                answer = await store.begin(owner_id, held, 40)
                for shard in answer.refused | answer.unknown:
                    held.pop(shard, None)
                begun.update(ids(answer.timers))
                changes = [(t, completed(t, SystemClock().now())) for t in answer.timers]
                for (before, _), done in zip(changes, await store.record(owner_id, changes), strict=True):
                    recorded[before.id] += done is True
                    if done is None:
                        held.pop(before.shard, None)
            except StoreError as error:
                errors[type(error).__name__] += 1
                held.clear()
            await asyncio.sleep(0.01)

    tasks = [
        asyncio.ensure_future(owner(mine, ALICE, range(4))),
        asyncio.ensure_future(owner(theirs, BOB, range(4, 8))),
    ]
    clients = [asyncio.ensure_future(client(store, name)) for store, name in ((mine, "mine"), (theirs, "theirs"))]
    try:
        await asyncio.sleep(5)
        three_nodes.nodes[2].kill()
        await asyncio.sleep(8)
        restarting = asyncio.to_thread(three_nodes.nodes[2].start)
        await restarting
        three_nodes.nodes[1].pause()
        await asyncio.sleep(8)
        three_nodes.nodes[1].resume()
        await asyncio.sleep(5)
        putting = False
        await asyncio.gather(*clients)
        done, unfinished = await asyncio.wait(tasks, timeout=FINISH_SECONDS_MAX)
        print(
            len(put), "put,", len(unsure), "unsure,", dict(errors), Counter(recorded.values()), Counter(begun.values())
        )
        assert not unfinished, f"lost: {len(put - recorded.keys())}"
        for task in done:
            task.result()
        assert max(recorded.values()) == 1 and not recorded.keys() - put - unsure
    finally:
        putting = False
        for task in (*tasks, *clients):
            task.cancel()
        for store in (mine, theirs):
            with contextlib.suppress(StoreError):
                await store.close()
