"""The bars that the design sets, judged by what was measured: held, not held, or why it can't be said."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from bench import against, batches, client, commands, creates, herd, pending, steady
from bench.results import Results
from bench.rounds import Samples
from bench.setups import POSTGRES, POSTGRES_2, SETUPS, SQLITE
from bench.tables import Table, ms, percent, rate, times

SECOND_WORKER = 1.5
"""What two workers do must be at least so many times what one does."""
BUSY_SHARE_MAX = 1 / SECOND_WORKER
"""With more of the machine busy with one worker, its load and its database, a second one has no room to add half."""
PEERS_MISSING = "no peer has this figure"
HERD_GOAL, SUSTAINED_GOAL = ", the goal 5 ×", ", the goal 10,000/s"


class Bar(Struct):
    number: str
    what: str
    bar: str
    measured: str = ""
    ratio: float | None = None
    held: bool | None = None  # None: could not be judged
    why: str = ""  # … because


def judge(results: Results) -> list[Bar]:
    peers = results.of("peers")
    return [
        *_creates(results.of("creates"), peers),
        *_batches(results.of("batches"), peers),
        *_herd(results.of("herd"), peers),
        *_sustained(results.of("sustained"), peers),
        *_steady(results.of("steady")),
        *_pending(results.of("pending")),
        *_second_worker(results),
        *_client(results.of("client")),
        *_commands(results.of("commands")),
    ]


def table(bars: list[Bar]) -> Table:
    verdicts = {True: "held", False: "**not held**", None: "not judged"}
    lines = [
        [
            f"{bar.number} {bar.what}".strip(),
            bar.bar,
            bar.measured,
            times(bar.ratio),
            verdicts[bar.held] + (f": {bar.why}" if bar.why else ""),
        ]
        for bar in bars
    ]
    return Table(["", "bar", "measured", "ratio", ""], lines, texts=(0, 1, 2, 4))


def _least(
    number: str, what: str, least: float, ours: float | None, beside: tuple[str, float] | None, goal: str = ""
) -> Bar:
    """Our rate beside another one, of which it must be at least so many times."""
    bar = Bar(number, what, f"≥ {least:g} ×{goal}")
    if ours is None or beside is None:
        bar.why = "was not measured" if ours is None else PEERS_MISSING
        return bar
    name, value = beside
    bar.measured, bar.ratio = f"{rate(ours)} to {rate(value)} of {name}", ours / value
    bar.held = bar.ratio >= least
    return bar


def _ratio(number: str, what: str, least: float, samples: Samples, part: str, beside: str, figure: str) -> Bar:
    """The same within one measurement, by the median of the rounds' ratios."""
    ratio, ours, other = (
        samples.ratio(part, beside, figure),
        samples.median(part, figure),
        samples.median(beside, figure),
    )
    if ratio is None or ours is None or other is None:
        return Bar(number, what, f"≥ {least:g} ×", why="was not measured")
    return Bar(number, what, f"≥ {least:g} ×", f"{rate(ours)} to {rate(other)} of {beside}", ratio, ratio >= least)


def _creates(samples: Samples, peers: Samples) -> Iterator[Bar]:
    for setup in (SQLITE, POSTGRES):
        what = f"creates one by one, {setup}"
        ours = samples.median(setup, "per_second")
        yield _least("1", f"{what}: the fastest peer", 5, ours, against.fastest(peers, against.SINGLES))
        yield _ratio("1", f"{what}: pgbench's inserts", 1, samples, setup, creates.PGBENCH, "per_second")
        yield _ratio("1", f"{what}: the bare server", 0.5, samples, setup, creates.BARE, "per_second")


def _batches(samples: Samples, peers: Samples) -> Iterator[Bar]:
    for setup in (SQLITE, POSTGRES):
        ours = samples.median(batches.part_name(setup, batches.SIZES[0]), "per_second")  # theirs are as large
        yield _least("2", f"creates in batches, {setup}", 1.2, ours, against.fastest(peers, against.BATCHED))


def _herd(samples: Samples, peers: Samples) -> Iterator[Bar]:
    alike = against.given(peers, herd.SMALL)
    best = against.fastest(alike, against.HERD)
    for setup in SETUPS:
        part = herd.part_name(setup, herd.SMALL)
        what = f"{herd.SMALL:,} at one instant, {setup}"
        yield _least("3", what, 3, samples.median(part, "per_second"), best, HERD_GOAL)
        for name in ("p50", "p99"):
            yield _late("3", f"{what}: lateness {name}", samples.median(part, f"{name}_ms"), alike, f"{name}_ms")
    for setup in SETUPS:
        ours = samples.median(herd.part_name(setup, herd.LARGE), "per_second")
        yield _least("3", f"{herd.LARGE:,} at one instant, {setup}", 3, ours, best, HERD_GOAL)


