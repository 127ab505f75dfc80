"""One run of one scenario: a cluster under load, its faults, and the check at the end."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from duetime.model import Status
from tests.chaos.checker import Verdict, judge
from tests.chaos.cluster import Cluster
from tests.chaos.lateness import Lateness
from tests.chaos.ledger import Fault, Ledger, Said
from tests.chaos.load import Load
from tests.chaos.receiver import ReceiverProcess

QUIET_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    times: int
    seed: int
    server: str = "postgres"
    instances: int = 3
    rate: float = 300.0
    ahead_seconds_max: float = 6.0
    noise_seconds: float = 0.0  # tolerated lateness due to a busy machine
    hang_seconds: float = 60.0
    patience_seconds: float = 45.0
    bug: str | None = None
    say: Callable[[str], None] = print


class World:
    def __init__(self, options: Options, directory: Path, scenario: Scenario) -> None:
        self.options = options
        self.draw = random.Random(f"faults {options.seed}")
        self.ledger = Ledger()
        self.wrong: list[str] = []
        """Violations that are not in the ledger: exit codes, missed bounds, stale writes."""
        self.figures: dict[str, float] = {}
        """The worst value of each measurement."""
        self.receiver = ReceiverProcess(directory, options.seed)
        try:
            self.cluster = scenario.cluster(
                directory,
                server=options.server,
                instances=options.instances,
                bug=options.bug,
                proxied=scenario.proxied,
                movable_clocks=scenario.movable_clocks,
            )
        except BaseException:
            self.receiver.close()
            raise
        self.load = Load(
            self.cluster.members,
            self.receiver.url,
            self.ledger,
            seed=options.seed,
            rate=options.rate,
            ahead_seconds_max=options.ahead_seconds_max,
        )

    def note(self, figure: str, value: float) -> None:
        """Keep the worst value."""
        self.figures[figure] = max(value, self.figures.get(figure, 0.0))

    def add(self, figure: str, value: float) -> None:
        """Keep the sum."""
        self.figures[figure] = self.figures.get(figure, 0.0) + value

    def hold(self, figure: str, value: float, bound: float, what: str = "") -> None:
        """Keep the worst value and check it against a bound, with a tolerance for a busy machine."""
        self.note(figure, value)
        if value > bound + self.options.noise_seconds:
            self.wrong.append(f"{figure} {value:.2f} s, not within {bound:g} s {what}")

    def add_fault(self, fault: Fault) -> None:
        self.ledger.faults.append(fault)

    def said(self, repetition: int) -> None:
        asked, came = len(self.ledger.promises), len(self.receiver.callbacks())
        self.options.say(f"{repetition + 1}/{self.options.times}: {asked} asked, {came} received")

    def check_alive(self) -> None:
        for member in self.cluster.members:
            if not member.runs:
                self.wrong.append(f"{member.role} has ended by itself: {member.stderr[-2000:]}")

    async def settle(self) -> None:
        """Wait until every timer is final and everything owed has arrived, or until a timeout."""
        deadline = time.monotonic() + self.options.patience_seconds
        live = await self.cluster.database.live()
        while live and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            live = await self.cluster.database.live()
        if live:
            seconds = self.options.patience_seconds
            self.wrong.append(f"{len(live)} timers are not final after {seconds:g} s: {live[:3]}")
        await asyncio.sleep(QUIET_SECONDS)  # for unexpected callbacks
        self.ledger.callbacks = list(self.receiver.callbacks())

    async def inspect(self) -> None:
        """Check the database itself at the end."""
        stale = await self.cluster.database.stale()
        self.note("stale writes", len(stale))
        if stale:
            self.wrong.append(f"{len(stale)} writes of stale owners: {stale[:20]}")
        there: Counter[str] = Counter()
        for timer in await self.cluster.database.stored():
            there[timer.id] += 1
            if timer.status == Status.FAILED and "never recorded" in (timer.last_error or ""):
                self.ledger.given_up.add(timer.id)
            elif timer.status == Status.FAILED:
                self.wrong.append(f"the timer {timer.id} was failed: {timer.last_error}")
        for id, count in there.items():
            if count > 1:
                self.wrong.append(f"{count} timers with the id {id}")
        for promise in self.ledger.promises.values():
            if promise.created.said is not Said.NOTHING and promise.acknowledged is not (promise.id in there):
                self.wrong.append(f"said {promise.created.said}, but in the database it is the other way: {promise}")

    def close(self) -> None:
        self.cluster.close()
        self.receiver.close()


@dataclass
class Result:
    scenario: str
    times: int
    seed: int
    seconds: float
    verdict: Verdict
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)

    @property
    def violations(self) -> list[str]:
        return [*self.verdict.violations, *self.wrong]


@dataclass(frozen=True)
class Scenario:
    """A fault, repeated under load; ``measure`` checks the results against the scenario's own bounds."""

    name: str
    promise: str
    times: int
    times_brief: int
    strike: Callable[[World], Awaitable[None]]
    measure: Callable[[World, Lateness], None] = lambda world, lateness: None
    proxied: bool = False
    movable_clocks: bool = False
    loaded: bool = True
    """Whether the usual load runs as well."""
    nodes: bool = False
    """Whether the fault hits single nodes of a database."""
    cluster: Callable[..., Cluster] = Cluster
    settled: Callable[[World], None] = lambda world: None
    """Changes the ledger before it is checked."""

    def suits(self, server: str) -> bool:
        """Whether this server can have the fault: Cassandra has several nodes, which no proxy can stand before."""
        return not self.proxied if server == "cassandra" else not self.nodes


def run(scenario: Scenario, options: Options) -> Result:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="duetime-chaos-") as directory:
        world = World(options, Path(directory), scenario)
        try:
            asyncio.run(_run(scenario, world))
        finally:
            world.close()
    verdict = judge(world.ledger)
    scenario.measure(world, Lateness(world.ledger))
    return Result(
        scenario=scenario.name,
        times=options.times,
        seed=options.seed,
        seconds=time.monotonic() - began,
        verdict=verdict,
        figures=world.figures,
        wrong=world.wrong,
        answers=dict(world.ledger.answers.most_common()),
    )


async def _run(scenario: Scenario, world: World) -> None:
    await world.cluster.start()
    async with asyncio.TaskGroup() as tasks:
        if scenario.loaded:
            tasks.create_task(world.load.run())
        try:
            if scenario.loaded:
                await asyncio.sleep(1.5)  # until timers fall due
            await scenario.strike(world)
        except AssertionError as stuck:
            world.wrong.append(str(stuck))  # something did not happen in time; the check shows the effects
        finally:
            world.load.stop()
    await world.settle()
    scenario.settled(world)
    world.check_alive()
    await world.inspect()
