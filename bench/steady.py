"""Measures lateness at a steady 1,000 timers/s, beside a bare loop that sends the same requests from memory."""

from __future__ import annotations

from bench.deliveries import START_MS, ahead_of, fired
from bench.processes import BenchError, worker
from bench.report import Row, compared, ms, us
from bench.rounds import Bench, Sample
from bench.timers import evenly

PER_SECOND = 1_000


async def measure(bench: Bench) -> list[Row]:
    file = bench.directory / "steady.db"
    seconds = 4 if bench.quick else 8
    count = PER_SECOND * seconds

    async def once(first: int) -> Sample | None:
        return await fired(bench, file, list(evenly(bench.url, PER_SECOND, seconds, first)), first)

    async def timers() -> Sample:
        return await ahead_of(once, START_MS + count // 20)

    async def loop() -> Sample:
        await bench.receiver.ask("reset")
        plan = {"what": "loop", "url": bench.url, "per_second": PER_SECOND, "seconds": seconds}
        await worker("ceilings", plan, bench.directory)
        sample = await bench.receiver.ask("report")
        if sample["count"] != count:
            raise BenchError(f"{sample['count']} requests of the bare loop came, not {count}")
        return sample

    s = await bench.interleave("steady", {"duetime": timers, "bare loop": loop}, long=True)
    rows = []
    for name, figure in (("p50", "p50_ms"), ("p99", "p99_ms"), ("p99.9", "p999_ms")):
        row = compared(
            f"steady 1,000/s, lateness {name}",
            ms(s.median("duetime", figure)),
            f"bare loop {ms(s.median('bare loop', figure))}",
            s.ratio("duetime", "bare loop", figure),
        )
        if name == "p99":
            pairs = zip(s.of["duetime"], s.of["bare loop"], strict=True)
            row.bar = "≤ 2 × bare + 10 ms"
            # Most rounds must hold it: a mean would let one stall of the bare loop pass for a good figure of ours.
            held = [ours[figure] <= 2 * bare[figure] + 10 for ours, bare in pairs]
            row.ok = sum(held) > len(held) / 2
        rows.append(row)
    rows.append(Row("  server CPU per timer", us(s.median("duetime", "server_cpu"))))
    return rows
