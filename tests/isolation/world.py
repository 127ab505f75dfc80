"""One run of one scenario: a service, a healthy client, and the trouble next to it.

The healthy client has a timer due every ten milliseconds, each with a single attempt. Its lateness is measured twice in
the same service process: alone, and then next to the trouble. All timers of a phase are created before it begins, so
that only firing is measured.

A run raises an error if the service does not start or respond, and ``Unsupported`` if this machine can't run the
scenario. It always stops the processes that it has started.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.processes import cpu_of_all
from bench.series import percentile
from tests.isolation.names import NameServer, host
from tests.isolation.receiver import ReceiverProcess, raise_descriptor_limit
from tests.postgres import Postgres
from tests.servers import KEY, Answer, Duetime

ROOT = Path(__file__).resolve().parents[2]

BATCH = 1_000
BATCHES_AT_ONCE = 4
RATE = 100
"""Healthy timers per second."""
BARS_RATIO, BARS_EXTRA_MS = 1.5, 100.0
"""The healthy p99 next to the trouble may be this multiple of the p99 alone, plus this much."""
BARS_EXTRA_MS_BRIEF = 250.0
"""A phase of five seconds has 500 healthy timers, so a stall of the machine for a quarter of a second affects their
p99."""
DEFERRED_RATIO = 2.0
"""How often a timer of the trouble may be put back into the store, per attempt."""

LEAD_SECONDS = 0.5
LEADS = (2.0, 4.0, 8.0)
"""The trouble falls due after this multiple of its expected creation time; longer if that was too short."""
POLL_SECONDS = 0.1
HEALTHY, TROUBLE, WARM = "healthy", "trouble", "warm"

T = TypeVar("T")


class TooSlow(Exception):
    """Timers fell due before all of them were created, so the run measures nothing."""


@dataclass(frozen=True)
class Options:
    brief: bool = False
    same_namespace: bool = False
    """Whether the healthy timers are in the namespace of the trouble."""
    say: Callable[[str], None] = lambda text: None

    @property
    def alone_seconds(self) -> float:
        return 2.5 if self.brief else 8.0

    @property
    def beside_seconds(self) -> float:
        return 5.0 if self.brief else 20.0

    @property
    def patience_seconds(self) -> float:
        """How long to wait for timers that are late."""
        return 15.0 if self.brief else 45.0


@dataclass(frozen=True)
class Wave:
    """Timers that fall due together, or spread evenly over some seconds."""

    count: int
    fields: Callable[[int], dict[str, Any]]
    """The n-th timer, without namespace and time."""
    after_seconds: float = 0.0
    over_seconds: float = 0.0


@dataclass(frozen=True)
class Trouble:
    waves: list[Wave]
    begin: Callable[[], None] = lambda: None
    """Called once all timers are created, shortly before they fall due."""
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Scenario:
    name: str
    what: str
    """One line about the timers of the trouble."""
    sizes: tuple[int, ...]
    size_brief: int | None
    """None if it has no brief form."""
    make: Callable[[World, int], Trouble]
    p99_ms_max: float | None = None
    """Used instead of the bar relative to the p99 alone."""
    completes: bool = False
    """Whether all timers of the trouble must complete as well."""
    dns: bool = False
    """Whether it uses our DNS server, with half of the healthy timers going to host names, each to a new one."""
    open_files_max: int | None = None
    lead_seconds: float = 0.0
    """How much longer to wait between creation and due time."""


@dataclass(frozen=True)
class Lateness:
    """Of the healthy timers in one phase. A missing timer counts with the time waited for it."""

    timers: int
    missing: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    noise_p99_ms: float
    """The lateness of a plain sleep loop at the same time."""


@dataclass(frozen=True)
class Result:
    scenario: str
    store: str
    size: int
    same_namespace: bool
    alone: Lateness
    beside: Lateness
    p99_bar_ms: float
    failed: int
    deferred: int
    attempts: int
    """Attempts for the trouble while the healthy timers next to it were measured."""
    row_updates: int | None
    """PostgreSQL only: updates of the table of timers in that time."""
    trouble_completed: int
    trouble_failed: int
    cpu_seconds: float
    """Of the service in that time."""
    beside_seconds: float
    seconds: float
    missed: list[str] = field(default_factory=list)
    """The bars that were missed."""


class Service(Duetime):
    """A service whose command can have a prefix that changes what the process sees."""

    def __init__(self, directory: Path, prefix: list[str], **options: Any) -> None:
        super().__init__(directory, start=False, **options)
        self._prefix = [*self._prefix, *prefix]
        self.start()

    def __enter__(self) -> Service:
        return self

    def api(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        headers = {"Content-Type": "application/json", "X-API-Key": KEY, **headers}
        try:
            return self.request(method, path, body=body, headers=headers)
        except ConnectionError:
            self.disconnect()  # The service may have closed an idle connection.
            return self.request(method, path, body=body, headers=headers)


class World:
    """What a scenario may use: receivers, the DNS server, and ``enter`` for anything that must be closed afterwards."""

    def __init__(self, scenario: Scenario, postgres: Postgres | None, options: Options) -> None:
        self.scenario = scenario
        self.options = options
        self.store = "sqlite" if postgres is None else "postgres"
        self._postgres = postgres
        self._stack = ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        raise_descriptor_limit()
        directory = Path(self.enter(tempfile.TemporaryDirectory(prefix="duetime-isolation-")))
        prefix: list[str] = []
        settings: dict[str, str] = {}
        if self.scenario.dns:
            self.names = self.enter(NameServer())
            prefix = self.names.command_prefix(directory / "etc")
        self._database: str | None = None
        if self._postgres is not None:
            self._database = settings["DATABASE_URL"] = self._postgres.fresh()
            self._stack.callback(self._postgres.give_back, self._database)
        self.quick = self.enter(ReceiverProcess())
        self.service = self.enter(
            Service(directory / "service", prefix, open_files_max=self.scenario.open_files_max, **settings)
        )
        self.healthy_namespace = TROUBLE if self.options.same_namespace else HEALTHY
        for name in (HEALTHY, TROUBLE, WARM):
            made = self.service.api("POST", "/api/v1/namespaces", msgspec.json.encode({"name": name}))
            assert made.status in (200, 201), made

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Close it when the run is over."""
        return self._stack.enter_context(manager)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # Creating.

    def creates_per_second(self) -> float:
        """How fast this machine creates timers, measured with some that are due much later. Also warms up the
        service."""
        began = time.monotonic()
        count = BATCH * BATCHES_AT_ONCE
        self.create(WARM, Wave(count, lambda n: {"callbackUrl": self.quick.url}), time.time() + 86_400)
        return count / (time.monotonic() - began)

    def create_healthy(self, phase: str, seconds: float, first_at: float) -> list[int]:
        """The due times of the timers, in milliseconds. No two are the same."""

        def fields(n: int) -> dict[str, Any]:
            # With DNS, half of them need a lookup, each for a new name.
            named = self.scenario.dns and n % 2
            place = host("quick", n // 2, f"{phase}-") if named else "127.0.0.1"
            return {
                "callbackUrl": f"http://{place}:{self.quick.port}/",
                "correlationId": HEALTHY,
                "retryPolicy": {"maxRetries": 0},
            }

        return self.create(self.healthy_namespace, Wave(round(seconds * RATE), fields, over_seconds=seconds), first_at)

    def create(self, namespace: str, wave: Wave, first_at: float) -> list[int]:
        first_ms = round((first_at + wave.after_seconds) * 1000)
        due = [first_ms + round(wave.over_seconds * 1000 * n / wave.count) for n in range(wave.count)]

        def batch(start: int) -> None:
            timers = [
                {
                    "namespace": namespace,
                    "executeAt": _printed(due[n]),
                    "payload": {"due": due[n]},
                    **wave.fields(n),
                }
                for n in range(start, min(start + BATCH, wave.count))
            ]
            body = msgspec.json.encode({"timers": timers})
            answer = self.service.api("POST", "/api/v1/timers/batch", body, Prefer="return=minimal")
            assert answer.status == 200, answer
            refused = [result for result in answer.body["results"] if result["status"] != 200]
            if time.time() > first_at:
                raise TooSlow(f"creating {wave.count:,} timers took too long")
            assert not refused, f"{len(refused)} timers were not created; the first: {refused[0]}"

        with ThreadPoolExecutor(BATCHES_AT_ONCE) as pool:
            for _ in pool.map(batch, range(0, wave.count, BATCH)):
                pass
        return due

    # Measuring.

    def counters(self) -> dict[str, int]:
        """The numbers of put-backs, attempts and updated rows so far."""
        page = self.service.api("GET", "/metrics").body.decode()
        ended, sent = _metric(page, "duetime_attempts_total"), _metric(page, "duetime_lateness_seconds_count")
        # An attempt counts when it is sent: one that hangs has not ended yet.
        counters = {"deferred": _metric(page, "duetime_deferred_total"), "attempts": max(ended, sent)}
        if self._postgres is not None:
            counters["row_updates"] = int(
                self._postgres.sql(
                    "SELECT n_tup_upd FROM pg_stat_user_tables WHERE schemaname = 'duetime' AND relname = 'timers'",
                    self._database,
                )
            )
        return counters

    def cpu_seconds(self) -> float:
        assert self.service.process is not None
        return cpu_of_all(self.service.process.pid)

    def counted(self, namespace: str, status: str, correlation: str | None = None) -> int:
        chosen = f"&correlationId={correlation}" if correlation else ""
        answer = self.service.api("GET", f"/api/v1/timers/count?namespace={namespace}&status={status}{chosen}")
        assert answer.status == 200, answer
        count: int = answer.body["timers"]
        return count

    def healthy_failed(self) -> int:
        return self.counted(self.healthy_namespace, "failed", HEALTHY)

    def trouble_count(self, status: str) -> int:
        count = self.counted(TROUBLE, status)
        return count - self.counted(TROUBLE, status, HEALTHY) if self.options.same_namespace else count

    def lateness(self, due: list[int]) -> Lateness:
        """Wait until each healthy timer has arrived or failed, or until a timeout."""
        noise = self.quick.noise_ms()
        deadline = time.monotonic() + self.options.patience_seconds
        while True:
            arrivals = self.quick.arrivals()
            missing = [at for at in due if at not in arrivals]
            if not missing or time.monotonic() > deadline or len(missing) <= self.healthy_failed():
                break
            self.options.say(f"waiting for {len(missing):,} healthy timers")
            time.sleep(POLL_SECONDS)
        now_ms = time.time() * 1000
        late = sorted(arrivals.get(at, now_ms) - at for at in due)
        return Lateness(
            timers=len(due),
            missing=len(missing),
            p50_ms=percentile(late, 50),
            p99_ms=percentile(late, 99),
            max_ms=late[-1],
            noise_p99_ms=percentile(noise, 99),
        )

    def wait_for_trouble(self, size: int) -> None:
        """Wait until the timers of the trouble are final, or until a timeout."""
        deadline = time.monotonic() + self.options.patience_seconds
        while time.monotonic() < deadline:
            done = self.trouble_count("completed") + self.trouble_count("failed")
            if done >= size:
                return
            self.options.say(f"{done:,} of {size:,} timers of the trouble are final")
            time.sleep(POLL_SECONDS)


def run(scenario: Scenario, size: int, postgres: Postgres | None, options: Options) -> Result:
    """Run a scenario on PostgreSQL, or on SQLite if that is None."""
    for lead in LEADS:
        options.say("starting the service")
        try:
            with World(scenario, postgres, options) as world:
                return _measured(world, size, lead)
        except TooSlow as reason:
            late = reason
    raise late


def _measured(world: World, size: int, lead: float) -> Result:
    began = time.monotonic()
    scenario, options = world.scenario, world.options
    creates_per_second = world.creates_per_second()

    options.say("measuring the healthy timers alone")
    first_at = time.time() + LEAD_SECONDS
    due = world.create_healthy("alone", options.alone_seconds, first_at)
    world.quick.reset()
    _sleep_until(first_at + options.alone_seconds)
    alone = world.lateness(due)
    failed_alone = world.healthy_failed()

    trouble = scenario.make(world, size)
    total = sum(wave.count for wave in trouble.waves)
    options.say(f"creating {total:,} timers")
    first_at = time.time() + LEAD_SECONDS + scenario.lead_seconds + lead * total / creates_per_second
    due = world.create_healthy("beside", options.beside_seconds, first_at)
    for wave in trouble.waves:
        world.create(TROUBLE, wave, first_at)
    trouble.begin()
    if time.time() > first_at:
        raise TooSlow(f"creating {total:,} timers took too long")
    _sleep_until(first_at)

    options.say("measuring the healthy timers beside the trouble")
    world.quick.reset()
    before, cpu_before = world.counters(), world.cpu_seconds()
    _sleep_until(first_at + options.beside_seconds)
    cpu_seconds = world.cpu_seconds() - cpu_before
    trouble.end()
    healthy_attempts = world.quick.count() + world.healthy_failed() - failed_alone
    after = world.counters()
    beside_seconds = time.time() - first_at
    beside = world.lateness(due)
    if scenario.completes:
        world.wait_for_trouble(size)

    extra_ms = BARS_EXTRA_MS_BRIEF if options.brief else BARS_EXTRA_MS
    bar = scenario.p99_ms_max or BARS_RATIO * alone.p99_ms + extra_ms
    change = {name: after[name] - before[name] for name in after}
    result = Result(
        scenario=scenario.name,
        store=world.store,
        size=size,
        same_namespace=options.same_namespace,
        alone=alone,
        beside=beside,
        p99_bar_ms=bar + (beside.noise_p99_ms if options.brief else 0.0),
        failed=world.healthy_failed() - failed_alone,
        deferred=change["deferred"],
        attempts=max(0, change["attempts"] - healthy_attempts),
        row_updates=change.get("row_updates"),
        trouble_completed=world.trouble_count("completed"),
        trouble_failed=world.trouble_count("failed"),
        cpu_seconds=cpu_seconds,
        beside_seconds=beside_seconds,
        seconds=time.monotonic() - began,
    )
    result.missed.extend(missed_bars(scenario, result))
    return result


def missed_bars(scenario: Scenario, result: Result) -> list[str]:
    """The broken promises of the scenario, one sentence each."""
    missed = []
    if result.beside.p99_ms > result.p99_bar_ms:
        missed.append(f"healthy p99 is {result.beside.p99_ms:,.0f} ms, not within {result.p99_bar_ms:,.0f} ms")
    for name, count in (
        ("failed", result.failed),
        ("are missing", result.beside.missing),
        ("were missing before the trouble", result.alone.missing),
    ):
        if count:
            missed.append(f"{count:,} healthy timers {name}")
    if result.deferred > DEFERRED_RATIO * result.attempts:
        missed.append(f"{result.deferred:,} put back for {result.attempts:,} attempts")
    if scenario.completes and result.trouble_completed < result.size:
        missed.append(
            f"{result.trouble_completed:,} of {result.size:,} other timers completed, {result.trouble_failed:,} failed"
        )
    return missed


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def _printed(ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z"


def _metric(page: str, name: str) -> int:
    """The sum over all labels, 0 if there is no such metric."""
    samples = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return round(sum(map(float, samples)))
