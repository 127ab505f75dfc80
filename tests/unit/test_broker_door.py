"""The NATS API with a fake broker in memory: batches, their single write, and the acks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from duetime.broker import BrokerAway, BrokerError, Command
from duetime.doors.broker import DEAD_LETTERS_AT_ONCE, DEAD_LETTERS_WAITING_MAX, BrokerDoor
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Status, Timer
from duetime.namespaces import Namespaces
from duetime.service import Service
from duetime.store import Taken
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.timetext import parse_time
from tests.clocks import ManualClock

SOONER, FAR, LATER = "2998-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z", "2999-01-02T00:00:00.000Z"


class CountingStore(MemoryStore):
    """Counts the writes, and fails on demand."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock, shards=8)
        self.writes: list[int] = []
        self.fails = False

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        if self.fails:
            raise StoreUnavailable("away")
        self.writes.append(len(timers))
        return await super().put_many(timers)


class ListBroker:
    """Records what was done with each command."""

    connected = True

    def __init__(self) -> None:
        self.answers: dict[int, str] = {}
        self.letters: list[tuple[bytes, dict[str, str], str]] = []
        self.failure: list[BrokerError] = []
        self.waiting: asyncio.Queue[Sequence[Command]] = asyncio.Queue()
        self.stopped = False
        self.confirms = asyncio.Event()
        """Whether it acks publishes."""
        self.confirms.set()
        self.publishing = 0
        self.publishing_max = 0

    async def run(self) -> None:
        raise AssertionError("nobody runs this one")

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], *, id: str, timeout: float) -> None:
        if self.failure:
            raise self.failure.pop(0)
        self.publishing += 1
        self.publishing_max = max(self.publishing, self.publishing_max)
        await self.confirms.wait()
        self.publishing -= 1
        self.letters.append((body, dict(headers), id))

    async def take(self) -> Sequence[Command]:
        return await self.waiting.get()

    async def ack(self, commands: Sequence[Command]) -> None:
        self.answers |= {command.number: "ack" for command in commands}

    async def nack(self, commands: Sequence[Command], *, delay_ms: int) -> None:
        self.answers |= {command.number: "nack" for command in commands}

    async def reject(self, command: Command, reason: str) -> None:
        assert any(id == f"{command.subject}-{command.number}" for _, _, id in self.letters), "no copy was kept"
        self.answers[command.number] = "reject"

    async def stop_taking(self) -> None:
        self.stopped = True

    async def close(self) -> None:
        pass

    async def problems(self) -> list[str]:
        return []


class World:
    def __init__(self) -> None:
        self.clock = clock = ManualClock()
        self.store = CountingStore(clock)
        self.broker = ListBroker()
        self.namespaces = Namespaces(self.store, clock, lambda: None)
        self.service = Service(self.store, self.namespaces, {}, clock, lambda *timers: None)
        self.door = BrokerDoor(
            self.service, self.broker, Telemetry(), events="out", dead_letters="dead", bytes_max=262_144
        )
        self._sent = 0

    def command(self, call: str = "call", due: str = FAR, data: bytes | None = None, **fields: Any) -> Command:
        self._sent += 1
        asked = {"tenantId": "acme", "serviceCallId": call, "dueAt": due, **fields}
        return Command("in.acme", json.dumps(asked).encode() if data is None else data, self._sent, self._sent, None)

    async def due(self, call: str = "call") -> int:
        return (await self.service.get("acme", call)).execute_at


async def settled() -> None:
    """Wait until all tasks are blocked."""
    for _ in range(500):
        await asyncio.sleep(0)


def run(test: Any) -> None:
    async def main() -> None:
        world = World()
        await world.store.open()
        await test(world)

    asyncio.run(main())


def test_a_batch_is_one_write() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(f"c{n}") for n in range(500)])
        assert world.store.writes == [500]
        assert set(world.broker.answers.values()) == {"ack"} and len(world.broker.answers) == 500

    run(test)


def test_bad_commands_become_dead_letters_and_the_rest_is_one_write() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command("a"), world.command(data=b"bad"), world.command("b")])
        assert world.store.writes == [2]
        assert world.broker.answers == {1: "ack", 2: "reject", 3: "ack"}
        [(body, headers, id)] = world.broker.letters
        assert body == b"bad" and headers["duetime-subject"] == "in.acme" and id == "in.acme-2"

    run(test)


def test_a_command_beyond_the_maximum_of_namespaces_is_a_dead_letter() -> None:
    async def test(world: World) -> None:
        world.namespaces = Namespaces(world.store, world.clock, lambda: None, number_max=2)
        world.service = Service(world.store, world.namespaces, {}, world.clock, lambda *timers: None)
        await world.namespaces.start()
        door = BrokerDoor(
            world.service, world.broker, Telemetry(), events="out", dead_letters="dead", bytes_max=262_144
        )
        others = [world.command("b", tenantId="other"), world.command("d", tenantId="other")]
        others = [msgspec.structs.replace(other, subject="in.other") for other in others]
        await door.handle([world.command("a"), others[0], world.command("c"), others[1]])
        assert world.broker.answers == {1: "reject", 2: "reject", 3: "ack", 4: "ack"}
        assert world.store.writes == [2]
        assert [headers["duetime-subject"] for _, headers, _ in world.broker.letters] == ["in.other"] * 2
        assert "2 namespaces" in world.broker.letters[0][1]["duetime-error"]

    run(test)


