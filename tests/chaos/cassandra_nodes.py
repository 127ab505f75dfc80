"""A cluster of three Cassandra nodes for chaos tests, and the faults of its nodes.

Cassandra has no triggers that could witness a write of a stale owner, so there is no witness: the other counts of the
checker stand for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from duetime.model import Status
from duetime.stores.cassandra.driver import Session
from duetime.stores.cassandra.rows import ROW, row_of
from duetime.stores.cassandra.schema import TIMER
from duetime.stores.cassandra.store import CassandraStore
from tests.cassandra import Cassandra, Node
from tests.chaos.cluster import SHARDS
from tests.chaos.databases import Stored
from tests.chaos.ledger import Fault
from tests.chaos.world import Scenario, World

NODES = 3
SETTLE_SECONDS = 3.0
"""How long after a fault requests that it interrupted may still be unfinished."""
PAUSE_SECONDS = 8.0
GONE_SECONDS = 15.0
"""How long the others need to consider a node down."""
CLOCK_MS = 500

_TIMERS = f"SELECT {ROW} FROM duetime.timers WHERE shard = ? AND kind = {TIMER}"
_REPLICATION = f"{{'class': 'NetworkTopologyStrategy', 'replication_factor': {NODES}}}"


class CassandraDatabase:
    answers: Any = None
    """The driver connects to each node directly, not through a proxy."""

    def __init__(self, server: Callable[[], Cassandra]) -> None:
        self.server: Any = server()
        self._session: Session | None = None

    @property
    def nodes(self) -> list[Node]:
        nodes: list[Node] = self.server.nodes
        return nodes

    @property
    def url(self) -> str:
        address: str = self.server.url("duetime")
        return address.replace("cassandra://", "cassandra://user:password@")

    async def prepare(self, shards: int, roles: Sequence[str]) -> None:
        self.server.run(f"CREATE KEYSPACE duetime WITH replication = {_REPLICATION}")
        store = CassandraStore(self.url, shards=shards)
        await store.open()
        await store.close()

    async def _read(self, statement: str, *arguments: Any) -> list[Any]:
        if self._session is None:
            self._session = Session([(node.address, self.server.port) for node in self.nodes])
            await asyncio.to_thread(self._session.connect)
        return await self._session.read(statement, *arguments)

    async def instances(self) -> dict[bytes, tuple[str, bool]]:
        rows = await self._read("SELECT key, about, serving FROM duetime.cluster WHERE part = 0 AND kind = 1")
        return {key: (msgspec.json.decode(about)["name"], bool(serving)) for key, about, serving in rows if about}

    async def owners(self) -> dict[int, bytes | None]:
        rows = await self._read("SELECT key, owner FROM duetime.cluster WHERE part = 0 AND kind = 0")
        return {int.from_bytes(key, "big"): owner or None for key, owner in rows}

    async def _rows(self) -> list[Any]:
        found = await asyncio.gather(*(self._read(_TIMERS, shard) for shard in range(SHARDS)))
        return [row_of(values) for rows in found for values in rows if values[1] is not None]

    async def in_flight(self, owner_id: bytes) -> frozenset[str]:
        owners = await self.owners()
        executing = [row.timer for row in await self._rows() if row.status == Status.EXECUTING]
        return frozenset(timer.id for timer in executing if owners[timer.shard] == owner_id)

    async def live(self) -> list[Any]:
        return [row.timer for row in await self._rows() if not Status(row.status).final]

    async def due(self, before_ms: int) -> int:
        return sum(timer.status is Status.PENDING and timer.fire_at < before_ms for timer in await self.live())

    async def stored(self) -> list[Stored]:
        timers = [row.timer for row in await self._rows()]
        return [Stored(timer.id, timer.status.value, timer.last_error) for timer in timers]

    async def stale(self) -> list[Any]:
        return []

    def crash(self) -> None:
        """Kill all nodes. ``server.start`` starts them again."""
        self.server.kill()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self.server.close()


async def _each(world: World, strike: Callable[[World, Node], Awaitable[None]]) -> None:
    """Do harm to one node after the other."""
    nodes: list[Node] = world.cluster.database.server.nodes  # type: ignore[attr-defined]
    for repetition in range(world.options.times):
        await asyncio.sleep(world.draw.uniform(0.5, 2.0))
        from_ns = time.time_ns()
        await strike(world, nodes[repetition % NODES])
        # A request that a node took with it has an unknown result, and its shard is claimed anew.
        await asyncio.sleep(SETTLE_SECONDS)
        world.add_fault(Fault("node", from_ns, time.time_ns(), in_flight=None))
        world.check_alive()
        world.said(repetition)


async def _kill(world: World, node: Node) -> None:
    node.kill()
    await asyncio.sleep(PAUSE_SECONDS)
    await asyncio.to_thread(node.start)


async def _stop(world: World, node: Node) -> None:
    node.pause()
    await asyncio.sleep(PAUSE_SECONDS)
    node.resume()


async def _kill_two(world: World, node: Node) -> None:
    nodes: list[Node] = world.cluster.database.server.nodes  # type: ignore[attr-defined]
    two = [other for other in nodes if other is not node][: NODES - 1]
    refused = world.ledger.answers["create 503"]
    for other in two:
        other.kill()
    await asyncio.sleep(PAUSE_SECONDS)
    if world.ledger.answers["create 503"] == refused:
        world.wrong.append("no create was answered with 503 while two of three nodes were down")
    for other in two:
        await asyncio.to_thread(other.start)


async def _roll(world: World, node: Node) -> None:
    await asyncio.to_thread(node.tool, "drain")
    await asyncio.to_thread(node.stop)
    await asyncio.to_thread(node.start)


async def _cut(world: World, node: Node) -> None:
    server: Cassandra = world.cluster.database.server  # type: ignore[assignment]
    server.cut(node)
    await asyncio.sleep(PAUSE_SECONDS)
    server.mend(node)
    await asyncio.sleep(GONE_SECONDS)


async def _empty(world: World, node: Node) -> None:
    """As ``docs/stores.md`` says: what only one other node has is repaired before the empty node comes back."""
    nodes: list[Node] = world.cluster.database.server.nodes  # type: ignore[attr-defined]
    other = next(each for each in nodes if each is not node)
    node.kill()
    node.wipe()
    await asyncio.sleep(GONE_SECONDS)
    await asyncio.to_thread(other.tool, "repair", "--full", "--force", "duetime")
    await asyncio.to_thread(node.start, replaces=True)


async def _add(world: World) -> None:
    server: Cassandra = world.cluster.database.server  # type: ignore[assignment]
    from_ns = time.time_ns()
    await asyncio.to_thread(server.add_node)
    await asyncio.sleep(PAUSE_SECONDS)
    world.add_fault(Fault("node", from_ns, time.time_ns(), in_flight=None))
    world.check_alive()


async def _clock(world: World, node: Node) -> None:
    for off_ms in (CLOCK_MS, -CLOCK_MS):
        node.kill()
        await asyncio.to_thread(node.start, clock_ms=off_ms)
        await asyncio.sleep(PAUSE_SECONDS)
    node.kill()
    await asyncio.to_thread(node.start)


def _scenario(name: str, promise: str, strike: Callable[[World, Node], Awaitable[None]], times: int) -> Scenario:
    return Scenario(
        name=name, promise=promise, times=times, times_brief=1, strike=lambda world: _each(world, strike), nodes=True
    )


NODE_SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        _scenario("node-kill", "kill -9 one node of three: nothing lost, creates go on", _kill, 6),
        _scenario("node-stop", "SIGSTOP one node of three: nothing lost", _stop, 6),
        _scenario(
            "nodes-kill", "kill -9 two nodes of three: creates get 503; nothing lost when they return", _kill_two, 3
        ),
        _scenario("node-roll", "restart one node after the other: nothing lost", _roll, 3),
        _scenario("node-cut", "cut one node off from the others, not from the instances: nothing lost", _cut, 3),
        _scenario("node-empty", "a node loses its disk, the others are repaired, it returns: nothing lost", _empty, 2),
        _scenario(
            "node-clock", "the clock of one node is 500 ms off, either way: nothing early, nothing lost", _clock, 2
        ),
        Scenario(
            name="node-add",
            promise="a fourth node joins under load: nothing lost",
            times=1,
            times_brief=1,
            strike=_add,
            nodes=True,
        ),
    )
}
