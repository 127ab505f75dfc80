"""Guarantees of the MySQL store only: a suspended client blocks no other, and a write whose response was lost is either
recognized or reported as unknown."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncmy
import pytest
from msgspec import Raw, structs

from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Status, Timer
from duetime.store import Portion
from duetime.stores.mysql import due
from duetime.stores.mysql import pool as mysql_pool
from duetime.stores.mysql import statements as mysql_statements
from duetime.stores.mysql.dialects import Dialect
from duetime.stores.mysql.pool import Result, connect_arguments
from duetime.stores.mysql.store import BUSY_SECONDS_MAX, MysqlStore
from tests.clocks import START, ManualClock
from tests.contract.stores import mysql
from tests.contract.timers import (
    ALICE,
    BOB,
    LEASE_MS,
    another,
    completed,
    definition,
    holding,
    spread,
    timer,
    touched,
    with_timers,
)
from tests.mysql import MysqlServer

WAIT_SECONDS = 0.6


@pytest.fixture(params=["mariadb", "mysql9", "tidb"])
def server(request: pytest.FixtureRequest) -> MysqlServer:
    server: MysqlServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def database(server: MysqlServer) -> Iterator[str]:
    yield (url := server.fresh())
    server.give_back(url)


Opened = Callable[[], Coroutine[Any, Any, MysqlStore]]


@pytest.fixture
def opened(runner: asyncio.Runner, clock: ManualClock, database: str) -> Iterator[Opened]:
    stores: list[MysqlStore] = []

    async def open() -> MysqlStore:
        stores.append(store := await mysql(database, clock))
        return store

    async def close() -> None:
        for store in stores:
            await store.close()

    yield open
    runner.run(close())


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[Any]:
    connection = await asyncmy.connect(**connect_arguments(url))
    try:
        yield connection
    finally:
        connection.close()


async def race(opened: Any, database: str, clock: ManualClock, verb: str) -> tuple[bool, bool]:
    """Let a begin or record pass its fence and wait for the row of a timer, and claim its shard meanwhile, after the
    lease has expired. Return whether the claim succeeded, and whether the former owner wrote."""
    alice, bob = await opened(), await opened()
    await with_timers(alice, timer(at=START - 5))
    held = await holding(alice)
    begun = (await alice.begin(ALICE, held, 10)).timers if verb == "record" else []
    clock.advance(LEASE_MS + 1)
    async with raw(database) as other:
        await mysql_pool.run(other, ["START TRANSACTION", "SELECT * FROM timers FOR UPDATE"])
        if verb == "record":
            writing = asyncio.create_task(alice.record(ALICE, [(begun[0], completed(begun[0]))]))
        else:
            writing = asyncio.create_task(alice.begin(ALICE, held, 10))
        await asyncio.sleep(WAIT_SECONDS)
        claiming = asyncio.create_task(bob.claim(BOB, range(8), LEASE_MS))
        await asyncio.sleep(WAIT_SECONDS)
        through = claiming.done()
        await mysql_pool.run(other, ["ROLLBACK"])
    written = await writing
    await claiming
    return through, any(written) if verb == "record" else bool(written.timers)


@pytest.mark.parametrize("verb", ["begin", "record"])
async def test_claim_waits_for_a_fenced_write(opened: Opened, database: str, clock: ManualClock, verb: str) -> None:
    assert await race(opened, database, clock, verb) == (False, True)


@pytest.mark.parametrize("verb", ["begin", "record"])
async def test_former_owner_can_write_without_the_share_lock(
    opened: Opened, database: str, clock: ManualClock, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plants the bug that the test above guards against: a fence without a lock. (In SET, InnoDB locks what it reads.)
    fence = mysql_statements.fence

    def read_only(dialect: Dialect, owner_id: bytes, held: Any) -> str:
        unlocked = structs.replace(dialect, select_into="SELECT @{variable} := ({when}{what}{check}) {rows}")
        return fence(unlocked, owner_id, held)

    monkeypatch.setattr(mysql_statements, "fence", read_only)
    assert await race(opened, database, clock, verb) == (True, True)


@pytest.mark.parametrize("verb", ["begin", "record"])
async def test_fenced_write_waits_for_a_concurrent_claim(
    opened: Opened, database: str, clock: ManualClock, verb: str
) -> None:
    alice = await opened()
    await with_timers(alice, timer(at=START - 5))
    held = await holding(alice)
    begun = (await alice.begin(ALICE, held, 10)).timers if verb == "record" else []
    async with raw(database) as bob:
        await mysql_pool.run(bob, ["START TRANSACTION", "UPDATE shards SET version = version + 1"])
        writing: asyncio.Task[Any]
        if verb == "record":
            writing = asyncio.create_task(alice.record(ALICE, [(begun[0], completed(begun[0]))]))
        else:
            writing = asyncio.create_task(alice.begin(ALICE, held, 10))
        await asyncio.sleep(WAIT_SECONDS)
        waited = not writing.done()
        await mysql_pool.run(bob, ["COMMIT"])
    written = await writing
    assert waited
    assert not any(written) if verb == "record" else (written.timers, written.refused) == ([], frozenset(held))


async def test_client_that_stops_reading_holds_no_lock(
    opened: Opened, database: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = await opened(), await opened()
    large = definition(Raw(b'"' + b"x" * 200_000 + b'"'))
    await with_timers(alice, *(timer(f"t{n}", at=START - 5, shard=n % 8, definition=large) for n in range(18)))
    held = await holding(alice)
    packets: list[str] = []
    run = mysql_pool.run

    async def stopped(connection: Any, statements: Any, results: Any = None) -> Any:
        if any(text.startswith("UPDATE timers") for text in statements):
            packets.append(";\n".join(statements))
            raise ConnectionResetError("no packet with this text was sent")
        return await run(connection, statements, results)

    monkeypatch.setattr(mysql_pool, "run", stopped)
    assert (await alice.begin(ALICE, held, 100)).unknown == frozenset(range(8))
    monkeypatch.undo()
    async with raw(database) as connection:
        await connection._execute_command(3, packets[0])  # COM_QUERY; its response of 3.6 MB is never read
        until = asyncio.get_running_loop().time() + 10
        while (await alice.tally())[Status.EXECUTING] < 18:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.02)
        clock.advance(LEASE_MS + 1)
        async with asyncio.timeout(2):
            assert len(await bob.claim(BOB, range(8), LEASE_MS)) == 8


def cut_behind(monkeypatch: pytest.MonkeyPatch, what: str, *, passing: int = 0) -> None:
    """Drop the response to the next packet with this text, after the server has run it; before it, let some pass."""
    run = mysql_pool.run
    seen: list[bool] = []

    async def lossy(connection: Any, statements: Any, results: Any = None) -> Any:
        done = await run(connection, statements)
        if any(what in text for text in statements):
            seen.append(True)
            if len(seen) == passing + 1:
                raise ConnectionResetError("cut")
        if results is not None:
            results += done
        return done

    monkeypatch.setattr(mysql_pool, "run", lossy)


async def test_put_with_a_lost_response_recognizes_its_own_write(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened()
    cut_behind(monkeypatch, "INSERT INTO timers")
    assert await store.put_many(spread(20)) == [None] * 20
    assert (await store.tally())[Status.PENDING] == 20


async def test_write_that_meets_a_lock_is_retried_after_a_random_pause(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened()
    write, pauses = store._pool.write, list[tuple[float, float]]()

    async def deadlocked(*statements: str, then: Sequence[str] = ()) -> list[Result]:
        if len(pauses) < 3:
            raise mysql_pool.Refused(1213, "Deadlock found")
        return await write(*statements, then=then)

    def drawn(low: float, high: float) -> float:
        pauses.append((low, high))
        return 0

    monkeypatch.setattr(store._pool, "write", deadlocked)
    monkeypatch.setattr(random, "uniform", drawn)
    assert await store.put_many([timer()]) == [None]
    assert pauses == [(0, BUSY_SECONDS_MAX), (0, 2 * BUSY_SECONDS_MAX), (0, 4 * BUSY_SECONDS_MAX)]


async def test_put_finds_its_own_write_if_its_timer_was_begun_meanwhile(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened()
    held = await holding(store)
    taken = store._taken

    async def later(uuids: Any) -> Any:
        await store.begin(ALICE, held, 10)
        return await taken(uuids)

    monkeypatch.setattr(store, "_taken", later)
    cut_behind(monkeypatch, "INSERT INTO timers")
    first, again = timer("a", at=START - 1), timer("a", at=START - 1)
    [mine, theirs] = await store.put_many([first, again])
    assert mine is None
    assert isinstance(theirs, Timer) and theirs.firing == first.firing and theirs.status is Status.EXECUTING


async def test_put_of_several_packets_is_indeterminate_if_a_later_one_fails(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened()
    write, written = store._pool.write, list[bool]()

    async def once(*statements: str, then: Sequence[str] = ()) -> list[Result]:
        if written:
            raise StoreUnavailable("the server is down")
        written.append(True)
        return await write(*statements, then=then)

    monkeypatch.setattr("duetime.stores.mysql.store.PACKET_BYTES_MAX", 1)
    there = timer("there")
    await with_timers(store, there)
    with monkeypatch.context() as patch:
        patch.setattr(store._pool, "write", once)
        with pytest.raises(StoreIndeterminate):
            await store.put_many([timer("new"), timer("other")])
        written.clear()
        with pytest.raises(StoreUnavailable):  # The first packet has only found an existing timer.
            await store.put_many([another(there), timer("other")])
    assert (await store.tally())[Status.PENDING] == 2


@pytest.mark.parametrize("by_lane", [False, True])
async def test_begin_with_a_lost_response_affects_only_the_shards_of_its_timers(
    opened: Opened, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, by_lane: bool
) -> None:
    store = await opened()
    await with_timers(store, *spread(7, at=START - 9))
    held = await holding(store)
    in_flight = (await store.begin(ALICE, held, 4)).timers
    with monkeypatch.context() as patch:
        cut_behind(patch, "UPDATE timers")
        if by_lane:
            begun = await store.begin_lanes(ALICE, held, 2, [Portion(lane := timer().lane, 2)])
            assert begun.lanes == {lane: START - 5}
        else:
            begun = await store.begin(ALICE, held, 2)
            assert begun.more
    assert (begun.timers, begun.refused, sorted(begun.unknown)) == ([], frozenset(), [4, 5])
    assert begun.next_at is not None and begun.next_at <= clock.now()
    assert await store.record(ALICE, [(t, completed(t)) for t in in_flight]) == [True] * 4
    tally = await store.tally()
    assert (tally[Status.EXECUTING], tally[Status.COMPLETED], tally[Status.PENDING]) == (2, 4, 1)


async def test_begin_with_a_lost_response_polls_again_although_it_found_all_due_timers(
    opened: Opened, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened()
    await with_timers(store, timer(at=START - 1, shard=3))
    held = await holding(store)
    with monkeypatch.context() as patch:
        cut_behind(patch, "UPDATE timers")
        begun = await store.begin(ALICE, held, 10)
    assert (list(begun.unknown), begun.more, begun.next_at) == ([3], False, clock.now())


async def test_record_with_a_lost_response_is_unknown_for_each_timer(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened()
    await with_timers(store, *spread(4, at=START - 9))
    begun = (await store.begin(ALICE, await holding(store), 4)).timers
    changed, *others = [(t, completed(t)) for t in begun]
    assert await store.swap(changed[0], touched(changed[0]))
    # The first packet finds that a timer has changed, and writes nothing. The response to the second one is lost.
    cut_behind(monkeypatch, "INTO history", passing=1)
    assert await store.record(ALICE, [changed, *others, others[0]]) == [False, None, None, None, False]
    tally = await store.tally()
    assert (tally[Status.EXECUTING], tally[Status.COMPLETED]) == (1, 3)


async def test_begun_timers_are_returned_if_the_server_fails_afterwards(
    opened: Opened, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: due.Poll) -> None:
        raise StoreUnavailable("gone")

    store = await opened()
    await with_timers(store, *spread(4, at=START - 9))
    held = await holding(store)
    monkeypatch.setattr(due.Poll, "next_at", gone)
    begun = await store.begin(ALICE, held, 10)
    assert (len(begun.timers), begun.next_at) == (4, clock.now())
    with pytest.raises(StoreUnavailable):
        await store.begin(ALICE, held, 10)


async def test_acknowledged_writes_survive_a_killed_server(clock: ManualClock, server: MysqlServer) -> None:
    with type(server)() as server:
        store = await mysql(server.fresh(), clock)
        acknowledged: list[str] = []

        async def put(prefix: str) -> None:
            for number in range(10_000):
                try:
                    await store.put(timer(f"{prefix}{number}"))
                except StoreError:
                    return
                acknowledged.append(f"{prefix}{number}")

        puts = [asyncio.create_task(put(f"client {n}, ")) for n in range(16)]
        await asyncio.sleep(1)
        server.kill()
        await asyncio.gather(*puts)
        server.start()
        assert len(acknowledged) > 100
        for id in acknowledged:
            assert await store.get("default", id) is not None, id
        tally = await store.tally()
        assert tally[Status.PENDING] >= len(acknowledged)
        await store.close()