def test_batch_of_only_bad_commands_writes_nothing() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(data=b"")])
        assert world.store.writes == [] and world.broker.answers == {1: "reject"}

    run(test)


def test_no_command_is_acked_before_it_is_written() -> None:
    async def test(world: World) -> None:
        world.store.fails = True
        await world.door.handle([world.command("a"), world.command(data=b"bad"), world.command("b")])
        assert world.broker.answers == {1: "nack", 2: "reject", 3: "nack"}

    run(test)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreIndeterminate("nobody knows")])
def test_only_commands_whose_write_failed_are_redelivered(error: StoreError) -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(call, FAR) for call in ("a", "b", "c")])
        swap = world.store.swap

        async def broken(before: Timer, after: Timer | None) -> bool:
            if before.id == "b":
                raise error
            return await swap(before, after)

        world.store.swap = broken  # type: ignore[method-assign]
        moves = [world.command(call, LATER) for call in ("a", "b", "new", "c")]
        await world.door.handle([*moves[:2], world.command(data=b"bad"), *moves[2:]])
        assert [world.broker.answers[move.number] for move in moves] == ["ack", "nack", "ack", "ack"]
        assert [await world.due(call) for call in "abc"] == [parse_time(due, "") for due in (LATER, FAR, LATER)]
        world.store.swap = swap  # type: ignore[method-assign]
        await world.door.handle([moves[1]])
        assert await world.due("b") == parse_time(LATER, "") and world.broker.answers[moves[1].number] == "ack"

    run(test)


def test_no_command_is_acked_during_the_write() -> None:
    async def test(world: World) -> None:
        put_many, go = world.store.put_many, asyncio.Event()

        async def slow(timers: Sequence[Timer]) -> list[Timer | Taken | None]:
            there = await put_many(timers)
            await go.wait()
            return there

        world.store.put_many = slow  # type: ignore[method-assign]
        handling = asyncio.create_task(world.door.handle([world.command("a"), world.command("b")]))
        await settled()
        assert world.broker.answers == {}
        go.set()
        await handling
        assert world.broker.answers == {1: "ack", 2: "ack"}

    run(test)


# Dead letters wait for their acks without delaying anything else.


def test_good_commands_do_not_wait_for_the_dead_letters_of_their_batch() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        bad = [world.command(data=b"bad") for _ in range(50)]
        handling = asyncio.create_task(world.door.handle([*bad, world.command("good")]))
        await settled()
        assert world.broker.answers == {51: "ack"} and world.broker.letters == []
        world.broker.confirms.set()
        await handling
        assert list(world.broker.answers.values()) == ["ack"] + 50 * ["reject"]

    run(test)


def test_dead_letters_are_published_concurrently_up_to_a_limit() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        bad = [world.command(data=b"bad") for _ in range(200)]
        handling = asyncio.create_task(world.door.handle(bad))
        await settled()
        assert world.broker.publishing == DEAD_LETTERS_AT_ONCE < 200
        world.broker.confirms.set()
        await handling
        assert world.broker.publishing_max == DEAD_LETTERS_AT_ONCE
        assert len(world.broker.letters) == 200 and set(world.broker.answers.values()) == {"reject"}

    run(test)


