"""Activity of the cluster: differences of counts, even if instances start, stop, restart or report nothing."""

from __future__ import annotations

import asyncio

import pytest

from duetime.activity import POINTS_MAX, STEP_SECONDS, Activity, percentile
from duetime.errors import StoreUnavailable
from duetime.instants import EPOCH
from duetime.store import About, Instance
from duetime.telemetry import LATENESS_SECONDS, Telemetry
from tests.clocks import START, ManualClock

OURS, THEIRS, NEW = b"ours", b"theirs", b"new"
BUCKETS = len(LATENESS_SECONDS) + 1


def late(**counts: int) -> tuple[int, ...]:
    """Counts by the upper end of their bucket: ``ms5=3`` is three attempts that were 2 to 5 ms late."""
    ends = [f"ms{round(seconds * 1000)}" for seconds in LATENESS_SECONDS]
    return tuple(counts.get(end, 0) for end in [*ends, "beyond"])


class Cluster:
    """Instances whose reports a test sets; the first one computes the activity."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.telemetry = Telemetry()
        self.others: dict[bytes, Instance] = {}
        self.away = False
        self.activity = Activity(self.look, self.telemetry, self.clock, owner_id=OURS)

    async def look(self) -> list[Instance]:
        if self.away:
            raise StoreUnavailable("away")
        stale = Instance(owner_id=OURS, about=About(), alive_until=EPOCH, shards=())
        return [stale, *self.others.values()]

    def say(self, owner_id: bytes, fires: tuple[int, ...], *, seconds: float) -> None:
        """Send a heartbeat of another instance this many seconds after the start."""
        until = START + round(seconds * 1000) + 10_000
        self.others[owner_id] = Instance(owner_id=owner_id, about=About(fires=fires), alive_until=until, shards=())

    def step(self) -> None:
        self.clock.advance(STEP_SECONDS * 1000)
        asyncio.run(self.activity.sample())

    @property
    def rates(self) -> list[float]:
        return [point.fires_per_second for point in self.activity.points]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_own_attempts_are_counted_up_to_now(cluster: Cluster) -> None:
    cluster.telemetry.lateness(3)
    cluster.step()
    assert not cluster.activity.points and cluster.activity.since == START + 5000  # the baseline
    for _ in range(10):
        cluster.telemetry.lateness(3)
    cluster.step()
    cluster.step()
    [busy, idle] = cluster.activity.points
    assert (busy.at, busy.fires_per_second) == (START + 10_000, 2)
    assert busy.lateness_p50_ms == pytest.approx(3.5) and busy.lateness_p99_ms == pytest.approx(4.97)
    assert (idle.fires_per_second, idle.lateness_p50_ms, idle.lateness_p99_ms) == (0, None, None)
    assert cluster.activity.fires() == 11


def test_rates_of_others_use_the_time_between_their_heartbeats(cluster: Cluster) -> None:
    cluster.say(THEIRS, late(ms5=1000), seconds=1)
    cluster.step()
    cluster.say(THEIRS, late(ms5=1030), seconds=4)  # 30 in 3 seconds
    cluster.step()
    cluster.step()  # No new report: the same rate is assumed.
    cluster.say(THEIRS, late(ms5=1030, ms10=80), seconds=14)  # 80 in 10 seconds
    cluster.step()
    assert cluster.rates == [10, 10, 8]
    assert [point.lateness_p50_ms for point in cluster.activity.points] == [pytest.approx(3.5), None, 7.5]
    assert cluster.activity.fires() == 1110


def test_new_instances_count_from_zero_and_gone_ones_are_dropped(cluster: Cluster) -> None:
    cluster.say(THEIRS, late(ms5=1000), seconds=1)
    cluster.step()
    del cluster.others[THEIRS]
    cluster.say(NEW, late(ms5=20), seconds=6)
    cluster.step()
    cluster.say(NEW, late(ms5=20), seconds=9)
    cluster.step()
    assert cluster.rates == [4, 0]


def test_missing_counts_of_older_versions_are_zero(cluster: Cluster) -> None:
    cluster.say(THEIRS, (), seconds=1)
    cluster.step()
    cluster.say(THEIRS, (), seconds=4)
    cluster.step()
    assert cluster.rates == [0]


def test_no_points_while_the_store_is_unavailable(cluster: Cluster) -> None:
    cluster.step()
    cluster.away = True
    with pytest.raises(StoreUnavailable):
        cluster.step()
    cluster.away = False
    for _ in range(10):
        cluster.telemetry.lateness(3)
    cluster.step()
    assert cluster.rates == [1]  # in the ten seconds since its last report


def test_sampling_resumes_after_the_store_was_unavailable(cluster: Cluster) -> None:
    async def watch() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.activity.run())
            for cluster.away in (False, True, False):
                await settled()
                cluster.clock.advance(STEP_SECONDS * 1000)
            await settled()
            running.cancel()

    async def settled() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(watch())
    assert len(cluster.rates) == 2


def test_one_hour_is_kept(cluster: Cluster) -> None:
    for _ in range(POINTS_MAX + 10):
        cluster.step()
    assert len(cluster.activity.points) == POINTS_MAX
    assert POINTS_MAX * STEP_SECONDS == 3600


@pytest.mark.parametrize(
    ("counts", "share", "ms"),
    [
        (late(), 0.5, None),
        (late(ms1=1), 0.5, 0.5),
        (late(ms1=100), 0.99, 0.99),
        (late(ms1=50, ms2=50), 0.5, 1),
        (late(ms1=50, ms2=50), 0.75, 1.5),
        (late(ms1=99, ms60000=1), 0.5, 50 / 99),
        (late(ms1=90, ms60000=10), 0.99, 57_000),
        (late(beyond=1), 0.5, 3_600_000),
    ],
)
def test_a_percentile_lies_in_its_bucket(counts: tuple[int, ...], share: float, ms: float | None) -> None:
    assert percentile(counts, share) == (ms if ms is None else pytest.approx(ms))


def test_telemetry_counts_each_fire_in_one_bucket() -> None:
    telemetry = Telemetry()
    assert telemetry.fires() == (0,) * BUCKETS
    for ms in (0, 1, 2, 3, 5, 5_000, 4_000_000):
        telemetry.lateness(ms)
    assert telemetry.fires() == late(ms1=2, ms2=1, ms5=2, ms5000=1, beyond=1)
