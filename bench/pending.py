"""Measures what a million pending timers cost: the other figures with many and with few of them in the file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.creates import measured
from bench.deliveries import START_MS, ahead_of, arrivals
from bench.processes import duetime
from bench.report import Row, compared, ms, rate, us
from bench.rounds import Bench, Part, Sample
from bench.timers import at_once, bytes_of, copy, evenly, far_ahead, fill, now_ms, remove

FEW, MANY, MANY_QUICK = 10_000, 1_000_000, 100_000
AT_ONCE = 5_000
PER_SECOND = 1_000
PAUSE_MS = 1_000
CREATES_SECONDS = 2.0
COPY_MS = 3_000  # for the copy of the file and what is put into it


async def _session(bench: Bench, base: Path, seconds: int, first: int) -> Sample | None:
    """One server on a copy of the file: a steady stretch, then many at one instant, then creates."""
    file = bench.directory / "pending.db"
    steady = PER_SECOND * seconds
    instant = first + seconds * 1000 + PAUSE_MS
    await asyncio.to_thread(copy, base, file)
    await fill(file, [*evenly(bench.url, PER_SECOND, seconds, first), *at_once(bench.url, AT_ONCE, instant)])
    await bench.receiver.ask("reset")
    try:
        async with duetime(bench.directory, file) as server:
            if now_ms() > first:
                return None
            rss_start = server.rss_bytes()
            evenly_fired = await arrivals(bench, steady, server)
            await bench.receiver.ask("reset")
            if now_ms() > instant:
                return None
            fired = await arrivals(bench, AT_ONCE, server, recorded=steady + AT_ONCE)
            made = await measured(bench, server, CREATES_SECONDS)
            return {
                "ready": server.ready_seconds,
                "rss_start": rss_start,
                "rss_end": server.rss_bytes(),
                "steady_p50": evenly_fired["p50_ms"],
                "steady_p99": evenly_fired["p99_ms"],
                "steady_cpu": evenly_fired["server_cpu"],
                "fired": fired["per_second"],
                "fired_cpu": fired["server_cpu"],
                "made": made["per_second"],
                "made_cpu": made["server_cpu"],
            }
    finally:
        remove(file)


async def measure(bench: Bench) -> list[Row]:
    many = MANY_QUICK if bench.quick else MANY
    seconds = 2 if bench.quick else 4
    sizes = {"few": FEW, "many": many}
    bases = {name: bench.directory / f"{name}.db" for name in sizes}
    for name, count in sizes.items():
        bench.say(f"pending: putting {count:,} timers into a file")
        await fill(bases[name], far_ahead(bench.url, count))

    def part(base: Path) -> Part:
        async def session(first: int) -> Sample | None:
            return await _session(bench, base, seconds, first)

        return lambda: ahead_of(session, COPY_MS + START_MS)

    s = await bench.interleave("pending", {name: part(base) for name, base in bases.items()}, long=True)
    judged = many == MANY
    title = f"{many // 1000:,} k" if many < 1_000_000 else "1 M"

    def higher(figure: str, what: str) -> Row:
        few, more = rate(s.median("few", figure)), rate(s.median("many", figure))
        return compared(
            what, more, f"10 k pending {few}", s.ratio("many", "few", figure), least=0.9 if judged else None
        )

    def cost(figure: str, what: str) -> Row:
        few, more = us(s.median("few", figure)), us(s.median("many", figure))
        return compared(what, more, f"10 k pending {few}", s.ratio("many", "few", figure), most=1.1 if judged else None)

    def late(figure: str, what: str) -> Row:
        few, more = s.median("few", figure), s.median("many", figure)
        row = compared(what, ms(more), f"10 k pending {ms(few)}", s.ratio("many", "few", figure))
        if judged:
            # Instants are whole milliseconds: less than one apart is not a difference.
            row.bar, row.ok = "≤ 1.1 or + 1 ms", more <= max(few * 1.1, few + 1)
        return row

    def memory(figure: str, what: str) -> Row:
        few, more = s.median("few", figure) / 1e6, s.median("many", figure) / 1e6
        most = 1.1 if judged else None
        return compared(what, f"{more:.0f} MB", f"10 k pending {few:.0f} MB", s.ratio("many", "few", figure), most=most)

    per_timer = (bytes_of(bases["many"]) - bytes_of(bases["few"])) / (many - FEW)
    ready = s.median("few", "ready")
    return [
        higher("made", f"{title} pending: creates"),
        cost("made_cpu", "  server CPU per create"),
        higher("fired", f"{title} pending: 5,000 at one instant"),
        cost("fired_cpu", "  server CPU per delivery"),
        late("steady_p50", f"{title} pending: steady lateness p50"),
        late("steady_p99", f"{title} pending: steady lateness p99"),
        cost("steady_cpu", "  server CPU per timer"),
        memory("rss_start", f"{title} pending: memory when ready"),
        memory("rss_end", f"{title} pending: memory at the end"),
        compared(
            f"{title} pending: start until ready",
            f"{s.median('many', 'ready'):.2f} s",
            f"10 k pending {ready:.2f} s",
            s.ratio("many", "few", "ready"),
        ),
        Row(f"{title} pending: on disk per timer", f"{per_timer:.0f} bytes"),
    ]
