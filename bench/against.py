"""Measures the peers, the alternatives that a user might choose, in the same run: each does the same job on its own
store."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from bench import herd
from bench.processes import BenchError
from bench.rounds import Bench, Parts, Samples
from bench.tables import Table

if TYPE_CHECKING:
    from bench.peers import Figures

TITLE = "Peers"
SINGLES, BATCHED, HERD, SUSTAINED, SUSTAINED_SINGLES = (
    "singles_per_second",
    "batched_per_second",
    "herd_per_second",
    "sustained_per_second",
    "sustained_singles_per_second",
)
Peer = tuple[str, dict[int, float]]
"""The name of a peer, and one of its figures by round."""
GIVEN = "herd"
"""The number of timers due at one instant that a peer was given."""


def parts(bench: Bench) -> Parts:
    from bench.peers import PEERS  # an environment of its own: the rest runs without it

    return {name: partial(_measure, bench, name) for name in PEERS}


def decides(name: str) -> bool:
    """Whether it can be the fastest."""
    from bench.peers import PEERS

    return PEERS[name].decides


async def _measure(bench: Bench, name: str) -> dict[str, Any]:
    from bench.peers import measure

    figures = await measure(
        name,
        directory=bench.directory,
        receiver=bench.receiver,
        herd=herd.SMALL,
        quick=bench.quick,
        say=bench.say,
    )
    return sample(figures)


def sample(figures: Figures) -> dict[str, Any]:
    """The results until a failure, if any, with the failure; BenchError if there are none."""
    if figures.error and figures.singles_per_second is None:
        raise BenchError(figures.error)
    late = figures.herd_lateness_ms
    error = figures.error and f"only in part: {figures.error}"
    percentiles = {"p50_ms": late[50], "p99_ms": late[99]} if late else {}
    return {**msgspec.structs.asdict(figures), **percentiles, "error": error}


def missing() -> str | None:
    """Why there are no peers, or None."""
    try:
        from bench.peers import missing
    except ImportError as error:
        return f"The peers could not be loaded: {error}"
    return missing()


def given(samples: Samples, count: int) -> Samples:
    """The peers with this many timers due at one instant: rates and latenesses with fewer are not comparable."""
    return Samples({peer: of for peer, of in samples.of.items() if samples.median(peer, GIVEN) == count})


def fastest(samples: Samples, figure: str) -> Peer | None:
    """The best peer by a rate, with the rate of each round."""
    return max(_measured(samples, figure), key=lambda peer: statistics.median(peer[1].values()), default=None)


def soonest(samples: Samples, figure: str) -> Peer | None:
    """The best peer by a lateness, with the lateness of each round."""
    return min(_measured(samples, figure), key=lambda peer: statistics.median(peer[1].values()), default=None)


def _measured(samples: Samples, figure: str) -> list[Peer]:
    return [(peer, values) for peer in samples.of if (values := samples.by_round(peer, figure))]


def tables(samples: Samples) -> list[Table]:
    peers = [peer for peer in samples.of if peer in samples]
    if not peers:
        return []
    about = [[peer, samples.of[peer][0]["version"], samples.of[peer][0]["setup"]] for peer in peers]
    return [Table(["peer", "version", "set up"], about, texts=(0, 1, 2))]
