"""Group commit: requests during a write share the next write, and its result or error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from duetime.stores.group_commit import GroupCommit


class Writer:
    """Writes when allowed, and records each batch. ``bad`` items fail their batch."""

    def __init__(self, batch_max: int = 100) -> None:
        self.batches: list[list[int]] = []
        self.let = asyncio.Event()
        self.bad: set[int] = set()
        self.commit: GroupCommit[int, str] = GroupCommit(self.write, batch_max=batch_max)

    async def write(self, items: list[int]) -> list[str]:
        self.batches.append(items)
        await self.let.wait()
        if self.bad & set(items):
            raise OSError(f"one of {items} is bad")
        return [f"wrote {item}" for item in items]

    async def ask(self, *items: int) -> list[asyncio.Task[str]]:
        """Submit the items one after the other, and let the loop run until all are queued."""
        tasks = [asyncio.create_task(self.commit(item)) for item in items]
        for _ in range(3):
            await asyncio.sleep(0)
        return tasks


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_a_single_request_is_written_at_once() -> None:
    async def story() -> None:
        writer = Writer()
        writer.let.set()
        assert await writer.commit(1) == "wrote 1"
        assert await writer.commit(2) == "wrote 2"
        assert writer.batches == [[1], [2]]

    run(story())


def test_requests_during_a_write_share_the_next_one_in_order() -> None:
    async def story() -> None:
        writer = Writer()
        tasks = await writer.ask(1)
        tasks += await writer.ask(5, 3, 4)
        tasks += await writer.ask(2)
        assert writer.batches == [[1]]
        writer.let.set()
        assert await asyncio.gather(*tasks) == [f"wrote {n}" for n in (1, 5, 3, 4, 2)]
        assert writer.batches == [[1], [5, 3, 4, 2]]

    run(story())


def test_a_batch_has_a_limit() -> None:
    async def story() -> None:
        writer = Writer(batch_max=3)
        tasks = await writer.ask(0)
        tasks += await writer.ask(*range(1, 9))
        writer.let.set()
        assert await asyncio.gather(*tasks) == [f"wrote {n}" for n in range(9)]
        assert writer.batches == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]

    run(story())


def test_an_error_reaches_exactly_the_callers_of_its_batch() -> None:
    async def story() -> None:
        writer = Writer(batch_max=2)
        writer.bad = {2}
        tasks = await writer.ask(0)
        tasks += await writer.ask(1, 2, 3, 4)
        writer.let.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(answer) for answer in answers] == [
            "wrote 0",
            *["one of [1, 2] is bad"] * 2,
            *["wrote 3", "wrote 4"],
        ]
        assert await writer.commit(5) == "wrote 5"

    run(story())


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_canceled_caller_does_not_affect_the_others(gone: int) -> None:
    async def story() -> None:
        writer = Writer()
        tasks = await writer.ask(0)
        tasks += await writer.ask(1, 2)
        tasks[gone].cancel()
        await asyncio.sleep(0)
        writer.let.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[gone], asyncio.CancelledError)
        assert [answer for answer in answers if isinstance(answer, str)] == [
            f"wrote {n}" for n in range(3) if n != gone
        ]
        # It was submitted, so it is written: the write may have started already.
        assert writer.batches == [[0], [1, 2]]

    run(story())


def test_a_canceled_caller_does_not_affect_the_others_if_the_write_fails() -> None:
    async def story() -> None:
        writer = Writer()
        writer.bad = {0}
        tasks = await writer.ask(0)
        tasks[0].cancel()
        writer.let.set()
        await asyncio.wait(tasks)
        assert await writer.commit(1) == "wrote 1"

    run(story())


def test_finish_waits_for_pending_requests() -> None:
    async def story() -> None:
        writer = Writer(batch_max=1)
        await writer.commit.finish()  # Nothing is pending.
        tasks = await writer.ask(0, 1, 2)
        finish = asyncio.create_task(writer.commit.finish())
        await asyncio.sleep(0)
        assert not finish.done()
        writer.let.set()
        await finish
        assert [task.result() for task in tasks] == ["wrote 0", "wrote 1", "wrote 2"]

    run(story())
