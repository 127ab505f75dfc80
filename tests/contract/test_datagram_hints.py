"""Hints by datagram: they reach the other instances, are merged, are rejected without the key, and delay nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from duetime.instants import Instant
from duetime.store import Hint
from duetime.stores.datagram_hints import DatagramHints
from tests.contract.test_hints import eventually

KEY, OTHER_KEY = bytes(32), bytes(31) + b"\1"
DATABASE = ("127.0.0.1", 9)


class Instance(DatagramHints):
    def __init__(self) -> None:
        super().__init__()
        self.hints: list[Hint] = []
        self.heard = self.hints.append


@asynccontextmanager
async def instances(*keys: bytes) -> AsyncIterator[list[Instance]]:
    found = [Instance() for _ in keys]
    for instance, key in zip(found, keys, strict=True):
        await instance.start(key, DATABASE)
    for instance in found:
        instance.set_peers(other.address for other in found)
    yield found
    for instance in found:
        instance.close()


async def test_hint_reaches_all_peers_but_not_its_sender() -> None:
    async with instances(KEY, KEY, KEY) as (one, two, three):
        one.send(Hint(due_at=Instant(1234), namespaces=True))
        await eventually(lambda: two.hints and three.hints)
        assert two.hints == three.hints == [Hint(due_at=Instant(1234), namespaces=True)]
        assert one.hints == []


async def test_hints_sent_together_are_merged() -> None:
    async with instances(KEY, KEY) as (one, two):
        for hint in (
            Hint(due_at=Instant(300)),
            Hint(due_at=Instant(100)),
            Hint(shards=True),
            Hint(due_at=Instant(200)),
        ):
            one.send(hint)
        await eventually(lambda: two.hints)
        one.send(Hint(due_at=Instant(7)))
        await eventually(lambda: len(two.hints) > 1)
        assert two.hints == [Hint(due_at=Instant(100), shards=True), Hint(due_at=Instant(7))]


async def test_close_sends_the_pending_hint() -> None:
    async with instances(KEY, KEY) as (one, two):
        one.send(Hint(due_at=Instant(77)))
        one.close()
        await eventually(lambda: two.hints)


async def test_hint_with_another_key_is_ignored() -> None:
    async with instances(KEY, KEY, OTHER_KEY) as (one, two, stranger):
        stranger.send(Hint(due_at=Instant(1)))
        await asyncio.sleep(0.1)
        one.send(Hint(due_at=Instant(2)))
        await eventually(lambda: two.hints)
        assert two.hints == [Hint(due_at=Instant(2))]
        assert stranger.hints == []


async def test_invalid_datagrams_are_ignored() -> None:
    async with instances(KEY, KEY) as (one, two):
        assert two.address
        proven = b"what a later version says"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise:
            for data in (
                b"",
                b"x",
                bytes(16),
                bytes(16) + b'{"due_at":1}',
                bytes(9000),
                two._signature(proven) + proven,
            ):
                noise.sendto(data, ("127.0.0.1", int(two.address.split(" ")[1])))
        one.send(Hint(due_at=Instant(2)))
        await eventually(lambda: two.hints)
        assert two.hints == [Hint(due_at=Instant(2))]


async def test_unreachable_peers_do_not_delay_hints() -> None:
    async with instances(KEY, KEY, KEY) as (one, two, gone):
        gone.close()
        one.set_peers([gone.address, "::1 9", "no.address.invalid 9", None, two.address])
        for n in range(3):
            one.send(hint := Hint(due_at=Instant(n)))
            await eventually(partial(two.hints.__contains__, hint))


async def test_hints_are_disabled_without_a_route_to_the_database() -> None:
    alone = Instance()
    await alone.start(KEY, ("no-such-host.invalid", 9))
    assert alone.address is None
    alone.set_peers(["127.0.0.1 9"])
    alone.send(Hint(shards=True))
    alone.close()
