"""Measures the NATS API: how fast commands are processed, and the effect of a broker outage on HTTP timers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import nats
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig

from bench.firing import ahead_of, arrivals
from bench.processes import BenchError, Process, duetime, worker
from bench.processes import nats as nats_server
from bench.rounds import Bench, Parts, Sample, Samples
from bench.tables import Table, across, ms, rate, us
from bench.timers import DAY_MS, evenly, fill, now_ms, remove, timer
from duetime.brokers.nats import CONSUMER, Names
from duetime.model import BodyFormat, NatsTarget, Timer
from duetime.timetext import format_time

TITLE = "NATS commands"
TAKEN, ACKED, UP, DOWN = "taken in", "only acked", "broker up", "broker down"
START_MS = 1_500
TENANTS = 10
TAKEN_PER_SECOND_MIN = 5_000
LOOK_SECONDS = 0.01
TAKEN_SECONDS_MAX = 120.0
HTTP_PER_SECOND = 1_000
EVENTS_PER_SECOND = 500
NAMES = Names()


def parts(bench: Bench) -> Parts:
    return {**_taken_in(bench), **_lateness(bench)}


def tables(samples: Samples) -> list[Table]:
    taken, beside = (TAKEN, ACKED), (UP, DOWN)
    commands = across(samples, taken, ("commands", "per_second", rate), ("CPU per command", "cpu", us))
    lateness = across(samples, beside, ("lateness p50", "p50_ms", ms), ("lateness p99", "p99_ms", ms))
    due = f"HTTP timers at {rate(HTTP_PER_SECOND)} beside NATS timers at {rate(EVENTS_PER_SECOND)}"
    return [Table(["", "created", "only acked"], commands), Table([due, *beside], lateness)]


# Commands in.


def _taken_in(bench: Bench) -> Parts:
    count = 10_000 if bench.quick else 30_000
    file = bench.directory / "commands.db"

    async def ours() -> Sample:
        async with nats_server(bench.directory) as broker:
            await _publish(broker, count)
            try:
                async with duetime(bench.directory, file, TIMER_BROKER_URL=_url(broker)) as server:
                    return await _watch(broker, server, count)
            finally:
                remove(file)

    async def bare() -> Sample:
        async with nats_server(bench.directory) as broker:
            await _publish(broker, count)
            plan = {"what": "acks", "url": _url(broker), "stream": NAMES.commands_stream, "consumer": CONSUMER}
            figures = await worker("ceilings", {**plan, "count": count}, bench.directory)
            return {**figures, "cpu": 1 / figures["per_cpu_second"]}

    return {TAKEN: ours, ACKED: bare}


async def _publish(broker: Process, count: int) -> None:
    """Create the stream and the consumer as the service would, and publish the commands."""
    client = await _connect(broker)
    js = client.jetstream()
    subjects = [f"{NAMES.commands}.*"]
    await js.add_stream(
        StreamConfig(name=NAMES.commands_stream, subjects=subjects, retention=RetentionPolicy.WORK_QUEUE)
    )
    config = ConsumerConfig(
        durable_name=CONSUMER, filter_subject=subjects[0], ack_policy=AckPolicy.EXPLICIT, max_ack_pending=20_000
    )
    await js.add_consumer(NAMES.commands_stream, config)
    tomorrow = now_ms() + DAY_MS
    for number in range(count):
        tenant = f"tenant-{number % TENANTS}"
        command = {
            "id": f"command-{number}",
            "type": "ScheduleTimer",
            "tenantId": tenant,
            "correlationId": f"order-{number}",
            "timestampMs": tomorrow - DAY_MS,
            "payload": {"tenantId": tenant, "serviceCallId": f"call-{number}", "dueAt": format_time(tomorrow + number)},
        }
        await client.publish(f"{NAMES.commands}.{tenant}", msgspec.json.encode(command))
    await client.flush()
    await _until_left(client, count, count)
    await client.close()


async def _watch(broker: Process, server: Process, count: int) -> Sample:
    """From when the first commands are seen to be acked until all are."""
    client = await _connect(broker)
    left = await _until_left(client, 0, count - 1)
    started, cpu = time.perf_counter(), server.cpu_seconds()
    if left < count // 2:
        raise BenchError("the commands were acked before the measurement began")
    await _until_left(client, 0, 0)
    took, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
    await client.close()
    _, page = await server.get("/metrics")
    if f'duetime_timers{{status="pending"}} {float(count)}' not in page:
        raise BenchError(f"not all of {count} commands became timers")
    return {"per_second": left / took, "cpu": cpu / left}


async def _until_left(client: Client, least: int, most: int) -> int:
    """Wait until the stream of commands holds this many messages."""
    js = client.jetstream()
    until = time.monotonic() + TAKEN_SECONDS_MAX
    while time.monotonic() < until:
        left = (await js.stream_info(NAMES.commands_stream)).state.messages
        if least <= left <= most:
            return left
        await asyncio.sleep(LOOK_SECONDS)
    raise BenchError("the commands were not acked in time")


async def _connect(broker: Process) -> Client:
    return await nats.connect(_url(broker))


def _url(broker: Process) -> str:
    return f"nats://127.0.0.1:{broker.port}"


# HTTP timers meanwhile.


def _lateness(bench: Bench) -> Parts:
    file = bench.directory / "lateness.db"
    seconds = 4 if bench.quick else 8
    count, events = HTTP_PER_SECOND * seconds, EVENTS_PER_SECOND * seconds

    async def once(first: int, down: bool) -> dict[str, Any] | None:
        http = evenly(bench.url, HTTP_PER_SECOND, seconds, first)
        await fill(file, [*http, *(_event(first + n * 1000 // EVENTS_PER_SECOND) for n in range(events))])
        await bench.receiver.ask("reset")
        try:
            async with (
                nats_server(bench.directory) as broker,
                duetime(bench.directory, file, TIMER_BROKER_URL=_url(broker), LOG_LEVEL="error") as server,
            ):
                await _set_up(broker)
                if down:
                    await broker.kill()
                if now_ms() >= first:
                    return None
                return await arrivals(bench, count, server, recorded=count if down else count + events)
        finally:
            remove(file)

    async def up() -> Sample:
        return await ahead_of(lambda first: once(first, False), START_MS + count // 10)

    async def down() -> Sample:
        return await ahead_of(lambda first: once(first, True), START_MS + count // 10)

    return {UP: up, DOWN: down}


def _event(execute_at: int) -> Timer:
    """A pending timer as the NATS API would have created it."""
    made = timer("", execute_at)
    definition = msgspec.structs.replace(
        made.definition, target=NatsTarget(subject=f"{NAMES.events}.tenant-0"), body=BodyFormat.EVENT
    )
    return msgspec.structs.replace(made, definition=definition)


async def _set_up(broker: Process) -> None:
    """Wait until the service is connected and has created its streams."""
    client = await _connect(broker)
    js = client.jetstream()
    for _ in range(1_000):
        try:
            await js.consumer_info(NAMES.commands_stream, CONSUMER)
            break
        except nats.js.errors.NotFoundError:
            await asyncio.sleep(LOOK_SECONDS)
    else:
        raise BenchError("the service did not set up the broker's streams")
    await client.close()
