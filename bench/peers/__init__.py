"""The peers of the benchmark: the alternatives that a user might choose, doing the same job, a durable "POST this to
that URL at T". ``measure`` runs one of them on its own store and returns its ``Figures``; ``python -m bench.peers``
runs all.

Each peer is a program in ``programs``, which explains its setup. They run in their own environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from bench.peers.measuring import BATCH, STEADY_PER_SECOND, Measuring
from bench.peers.stands import NODE_MODULES, PROGRAMS, VENV, Server, postgres, redis, stand, temporal
from bench.processes import Process, reason


class Figures(msgspec.Struct):
    name: str
    version: str = ""
    setup: str = ""  # one line: store, worker, concurrency
    singles_per_second: float | None = None  # schedules one by one, durable
    batched_per_second: float | None = None  # in batches of 500 by a library call, None if it has none
    herd: int | None = None  # how many due at one instant it was given
    herd_per_second: float | None = None  # N due at one instant T: N / (last arrival - T)
    herd_lateness_ms: list[float] = []  # 101 values: percentiles 0..100 of arrival - T
    sustained_per_second: float | None = None  # end to end: scheduled, delivered and recorded, as fast as it keeps up
    sustained_singles_per_second: float | None = None  # the same, scheduled one by one
    steady_lateness_ms: list[float] = []  # 101 percentiles at 100/s, [] if not measured
    cpu_ms_per_timer: float | None = None  # of workers and store in the herd
    error: str = ""  # could not run, or not to the end: why; what was measured before it counts


WARM_SECONDS = 0.5
HERD, HERD_OF_SLOW = 5_000, 1_000
"""The number of timers due at one instant; in the quick form, slow peers, which decide no bar, get fewer."""


class Peer(msgspec.Struct, frozen=True):
    """How to run a peer: its program, its store, and the abilities of its client library."""

    program: str
    store: Callable[[Path], AbstractContextManager[Server]]
    setup: str
    batches: bool = True
    worker_apart: bool = True
    herd_max: int | None = None  # of a herd, where more would take minutes
    decides: bool = False  # it is among those that can be the fastest

    def herd(self, asked: int, quick: bool) -> int:
        """How many of the timers due at one instant it is given."""
        return min(asked, self.herd_max or asked, HERD_OF_SLOW if quick and not self.decides else asked)

    @property
    def command(self) -> list[str | Path]:
        interpreter = "node" if self.program.endswith(".mjs") else "python"
        return [VENV / "bin" / interpreter, PROGRAMS / self.program]


PEERS: dict[str, Peer] = {
    "graphile-worker": Peer(
        "with_graphile_worker.mjs",
        postgres,
        "PostgreSQL; local queue of 500, 64 at once by undici, completions batched, polls every 200 ms",
        decides=True,
    ),
    "pg-boss": Peer(
        "with_pg_boss.mjs",
        postgres,
        "PostgreSQL; 4 workers that fetch 100 each and burst, by undici, poll every 500 ms",
        decides=True,
    ),
    "Procrastinate": Peer(
        "with_procrastinate.py",
        postgres,
        "PostgreSQL; asynchronous worker, 100 at once by aiohttp, polls every 200 ms",
    ),
    "Celery": Peer(
        "with_celery.py",
        redis,
        "Redis, synced on each write; one worker with a process for each core, by requests, acknowledged when done",
        batches=False,
    ),
    "APScheduler": Peer(
        "with_apscheduler.py",
        postgres,
        "PostgreSQL by SQLAlchemy, committing by itself; scheduler with 10 threads, by requests",
        batches=False,
        worker_apart=False,
    ),
    "Temporal": Peer(
        "with_temporal.py",
        temporal,
        "development server on a file; one Python worker, workflows with a start delay, 100 at once by aiohttp",
        batches=False,
        herd_max=500,
    ),
}


def missing() -> str | None:
    """What has to be installed before the peers can run, as a sentence; None if nothing."""
    if not (VENV / "bin/python").exists() or not NODE_MODULES.exists():
        return "The peers are not installed: make bench sets them up"
    if shutil.which("redis-server") is None:
        return "Celery needs redis-server: apt-get install redis-server"
    return None


async def measure(
    name: str,
    *,
    directory: Path,
    receiver: Process,
    herd: int = HERD,
    quick: bool = False,
    say: Callable[[str], None],
) -> Figures:
    """Run one peer; in the quick form without the steady rate, and the slow ones with a smaller burst."""
    peer = PEERS[name]
    figures = Figures(name, setup=peer.setup)
    try:
        await _measure(peer, figures, directory, receiver, peer.herd(herd, quick), quick, say)
    except Exception as error:  # whatever it is: what was measured before it is worth having
        figures.error = reason(error)
    return figures


async def _measure(
    peer: Peer, figures: Figures, directory: Path, receiver: Process, herd: int, quick: bool, say: Callable[[str], None]
) -> None:
    def at_stand(works: bool):  # type: ignore[no-untyped-def]
        return stand(peer.command, peer.store, directory, works=works, worker_apart=peer.worker_apart)

    async with at_stand(works=False) as only:
        figures.version = only.version
        measuring = Measuring(only, receiver, say)
        say(f"{figures.name}: schedules one by one")
        await measuring.schedules(WARM_SECONDS, 1)
        singles = figures.singles_per_second = await measuring.schedules(1.5 if quick else 3.0, 1)
        if peer.batches:
            say(f"{figures.name}: schedules in batches")
            figures.batched_per_second = await measuring.schedules(1.5 if quick else 3.0, BATCH)
    batch = BATCH if peer.batches else 1
    fastest = figures.batched_per_second or singles
    async with at_stand(works=True) as both:
        measuring = Measuring(both, receiver, say)
        say(f"{figures.name}: {herd:,} due at one instant")
        fired = await measuring.herd(herd, batch, fastest)
        figures.herd = herd
        figures.herd_per_second = fired.per_second
        figures.herd_lateness_ms = fired.lateness_ms
        figures.cpu_ms_per_timer = fired.cpu_ms_per_timer
        if not quick and fired.per_second > STEADY_PER_SECOND:  # else it would not be a modest rate
            say(f"{figures.name}: a steady rate")
            figures.steady_lateness_ms = await measuring.steady(10, singles)
        seconds = 6.0 if quick else 10.0
        say(f"{figures.name}: end to end")
        figures.sustained_per_second = await measuring.sustained(seconds, batch, fired.per_second)
        if peer.batches:
            say(f"{figures.name}: end to end, one by one")
            expected = min(singles, fired.per_second)
            figures.sustained_singles_per_second = await measuring.sustained(seconds, 1, expected)
        else:
            figures.sustained_singles_per_second = figures.sustained_per_second
