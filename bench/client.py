"""Measures the delivery client alone, with every guard on, compared with wrk and our load generator, against one
receiver."""

from __future__ import annotations

from functools import partial

from bench.processes import WRK, BenchError, worker, wrk
from bench.rounds import Bench, Part, Parts, Sample, Samples
from bench.tables import Table, across, rate
from bench.timers import callback_body

TITLE = "The delivery client alone"
CONCURRENT = 256
CLIENT, SIGNING, LOAD, BY_WRK = "delivery client", "delivery client, signing", "load generator", "wrk"
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "timer-platform/0.1.0 duetime/bench",
    "X-Tenant": "acme",
    "webhook-id": "0f8fad5b-d9cb-569f-a165-70867728950e",
    "webhook-timestamp": "1700000000",
    "duetime-attempt": "1",
    "duetime-timer": "default/0f8fad5bd9cb569fa16570867728950e",
    "traceparent": "00-0f8fad5bd9cb569fa16570867728950e-a16570867728950e-01",
}


def parts(bench: Bench) -> Parts:
    seconds = 1.5 if bench.quick else 2.0

    async def client(keys: int) -> Sample:
        await bench.receiver.ask("reset")
        plan = {"what": "client", "url": bench.url, "callers": CONCURRENT, "seconds": seconds, "keys": keys}
        figures = await worker("ceilings", plan, bench.directory)
        if figures["failed"]:
            raise BenchError(f"the delivery client failed {figures['failed']} times")
        return figures

    async def load() -> Sample:
        await bench.receiver.ask("reset")
        head = {name: value for name, value in HEADERS.items() if name != "Content-Type"}
        plan = {"path": "/hook", "body": callback_body(), "headers": head, "connections": CONCURRENT}
        result = await worker("load", {**plan, "port": bench.receiver.port, "seconds": seconds}, bench.directory)
        return {**result, "per_cpu_second": result["answers"] / result["cpu_seconds"]}

    async def by_wrk() -> Sample:
        await bench.receiver.ask("reset")
        port, body, directory = bench.receiver.port, callback_body(), bench.directory
        return await wrk(port, "/hook", body, HEADERS, connections=CONCURRENT, seconds=seconds, directory=directory)

    made: dict[str, Part] = {CLIENT: partial(client, 0), SIGNING: partial(client, 1), LOAD: load}
    return made | ({BY_WRK: by_wrk} if WRK else {})


def tables(samples: Samples) -> list[Table]:
    names = (CLIENT, SIGNING, LOAD, BY_WRK)
    lines = across(
        samples,
        names,
        ("requests", "per_second", rate),
        ("requests per CPU-second of the sender", "per_cpu_second", rate),
    )
    return [Table(["", *names], lines)]
