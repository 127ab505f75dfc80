"""The bars and goals of Duetime, checked against the measurements: held, not held, or why it is unknown.

Every run must reach the bars; a goal, if there is one, is what the design aims at beyond the bar (decision 22).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from msgspec import Struct

from bench import against, batches, client, commands, creates, herd, pending, steady, sustained
from bench.against import Peer
from bench.results import Results
from bench.rounds import Samples, ratio
from bench.setups import POSTGRES, POSTGRES_2, SQLITE
from bench.tables import Format, Table, ms, percent, rate, times

SECOND_WORKER = 1.5
"""Two workers must do at least this many times the work of one."""
BUSY_SHARE_MAX = 1 / SECOND_WORKER
"""If one worker, its load and its database use more of the machine than this, a second worker has no room to add
half."""
NOT_MEASURED, PEERS_MISSING = "was not measured", "no peer has this figure"


class Bar(Struct):
    number: str
    what: str
    bar: str
    goal: str = ""
    measured: str = ""
    ratio: float | None = None
    held: bool | None = None  # None: could not be judged
    reached: bool = False  # the goal
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
    verdicts = {True: "met", False: "**not met**", None: "not judged"}
    lines = [
        [
            f"{bar.number} {bar.what}".strip(),
            bar.bar,
            bar.goal,
            bar.measured,
            times(bar.ratio),
            verdicts[bar.held] + _of_goal(bar) + (f": {bar.why}" if bar.why else ""),
        ]
        for bar in bars
    ]
    return Table(["", "required", "goal", "measured", "ratio", ""], lines, texts=(0, 1, 2, 3, 5))


def _of_goal(bar: Bar) -> str:
    return "" if not bar.goal or not bar.held else ", goal reached" if bar.reached else ", goal missed"


def _at_least(bar: Bar, least: float, goal: float | None) -> Bar:
    """The same bar, judged by its ratio if that was measured."""
    bar.bar, bar.goal = f"≥ {least:g} ×", f"≥ {goal:g} ×" if goal else ""
    if bar.ratio is not None:
        bar.held, bar.reached = bar.ratio >= least, goal is not None and bar.ratio >= goal
    return bar


def _beside(
    number: str, what: str, ours: Mapping[int, float], peer: Peer | None, least: float, goal: float | None = None
) -> Bar:
    """Our rate compared with that of a peer."""
    bar = _compared(Bar(number, what, ""), ours, peer, rate)
    return _at_least(bar, least, goal)


def _compared(bar: Bar, ours: Mapping[int, float], peer: Peer | None, form: Format) -> Bar:
    """The same bar with the median of the rounds' ratios: the machine's speed varies more between rounds than
    within."""
    if not ours or peer is None:
        bar.why = PEERS_MISSING if ours else NOT_MEASURED
        return bar
    name, theirs = peer
    medians = [form(statistics.median(of.values())) for of in (ours, theirs)]
    bar.measured = f"{medians[0]} against {medians[1]} of {name}"
    bar.ratio = ratio(ours, theirs)
    return bar


def _within(
    number: str,
    what: str,
    samples: Samples,
    pair: tuple[str, str],
    figure: str,
    least: float,
    goal: float | None = None,
) -> Bar:
    """The same figure of two parts of one measurement."""
    ours, other = (samples.by_round(part, figure) for part in pair)
    bar = _compared(Bar(number, what, ""), ours, (pair[1], other) if other else None, rate)
    bar.why = bar.why and NOT_MEASURED
    return _at_least(bar, least, goal)


def _creates(samples: Samples, peers: Samples) -> Iterator[Bar]:
    for setup, inserts, least in ((SQLITE, creates.SINGLE, 2), (POSTGRES, creates.PGBENCH, 1)):
        what = f"creates one by one, {setup}"
        ours, best = samples.by_round(setup, "per_second"), against.fastest(peers, against.SINGLES)
        yield _beside("1", f"{what}: the fastest peer", ours, best, 5)
        yield _within("1", f"{what}: single inserts", samples, (setup, inserts), "per_second", least)
        yield _within("1", f"{what}: no store", samples, (setup, creates.BARE_UVICORN), "per_second", 0.5)


def _batches(samples: Samples, peers: Samples) -> Iterator[Bar]:
    best = against.fastest(peers, against.BATCHED)
    for setup in (SQLITE, POSTGRES):
        ours = samples.by_round(batches.part_name(setup, batches.SIZES[0]), "per_second")  # theirs are as large
        yield _beside("2", f"creates in batches, {setup}", ours, best, 0.9, 1.2)


def _herd(samples: Samples, peers: Samples) -> Iterator[Bar]:
    alike = against.given(peers, herd.SMALL)
    best = against.fastest(alike, against.HERD)
    for count in herd.SIZES:
        for setup in (SQLITE, POSTGRES):
            part, what = herd.part_name(setup, count), f"{count:,} at one instant, {setup}"
            yield _beside("3", what, samples.by_round(part, "per_second"), best, 2, 3)
            for name in ("p50", "p99") if count == herd.SMALL else ():
                yield _late("3", f"{what}: lateness {name}", samples, part, alike, f"{name}_ms")


def _late(number: str, what: str, samples: Samples, part: str, peers: Samples, figure: str) -> Bar:
    bar = Bar(number, what, "≤ 0.5 ×", "≤ 0.25 ×")
    _compared(bar, samples.by_round(part, figure), against.soonest(peers, figure), ms)
    if bar.ratio is not None:
        bar.held, bar.reached = bar.ratio <= 0.5, bar.ratio <= 0.25
    return bar


def _sustained(samples: Samples, peers: Samples) -> Iterator[Bar]:
    singles, fastest = against.fastest(peers, against.SUSTAINED_SINGLES), against.fastest(peers, against.SUSTAINED)
    for setup, factor in ((SQLITE, 3.0), (POSTGRES, 1.5)):
        what = f"end to end, {setup}"
        ours = samples.by_round(sustained.single_name(setup), "per_second")
        yield _beside("4", f"{what}, {sustained.ONE_BY_ONE}", ours, singles, factor)
        ours = samples.by_round(setup, "per_second")
        yield _beside("4", f"{what}, {sustained.IN_BATCHES}", ours, fastest, 1.1, factor)


def _steady(samples: Samples) -> Iterator[Bar]:
    for setup in (SQLITE, POSTGRES):
        yield _twice("5", f"steady 1,000/s, {setup}: lateness p99", samples, setup, steady.LOOP)


def _twice(number: str, what: str, samples: Samples, part: str, beside: str) -> Bar:
    """A p99 of at most twice another one plus 10 ms, in most rounds: with a mean, one stall would dominate."""
    bar = f"≤ 2 × {beside} + 10 ms"
    pairs = list(zip(samples.each(part, "p99_ms"), samples.each(beside, "p99_ms"), strict=False))
    if not pairs:
        return Bar(number, what, bar, why=NOT_MEASURED)
    held = [ours <= 2 * other + 10 for ours, other in pairs]
    measured = (
        f"{ms(samples.median(part, 'p99_ms') or 0)} against {ms(samples.median(beside, 'p99_ms') or 0)} of {beside}"
    )
    ratio = samples.ratio(part, beside, "p99_ms")
    return Bar(number, what, bar, measured=measured, ratio=ratio, held=sum(held) > len(held) / 2)


def _pending(samples: Samples) -> Iterator[Bar]:
    names = pending.HIGHER | pending.LATE | pending.LOWER
    for setup in pending.SETUPS:
        judged = {figure: pending.within(samples, setup, figure) for figure in names}
        known = {figure: (ratio, ok) for figure, (ratio, ok) in judged.items() if ratio is not None}
        bar = Bar("6", f"1 M pending against 10 k, {setup}: every figure", pending.BAR, why=NOT_MEASURED)
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
        bar = _within("7", f"a second worker: {what}", samples, (two, one), "per_second", SECOND_WORKER)
        busy = samples.median(one, "busy")
        if busy is not None and busy > BUSY_SHARE_MAX:
            bar.held, bar.why = (
                None,
                f"{SECOND_WORKER:g} × the {percent(busy)} in use with one does not fit the machine",
            )
        yield bar


def _client(samples: Samples) -> Iterator[Bar]:
    pair = client.CLIENT, client.BY_WRK
    yield _within("8", "delivery client: per CPU-second", samples, pair, "per_cpu_second", 0.35, 0.4)


def _commands(samples: Samples) -> Iterator[Bar]:
    taken = samples.median(commands.TAKEN, "per_second")
    if taken is not None:
        least = commands.TAKEN_PER_SECOND_MIN
        yield Bar("", "commands of a broker", f"≥ {rate(least)}", measured=rate(taken), held=taken >= least)
        yield _twice("", "HTTP timers, broker down: lateness p99", samples, commands.DOWN, commands.UP)