def test_a_flood_of_bad_commands_does_not_delay_later_batches() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        running = asyncio.create_task(world.door.run())
        goods = []
        for n in range(DEAD_LETTERS_WAITING_MAX // 400 + 2):
            world.broker.waiting.put_nowait([world.command(data=b"bad") for _ in range(400)])
            goods.append(world.command(f"good-{n}"))
            world.broker.waiting.put_nowait([goods[-1]])
        queued: Iterable[list[Command]] = world.broker.waiting._queue  # type: ignore[attr-defined]
        bad = sum(len(batch) for batch in queued) - len(goods)
        await settled()
        assert [world.broker.answers.get(good.number) for good in goods] == ["ack"] * len(goods)
        # There is no room for all of them; the rest stays in the broker.
        nacked = list(world.broker.answers.values()).count("nack")
        assert nacked == bad - DEAD_LETTERS_WAITING_MAX > 0
        world.broker.confirms.set()
        await settled()
        world.broker.waiting.put_nowait([world.command(data=b"bad")])
        await settled()
        assert list(world.broker.answers.values()).count("reject") == DEAD_LETTERS_WAITING_MAX + 1
        world.door.drain()
        await running
        assert len(world.broker.answers) == world._sent

    run(test)


def test_a_drain_nacks_bad_commands_that_are_still_queued() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        running = asyncio.create_task(world.door.run())
        world.broker.waiting.put_nowait([world.command(data=b"bad") for _ in range(100)])
        await settled()
        world.door.drain()
        await settled()
        assert not running.done()
        world.broker.confirms.set()
        await running
        answers = list(world.broker.answers.values())
        assert answers.count("reject") == DEAD_LETTERS_AT_ONCE == len(world.broker.letters)
        assert answers.count("nack") == 100 - DEAD_LETTERS_AT_ONCE

    run(test)


def test_a_command_is_not_rejected_if_its_dead_letter_is_not_stored() -> None:
    async def test(world: World) -> None:
        world.broker.failure = [BrokerAway("away")]
        await world.door.handle([world.command(data=b"bad"), world.command("a")])
        assert world.broker.answers == {1: "nack", 2: "ack"}
        world.broker.failure = [BrokerError("no stream")]
        await world.door.handle([world.command(data=b"bad")])
        assert world.broker.answers[3] == "nack" and world.broker.letters == []

    run(test)


def test_a_dead_letter_that_is_too_large_is_truncated() -> None:
    async def test(world: World) -> None:
        world.broker.failure = [BrokerError("too large")]
        await world.door.handle([world.command(data=b"x" * 300_000)])
        [(body, headers, _)] = world.broker.letters
        assert body == b"x" * 150_000 and headers["duetime-size"] == "300000"
        assert world.broker.answers == {1: "reject"}

    run(test)


def test_headers_of_a_dead_letter_are_plain_text() -> None:
    async def test(world: World) -> None:
        await world.door.handle([Command("in.ü", b'{"a": 1e999}', 1, 1, None)])
        [(_, headers, _)] = world.broker.letters
        assert all(value.isascii() and value.isprintable() for value in headers.values())

    run(test)


def test_a_second_command_in_the_same_batch_moves_the_timer() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(due=FAR), world.command(due=LATER)])
        assert await world.due() == parse_time(LATER, "")
        assert world.broker.answers == {1: "ack", 2: "ack"}

    run(test)


def test_a_second_command_in_the_same_batch_moves_the_timer_back() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(due=FAR), world.command(due=LATER), world.command(due=FAR)])
        assert await world.due() == parse_time(FAR, "")

    run(test)


def test_a_command_redelivered_after_a_later_one_changes_nothing() -> None:
    async def test(world: World) -> None:
        first, second, third = (world.command(due=due) for due in (FAR, LATER, LATER))
        await world.door.handle([first])
        await world.door.handle([second])
        await world.door.handle([first])
        assert await world.due() == parse_time(LATER, "")
        moved_back = world.command(due=FAR)
        await world.door.handle([moved_back, second, third, first])
        assert await world.due() == parse_time(FAR, "")
        assert set(world.broker.answers.values()) == {"ack"}

    run(test)


def test_a_later_equal_command_still_supersedes_earlier_ones() -> None:
    async def test(world: World) -> None:
        made, late, same = (world.command(due=due) for due in (FAR, LATER, FAR))
        await world.door.handle([made, same])
        await world.door.handle([late])
        assert await world.due() == parse_time(FAR, "")

    run(test)


def test_two_instances_with_an_earlier_and_a_later_command() -> None:
    """The earlier one has read the timer before the later one moved it."""

    async def test(world: World) -> None:
        made, earlier, later = (world.command(due=due) for due in (FAR, SOONER, LATER))
        await world.door.handle([made])
        put_many = world.store.put_many

        async def with_a_break(timers: Sequence[Timer]) -> list[Timer | Taken | None]:
            there = await put_many(timers)
            world.store.put_many = put_many  # type: ignore[method-assign]
            await world.door.handle([later])
            return there

        world.store.put_many = with_a_break  # type: ignore[method-assign]
        await world.door.handle([earlier])
        assert await world.due() == parse_time(LATER, "")

    run(test)


def test_a_reached_timer_does_not_change() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command()])
        await world.service.cancel("acme", "call")
        await world.door.handle([world.command(due=LATER)])
        timer = await world.service.get("acme", "call")
        assert timer.status is Status.CANCELED and timer.execute_at == parse_time(FAR, "")
        assert world.broker.answers == {1: "ack", 2: "ack"}

    run(test)


def test_a_drain_handles_taken_commands_and_takes_no_more() -> None:
    async def test(world: World) -> None:
        running = asyncio.create_task(world.door.run())
        world.broker.waiting.put_nowait([world.command("a")])
        await asyncio.sleep(0)
        world.door.drain()
        world.broker.waiting.put_nowait([world.command("b")])
        await running
        assert world.broker.stopped
        # Either the command was not taken, or it was handled.
        assert (2 in world.broker.answers) == world.broker.waiting.empty()

    run(test)
