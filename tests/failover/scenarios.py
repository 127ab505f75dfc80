"""The failovers: each one is repeated while the load continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.chaos.checker import judge
from tests.chaos.lateness import Lateness, Whose
from tests.chaos.ledger import Fault
from tests.chaos.scenarios import RESUME_SECONDS, SECOND_NS, UNSETTLED_NS
from tests.chaos.world import Scenario, World
from tests.failover.cluster import MariadbPairDatabase, PairCluster, PostgresPairDatabase
from tests.failover.forgiven import forgive
from tests.failover.pairs import FALLBACK_MS, MariadbPair, Pair, PostgresPair

HELD_SECONDS = 1.0
"""How long replication is held before the primary dies. Shorter than the time until a rescheduled timer fires again, so
that such a timer does not fire at two times."""
LAG_NS = SECOND_NS // 2
"""The largest normal lag of a standby."""
BACK_SECONDS = 8.0
"""How long an old primary is back: instances abort a statement after 6 s and reconnect."""


async def _fail_over(world: World) -> None:
    """Every second time, the standby lags behind when the primary is killed."""
    cluster = _cluster(world)
    for repetition in range(world.options.times):
        await asyncio.to_thread(cluster.pair.attach)
        await asyncio.sleep(world.draw.uniform(0.5, 1.5))
        from_ns = time.time_ns() - LAG_NS
        if repetition % 2 == 0:
            assert cluster.pair.link is not None
            cluster.pair.link.hang()
            await asyncio.sleep(HELD_SECONDS)
        await asyncio.to_thread(cluster.pair.primary.kill)
        await asyncio.to_thread(cluster.pair.promote)
        await _noted(world, from_ns)
        await asyncio.to_thread(cluster.pair.discard_old)
        world.check_alive()
        world.said(repetition)


async def _fail_over_behind(world: World) -> None:
    _allow_missing(world)
    await _fail_over(world)


async def _split(world: World) -> None:
    """The primary hangs, the standby is promoted, and then the old primary resumes as a primary."""
    _allow_missing(world)
    cluster = _cluster(world)
    for repetition in range(world.options.times):
        await asyncio.to_thread(cluster.pair.attach)
        await asyncio.sleep(world.draw.uniform(0.5, 1.5))
        from_ns = time.time_ns()
        old = cluster.pair.primary
        old.pause()
        await asyncio.to_thread(cluster.pair.promote)
        old.resume()
        await asyncio.sleep(BACK_SECONDS)
        await asyncio.to_thread(cluster.pair.discard_old)
        await _noted(world, from_ns)
        world.check_alive()
        world.said(repetition)


async def _noted(world: World, from_ns: int) -> None:
    """The fault ends now, and its consequences soon after."""
    now_ns = time.time_ns()
    _cluster(world).undone.append((from_ns, now_ns))
    # On a busy machine, recording outcomes and replacing owners take longer.
    noise_ns = int(world.options.noise_seconds * SECOND_NS)
    world.add_fault(Fault("failover", from_ns - noise_ns, now_ns + UNSETTLED_NS + noise_ns, in_flight=None))
    await asyncio.sleep(UNSETTLED_NS / SECOND_NS)


def _allow_missing(world: World) -> None:
    """Acknowledged writes may be missing for clients that read from one of the two primaries."""
    world.load.allowed = frozenset({404})


def _cluster(world: World) -> PairCluster:
    assert isinstance(world.cluster, PairCluster)
    return world.cluster


def _forgive(world: World) -> None:
    """Report what was lost of the writes that only the old primary had acknowledged, and check the rest."""
    world.ledger, full = forgive(world.ledger, _cluster(world).undone), world.ledger
    found = judge(full).found
    world.note("acknowledged and lost", found["lost"])
    world.note("cancels and moves undone", found["after cancel"] + found["moved"])
    if not found["lost"]:
        world.wrong.append("nothing was lost, so nothing was shown")


def _measure(world: World, lateness: Lateness) -> None:
    for fault, (_, back_ns) in zip(world.ledger.faults, _cluster(world).undone, strict=True):
        until_ns = back_ns + 2 * SECOND_NS
        late = lateness.of(fault, from_ns=fault.from_ns, until_ns=until_ns, whose=Whose.HIT, since_ns=back_ns)
        world.hold("firing again", late.seconds, RESUME_SECONDS, f"over {late}")


def _scenario(
    name: str,
    promise: str,
    pair: Callable[[], Pair[Any]],
    *,
    times: int = 20,
    splits: bool = False,
    loses: bool = False,
) -> Scenario:
    database: Callable[[Any], Any] = MariadbPairDatabase if name.startswith("mariadb") else PostgresPairDatabase
    return Scenario(
        name=name,
        promise=promise,
        times=times,
        times_brief=1,
        strike=_split if splits else _fail_over_behind if loses else _fail_over,
        measure=_measure,
        cluster=partial(PairCluster, make_database=lambda: database(pair())),
        settled=_forgive if loses else lambda world: None,
    )


_KEPT = "nothing that was acknowledged is lost or undone"
_LOST = "what the standby had not got is lost; nothing early, no stale write, one delivery id per firing"

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        _scenario("postgres-sync", f"synchronous standby: {_KEPT}", partial(PostgresPair, 18, waits=True)),
        _scenario("postgres15-sync", "the same with PostgreSQL 15", partial(PostgresPair, 15, waits=True)),
        _scenario(
            "postgres-async", f"asynchronous standby: {_LOST}", partial(PostgresPair, 18, waits=False), loses=True
        ),
        _scenario(
            "postgres-split",
            f"the old primary of a synchronous standby comes back: it acknowledges nothing, {_KEPT}",
            partial(PostgresPair, 18, waits=True),
            times=5,
            splits=True,
        ),
        _scenario("mariadb-sync", f"semi-synchronous replica: {_KEPT}", MariadbPair),
        _scenario(
            "mariadb-fallback",
            f"the primary has stopped waiting for its replica: {_LOST}",
            partial(MariadbPair, timeout_ms=FALLBACK_MS),
            loses=True,
        ),
        _scenario(
            "mariadb-split",
            f"the old primary of a semi-synchronous replica comes back: it acknowledges nothing, {_KEPT}",
            MariadbPair,
            times=5,
            splits=True,
        ),
    )
}