def _late(number: str, what: str, ours: float | None, peers: Samples, figure: str) -> Bar:
    beside = against.soonest(peers, figure)
    if ours is None or beside is None:
        return Bar(number, what, "≤ 0.25 ×", why="was not measured" if ours is None else PEERS_MISSING)
    name, value = beside
    return Bar(number, what, "≤ 0.25 ×", f"{ms(ours)} to {ms(value)} of {name}", ours / value, ours / value <= 0.25)


def _sustained(samples: Samples, peers: Samples) -> Iterator[Bar]:
    best = against.fastest(peers, against.SUSTAINED)
    for setup, least in ((SQLITE, 3.0), (POSTGRES, 1.5), (POSTGRES_2, 1.5)):
        yield _least("4", f"end to end, {setup}", least, samples.median(setup, "per_second"), best, SUSTAINED_GOAL)


def _steady(samples: Samples) -> Iterator[Bar]:
    for setup in (SQLITE, POSTGRES):
        yield _twice("5", f"steady 1,000/s, {setup}: lateness p99", samples, setup, steady.LOOP)


def _twice(number: str, what: str, samples: Samples, part: str, beside: str) -> Bar:
    """A p99 of at most twice another one plus 10 ms, in most rounds: a mean would let one stall pass for a figure."""
    bar = f"≤ 2 × {beside} + 10 ms"
    pairs = list(zip(samples.each(part, "p99_ms"), samples.each(beside, "p99_ms"), strict=False))
    if not pairs:
        return Bar(number, what, bar, why="was not measured")
    held = [ours <= 2 * other + 10 for ours, other in pairs]
    measured = f"{ms(samples.median(part, 'p99_ms') or 0)} to {ms(samples.median(beside, 'p99_ms') or 0)} of {beside}"
    return Bar(number, what, bar, measured, samples.ratio(part, beside, "p99_ms"), sum(held) > len(held) / 2)


def _pending(samples: Samples) -> Iterator[Bar]:
    names = pending.HIGHER | pending.LATE | pending.LOWER
    for setup in pending.SETUPS:
        judged = {figure: pending.within(samples, setup, figure) for figure in names}
        known = {figure: (ratio, ok) for figure, (ratio, ok) in judged.items() if ratio is not None}
        bar = Bar("6", f"1 M pending against 10 k, {setup}: every figure", pending.BAR, why="was not measured")
        if known:
            failed = [f"{names[figure]} {times(ratio)}" for figure, (ratio, ok) in known.items() if not ok]
            bar.measured = f"{len(known) - len(failed)} of {len(known)}" + "".join(f"; {one}" for one in failed)
            bar.held, bar.why = not failed, ""
        yield bar


def _second_worker(results: Results) -> Iterator[Bar]:
    of_500 = [batches.part_name(setup, batches.SIZES[0]) for setup in (POSTGRES, POSTGRES_2)]
    for measurement, what, (one, two) in (
        ("creates", "creates one by one", (POSTGRES, POSTGRES_2)),
        ("batches", "creates in batches", of_500),
        ("sustained", "end to end", (POSTGRES, POSTGRES_2)),
    ):
        samples = results.of(measurement)
        bar = _ratio("7", f"a second worker: {what}", SECOND_WORKER, samples, two, one, "per_second")
        busy = samples.median(one, "busy")
        if busy is not None and busy > BUSY_SHARE_MAX:
            bar.held, bar.why = None, f"{SECOND_WORKER:g} × the {percent(busy)} busy with one do not fit the machine"
        yield bar


def _client(samples: Samples) -> Iterator[Bar]:
    for name in (client.CLIENT, client.SIGNING):
        yield _ratio("8", f"{name}: per CPU-second", 0.4, samples, name, client.BY_WRK, "per_cpu_second")


def _commands(samples: Samples) -> Iterator[Bar]:
    taken = samples.median(commands.TAKEN, "per_second")
    if taken is not None:
        least = commands.TAKEN_PER_SECOND_MIN
        yield Bar("", "commands of a broker", f"≥ {rate(least)}", rate(taken), held=taken >= least)
        yield _twice("", "HTTP timers, broker down: lateness p99", samples, commands.DOWN, commands.UP)
