"""The kinds of trouble: destinations that hang, refuse or are slow, bursts, names that do not resolve, and too few file
descriptors.

All of them stay on loopback. ``size`` is always the number of timers of the trouble.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from tests.isolation.names import host
from tests.isolation.receiver import ReceiverProcess
from tests.isolation.world import Scenario, Trouble, Wave, World
from tests.servers import PATIENCE_SECONDS, unused_port

DESTINATIONS_SILENT = 20
ORIGINS_LONG = 17
PER_ORIGIN_LONG = 256
TIMERS_PER_DEAD_HOST = 20
SLOW_SECONDS = 5.0
LOOKUP_SECONDS = 0.1
DESCRIPTORS_MAX = 1024
IDLE_CONNECTIONS = 1074
CACHE_SECONDS = 6.0
"""Longer than the service caches the result of a lookup, which it also makes when a timer is created."""
_SINGLE = {"maxRetries": 0}


def _to(urls: list[str], **more: Any) -> Any:
    """The fields of timers that go to these in turn."""
    return lambda n: {"callbackUrl": urls[n % len(urls)], **more}


def _addresses(network: int, count: int) -> list[str]:
    """Distinct loopback addresses."""
    return [f"127.{network}.{n // 250}.{n % 250 + 1}" for n in range(count)]


def _silent(world: World, hosts: list[str]) -> list[str]:
    return world.enter(ReceiverProcess(hosts, delay_seconds=None)).urls


def hang(world: World, size: int) -> Trouble:
    first = size // 2
    refused = world.enter(unused_port())
    return Trouble(
        [
            Wave(first, _to(_silent(world, ["127.0.0.1"]))),
            Wave(
                size - first,
                _to([f"http://127.0.0.1:{refused}/"]),
                after_seconds=world.options.beside_seconds / 2,
            ),
        ]
    )


def hang_huge(world: World, size: int) -> Trouble:
    return Trouble([Wave(size, _to(_silent(world, ["127.0.0.1"])))])


def silent_many(world: World, size: int) -> Trouble:
    return Trouble([Wave(size, _to(_silent(world, _addresses(1, DESTINATIONS_SILENT))))])


def herd(world: World, size: int) -> Trouble:
    return Trouble([Wave(size, _to(world.enter(ReceiverProcess()).urls))])


def long_timeout(world: World, size: int) -> Trouble:
    urls = _silent(world, _addresses(2, ORIGINS_LONG))
    return Trouble([Wave(size, _to(urls, callbackTimeout="1h"))])


def dead_hosts(world: World, size: int) -> Trouble:
    hosts = _addresses(3, max(2, size // TIMERS_PER_DEAD_HOST))
    half = len(hosts) // 2
    # Bound on every address and not listening: each of them refuses connections to this port.
    closed = world.enter(socket.socket())
    closed.bind(("", 0))
    port = closed.getsockname()[1]
    urls = _silent(world, hosts[:half]) + [f"http://{address}:{port}/" for address in hosts[half:]]
    return Trouble([Wave(size, _to(urls))])


def slow(world: World, size: int) -> Trouble:
    return Trouble([Wave(size, _to(world.enter(ReceiverProcess(delay_seconds=SLOW_SECONDS)).urls))])


def dns_silent(world: World, size: int) -> Trouble:
    return Trouble([Wave(size, lambda n: {"callbackUrl": f"http://{host('silent', n)}:{world.quick.port}/"})])


def dns_slow(world: World, size: int) -> Trouble:
    port = world.enter(ReceiverProcess()).port

    def fields(n: int) -> dict[str, Any]:
        return {"callbackUrl": f"http://{host('slow', n)}:{port}/", "retryPolicy": _SINGLE}

    def begin() -> None:
        world.names.slow_seconds = LOOKUP_SECONDS
        world.names.queries.clear()

    def end() -> None:
        looked_up = world.names.queries["slow"]
        assert looked_up > size // 10, f"only {looked_up} lookups: the service still knew the names from the creation"

    return Trouble([Wave(size, fields)], begin, end)


def descriptors(world: World, size: int) -> Trouble:
    # Each timer needs a connection of its own: no two go to the same address.
    urls = world.enter(ReceiverProcess(_addresses(4, size))).urls
    idle = world.enter(ExitStack())

    def begin() -> None:
        for _ in range(IDLE_CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", world.service.port), PATIENCE_SECONDS))

    return Trouble(
        [Wave(size, _to(urls, retryPolicy=_SINGLE), over_seconds=world.options.beside_seconds)], begin, idle.close
    )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "hang",
            "half go to a destination that never answers, then half to one that refuses connections",
            (40_000, 200_000),
            6_000,
            hang,
        ),
        Scenario("hang-huge", "one destination that never answers", (300_000,), None, hang_huge),
        Scenario(
            "silent-many",
            f"{DESTINATIONS_SILENT} destinations that never answer",
            (DESTINATIONS_SILENT * 300,),
            DESTINATIONS_SILENT * 300,
            silent_many,
        ),
        Scenario(
            "herd",
            "all due at one instant, to a quick receiver",
            (60_000, 100_000),
            24_000,
            herd,
            p99_ms_max=500.0,
            completes=True,
        ),
        Scenario(
            "long-timeout",
            f"{ORIGINS_LONG} origins that never answer, with callbackTimeout 1h",
            (ORIGINS_LONG * PER_ORIGIN_LONG,),
            ORIGINS_LONG * PER_ORIGIN_LONG,
            long_timeout,
        ),
        Scenario(
            "dead-hosts",
            f"a dead host for every {TIMERS_PER_DEAD_HOST}; half of the hosts refuse, half never answer",
            (20_000,),
            10_000,
            dead_hosts,
        ),
        Scenario("slow", f"one destination that answers after {SLOW_SECONDS:g} s", (5_000,), 1_500, slow),
        Scenario(
            "dns-silent",
            "each to a name that the DNS server says nothing about",
            (1_000,),
            1_000,
            dns_silent,
            dns=True,
            lead_seconds=CACHE_SECONDS,
        ),
        Scenario(
            "dns-slow",
            f"each to a name of its own; a lookup takes {LOOKUP_SECONDS * 1000:g} ms",
            (2_000,),
            2_000,
            dns_slow,
            completes=True,
            dns=True,
            lead_seconds=CACHE_SECONDS,
        ),
        Scenario(
            "descriptors",
            f"{IDLE_CONNECTIONS:,} idle clients of a service that may open {DESCRIPTORS_MAX:,} files",
            (30,),
            30,
            descriptors,
            completes=True,
            open_files_max=DESCRIPTORS_MAX,
        ),
    )
}
