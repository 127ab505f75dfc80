"""The broker door with a broker that is a list: batches, their one write, and who gets which answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from duetime.broker import BrokerAway, BrokerError, Command
from duetime.doors.broker import DEAD_LETTERS_AT_ONCE, DEAD_LETTERS_WAITING_MAX, BrokerDoor
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Status, Timer
from duetime.service import Service
from duetime.store import Taken
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.timetext import parse_time
from tests.clocks import ManualClock

SOONER, FAR, LATER = "2998-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z", "2999-01-02T00:00:00.000Z"


class CountingStore(MemoryStore):
    """Says how many writes there were, and fails when it is told to."""

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
    """Keeps what was done with each command."""

    connected = True

    def __init__(self) -> None:
        self.answers: dict[int, str] = {}
        self.letters: list[tuple[bytes, dict[str, str], str]] = []
        self.failure: list[BrokerError] = []
        self.waiting: asyncio.Queue[Sequence[Command]] = asyncio.Queue()
        self.stopped = False
        self.confirms = asyncio.Event()
        """Whether it confirms what is published."""
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

    async def done(self, commands: Sequence[Command]) -> None:
        self.answers |= {command.number: "done" for command in commands}

    async def again(self, commands: Sequence[Command], *, delay_ms: int) -> None:
        self.answers |= {command.number: "again" for command in commands}

    async def never(self, command: Command, reason: str) -> None:
        assert any(id == f"{command.subject}-{command.number}" for _, _, id in self.letters), "no copy was kept"
        self.answers[command.number] = "never"

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
        self.service = Service(self.store, {}, clock, lambda *timers: None)
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
    """Return when everybody has done what they can without waiting."""
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
        assert set(world.broker.answers.values()) == {"done"} and len(world.broker.answers) == 500

    run(test)


def test_what_is_bad_is_buried_and_the_rest_is_one_write() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command("a"), world.command(data=b"bad"), world.command("b")])
        assert world.store.writes == [2]
        assert world.broker.answers == {1: "done", 2: "never", 3: "done"}
        [(body, headers, id)] = world.broker.letters
        assert body == b"bad" and headers["duetime-subject"] == "in.acme" and id == "in.acme-2"

    run(test)


def test_a_tenant_beyond_the_namespaces_that_there_may_be_is_a_dead_letter() -> None:
    async def test(world: World) -> None:
        world.service = Service(world.store, {}, world.clock, lambda *timers: None, namespaces_max=2)
        await world.service.start()
        door = BrokerDoor(
            world.service, world.broker, Telemetry(), events="out", dead_letters="dead", bytes_max=262_144
        )
        others = [world.command("b", tenantId="other"), world.command("d", tenantId="other")]
        others = [msgspec.structs.replace(other, subject="in.other") for other in others]
        await door.handle([world.command("a"), others[0], world.command("c"), others[1]])
        assert world.broker.answers == {1: "never", 2: "never", 3: "done", 4: "done"}
        assert world.store.writes == [2]
        assert [headers["duetime-subject"] for _, headers, _ in world.broker.letters] == ["in.other"] * 2
        assert "2 namespaces" in world.broker.letters[0][1]["duetime-error"]

    run(test)


def test_only_bad_ones_write_nothing() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(data=b"")])
        assert world.store.writes == [] and world.broker.answers == {1: "never"}

    run(test)


def test_nothing_is_answered_before_it_is_written() -> None:
    async def test(world: World) -> None:
        world.store.fails = True
        await world.door.handle([world.command("a"), world.command(data=b"bad"), world.command("b")])
        assert world.broker.answers == {1: "again", 2: "never", 3: "again"}

    run(test)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreIndeterminate("nobody knows")])
def test_only_those_whose_write_failed_are_given_out_again(error: StoreError) -> None:
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
        assert [world.broker.answers[move.number] for move in moves] == ["done", "again", "done", "done"]
        assert [await world.due(call) for call in "abc"] == [parse_time(due, "") for due in (LATER, FAR, LATER)]
        world.store.swap = swap  # type: ignore[method-assign]
        await world.door.handle([moves[1]])
        assert await world.due("b") == parse_time(LATER, "") and world.broker.answers[moves[1].number] == "done"

    run(test)


def test_nothing_is_answered_while_it_is_being_written() -> None:
    async def test(world: World) -> None:
        put_many, go = world.store.put_many, asyncio.Event()

        async def slow(timers: Sequence[Timer]) -> list[Timer | None]:
            there = await put_many(timers)
            await go.wait()
            return there

        world.store.put_many = slow  # type: ignore[method-assign]
        handling = asyncio.create_task(world.door.handle([world.command("a"), world.command("b")]))
        await settled()
        assert world.broker.answers == {}
        go.set()
        await handling
        assert world.broker.answers == {1: "done", 2: "done"}

    run(test)


# Dead letters wait for their confirmation, and nobody waits for them.


def test_good_commands_do_not_wait_for_the_dead_letters_of_their_batch() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        bad = [world.command(data=b"bad") for _ in range(50)]
        handling = asyncio.create_task(world.door.handle([*bad, world.command("good")]))
        await settled()
        assert world.broker.answers == {51: "done"} and world.broker.letters == []
        world.broker.confirms.set()
        await handling
        assert list(world.broker.answers.values()) == ["done"] + 50 * ["never"]

    run(test)


def test_dead_letters_are_published_side_by_side_within_a_limit() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        bad = [world.command(data=b"bad") for _ in range(200)]
        handling = asyncio.create_task(world.door.handle(bad))
        await settled()
        assert world.broker.publishing == DEAD_LETTERS_AT_ONCE < 200
        world.broker.confirms.set()
        await handling
        assert world.broker.publishing_max == DEAD_LETTERS_AT_ONCE
        assert len(world.broker.letters) == 200 and set(world.broker.answers.values()) == {"never"}

    run(test)


def test_a_flood_of_bad_commands_does_not_hold_up_the_batches_behind_it() -> None:
    async def test(world: World) -> None:
        world.broker.confirms.clear()
        running = asyncio.create_task(world.door.run())
        goods = []
        for n in range(DEAD_LETTERS_WAITING_MAX // 400 + 2):
            world.broker.waiting.put_nowait([world.command(data=b"bad") for _ in range(400)])
            goods.append(world.command(f"good-{n}"))
            world.broker.waiting.put_nowait([goods[-1]])
        bad = sum(len(batch) for batch in world.broker.waiting._queue) - len(goods)  # type: ignore[attr-defined]
        await settled()
        assert [world.broker.answers.get(good.number) for good in goods] == ["done"] * len(goods)
        # There is no room for all of them; the broker keeps the others.
        again = list(world.broker.answers.values()).count("again")
        assert again == bad - DEAD_LETTERS_WAITING_MAX > 0
        world.broker.confirms.set()
        await settled()
        world.broker.waiting.put_nowait([world.command(data=b"bad")])
        await settled()
        assert list(world.broker.answers.values()).count("never") == DEAD_LETTERS_WAITING_MAX + 1
        world.door.drain()
        await running
        assert len(world.broker.answers) == world._sent

    run(test)


def test_a_drain_gives_back_the_bad_commands_whose_turn_has_not_come() -> None:
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
        assert answers.count("never") == DEAD_LETTERS_AT_ONCE == len(world.broker.letters)
        assert answers.count("again") == 100 - DEAD_LETTERS_AT_ONCE

    run(test)


def test_a_dead_letter_that_is_not_kept_leaves_its_command_alive() -> None:
    async def test(world: World) -> None:
        world.broker.failure = [BrokerAway("away")]
        await world.door.handle([world.command(data=b"bad"), world.command("a")])
        assert world.broker.answers == {1: "again", 2: "done"}
        world.broker.failure = [BrokerError("no stream")]
        await world.door.handle([world.command(data=b"bad")])
        assert world.broker.answers[3] == "again" and world.broker.letters == []

    run(test)


def test_a_dead_letter_that_is_too_large_is_cut() -> None:
    async def test(world: World) -> None:
        world.broker.failure = [BrokerError("too large")]
        await world.door.handle([world.command(data=b"x" * 300_000)])
        [(body, headers, _)] = world.broker.letters
        assert body == b"x" * 150_000 and headers["duetime-size"] == "300000"
        assert world.broker.answers == {1: "never"}

    run(test)


def test_headers_of_a_dead_letter_are_plain() -> None:
    async def test(world: World) -> None:
        await world.door.handle([Command("in.ü", b'{"a": 1e999}', 1, 1, None)])
        [(_, headers, _)] = world.broker.letters
        assert all(value.isascii() and value.isprintable() for value in headers.values())

    run(test)


def test_a_repeat_in_the_same_batch_moves_it() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(due=FAR), world.command(due=LATER)])
        assert await world.due() == parse_time(LATER, "")
        assert world.broker.answers == {1: "done", 2: "done"}

    run(test)


def test_a_repeat_in_the_same_batch_moves_it_back() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command(due=FAR), world.command(due=LATER), world.command(due=FAR)])
        assert await world.due() == parse_time(FAR, "")

    run(test)


def test_one_that_comes_again_behind_a_later_one_moves_nothing() -> None:
    async def test(world: World) -> None:
        first, second, third = (world.command(due=due) for due in (FAR, LATER, LATER))
        await world.door.handle([first])
        await world.door.handle([second])
        await world.door.handle([first])
        assert await world.due() == parse_time(LATER, "")
        moved_back = world.command(due=FAR)
        await world.door.handle([moved_back, second, third, first])
        assert await world.due() == parse_time(FAR, "")
        assert set(world.broker.answers.values()) == {"done"}

    run(test)


def test_a_later_one_that_says_the_same_keeps_earlier_ones_out() -> None:
    async def test(world: World) -> None:
        made, late, same = (world.command(due=due) for due in (FAR, LATER, FAR))
        await world.door.handle([made, same])
        await world.door.handle([late])
        assert await world.due() == parse_time(FAR, "")

    run(test)


def test_two_instances_with_an_earlier_and_a_later_one() -> None:
    """The earlier one has seen the timer as it was before the later one moved it."""

    async def test(world: World) -> None:
        made, earlier, later = (world.command(due=due) for due in (FAR, SOONER, LATER))
        await world.door.handle([made])
        put_many = world.store.put_many

        async def with_a_break(timers: Sequence[Timer]) -> list[Timer | None]:
            there = await put_many(timers)
            world.store.put_many = put_many  # type: ignore[method-assign]
            await world.door.handle([later])
            return there

        world.store.put_many = with_a_break  # type: ignore[method-assign]
        await world.door.handle([earlier])
        assert await world.due() == parse_time(LATER, "")

    run(test)


def test_what_was_reached_stays_as_it_is() -> None:
    async def test(world: World) -> None:
        await world.door.handle([world.command()])
        await world.service.cancel("acme", "call")
        await world.door.handle([world.command(due=LATER)])
        timer = await world.service.get("acme", "call")
        assert timer.status is Status.CANCELED and timer.execute_at == parse_time(FAR, "")
        assert world.broker.answers == {1: "done", 2: "done"}

    run(test)


def test_draining_handles_what_was_taken_and_takes_no_more() -> None:
    async def test(world: World) -> None:
        running = asyncio.create_task(world.door.run())
        world.broker.waiting.put_nowait([world.command("a")])
        await asyncio.sleep(0)
        world.door.drain()
        world.broker.waiting.put_nowait([world.command("b")])
        await running
        assert world.broker.stopped
        # Either it was not taken, or it was handled.
        assert (2 in world.broker.answers) == world.broker.waiting.empty()

    run(test)
