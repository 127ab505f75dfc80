"""Failures of PostgreSQL (down, disconnected, hanging, restarted, read-only): what callers get, and what is stored."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import asyncpg
import pytest

from duetime import lifecycle
from duetime.errors import SettingsError, StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import HttpTarget, Status
from duetime.stores.postgres import hints as postgres_hints
from duetime.stores.postgres import pool as postgres_pool
from duetime.stores.postgres.store import CONNECTIONS_MAX, PostgresStore
from tests.chaos.answers import Cutting
from tests.chaos.postgres_answers import ANSWERS
from tests.clocks import START, ManualClock
from tests.contract.stores import Opened
from tests.contract.timers import ALICE, LEASE_MS, completed, everything, existing, holding, spread, timer, with_timers
from tests.postgres import Postgres
from tests.proxy import Proxy, Rule, nth


@pytest.fixture
def proxy(server: Postgres) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def store(runner: asyncio.Runner, opened: Opened, proxy: Proxy, database: str) -> PostgresStore:
    """A store connected through the proxy."""
    store: PostgresStore = runner.run(opened(proxy.url(database)))
    return store


@pytest.fixture
def beside(runner: asyncio.Runner, opened: Opened, store: PostgresStore, database: str) -> PostgresStore:
    """Another instance, connected directly."""
    beside: PostgresStore = runner.run(opened(database))
    return beside


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every timeout short. Must come before the store fixtures."""
    monkeypatch.setattr(postgres_pool, "ANSWER_SECONDS_MAX", 0.5)
    monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS_MAX", 0.5)
    monkeypatch.setattr(postgres_hints, "CLOSE_SECONDS_MAX", 0.1)
    monkeypatch.setitem(postgres_pool._SESSION, "statement_timeout", "500")


def writes(store: PostgresStore) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "put": lambda: store.put(timer("new")),
        "swap": lambda: store.swap(timer(), None),
        "begin": lambda: store.begin(ALICE, {0: 1}, 10),
        "record": lambda: store.record(ALICE, [(t := timer(), completed(t))]),
        "renew": lambda: store.renew(ALICE, LEASE_MS),
        "claim": lambda: store.claim(ALICE, [0], LEASE_MS),
        "release": lambda: store.release(ALICE, [0]),
    }


def reads(store: PostgresStore) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "get": lambda: store.get("default", "t0"),
        "ping": store.ping,
        "tally": store.tally,
        "namespaces": store.namespaces,
        "cluster": store.cluster,
    }


# A server that is down.


async def test_refused_connection_is_unavailable(store: PostgresStore, proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()
    await asyncio.sleep(0.1)  # The store notices that its connection is closed.
    for name, call in (writes(store) | reads(store)).items():
        with pytest.raises(StoreUnavailable, match=r"can't connect to PostgreSQL at .*refused") as raised:
            await call()
        assert "\n" not in str(raised.value), name
    proxy.allow()
    assert await store.put(timer()) is None


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_next_call_works_after_a_server_restart(store: PostgresStore, server: Postgres, mode: str) -> None:
    await with_timers(store, *(before := spread(50)))
    held = await holding(store)
    server.stop(mode)
    try:
        await asyncio.sleep(0.1)
        with pytest.raises(StoreUnavailable):
            await store.put(timer("meanwhile"))
    finally:
        server.start()
    assert (await store.begin(ALICE, held, 1)).timers[0].id == "t0"
    assert len(await everything(store)) == len(before)


async def test_kill_loses_no_acknowledged_write(store: PostgresStore, server: Postgres) -> None:
    acknowledged: list[str] = []
    enough = asyncio.Event()

    async def put(prefix: str) -> None:
        for n in range(200):
            await store.put(timer(f"{prefix}{n}"))
            acknowledged.append(f"{prefix}{n}")
            if len(acknowledged) == 200:
                enough.set()

    puts = [asyncio.ensure_future(put(prefix)) for prefix in "abcd"]
    await enough.wait()
    server.kill()
    server.start()
    await asyncio.gather(*puts, return_exceptions=True)
    assert set(acknowledged) <= {id for _, id in await everything(store)}


# A connection that breaks.


def the_first(is_wanted: Callable[[bytes], bool]) -> Cutting:
    """A proxy rule for only the first response of this kind."""
    return Cutting(is_wanted, share=1, times=1, draw=random.Random())


async def test_write_with_a_lost_response_is_indeterminate(
    store: PostgresStore, beside: PostgresStore, proxy: Proxy
) -> None:
    await with_timers(beside, due := timer("due"), canceled := timer("canceled", at=START + 9))

    async def lost(call: Awaitable[object], answer: Rule) -> None:
        """Close the connection instead of forwarding this response."""
        proxy.on_answer = answer
        with pytest.raises(StoreIndeterminate, match="PostgreSQL"):
            await call

    await lost(store.claim(ALICE, [0], LEASE_MS), nth(b"UPDATE 1"))
    assert (await beside.renew(ALICE, LEASE_MS)).held == {0: 1}
    assert isinstance(due.definition.target, HttpTarget)
    await lost(store.begin(ALICE, {0: 1}, 1), nth(due.definition.target.url.encode()))
    begun = await existing(beside, "due")
    assert begun.status is Status.EXECUTING
    await lost(store.record(ALICE, [(begun, completed(begun))]), the_first(ANSWERS.is_record))
    assert (await existing(beside, "due")).status is Status.COMPLETED
    # The first response answers a query of the driver about the composite type.
    await lost(store.swap(canceled, lifecycle.cancel(canceled, now=START)), nth(b"SELECT 1", 4))
    assert (await existing(beside, "canceled")).status is Status.CANCELED


async def test_write_on_a_connection_closed_by_the_server_is_indeterminate(store: PostgresStore, database: str) -> None:
    keeper = await asyncpg.connect(database)
    try:
        await keeper.execute("BEGIN; LOCK TABLE duetime.shards")
        claim = asyncio.ensure_future(store.claim(ALICE, [0], LEASE_MS))
        while not (waiting := await keeper.fetch("SELECT pid FROM pg_locks WHERE NOT granted")):
            pass
        await keeper.execute("SELECT pg_terminate_backend($1)", waiting[0]["pid"])
        with pytest.raises(StoreIndeterminate, match=r"PostgreSQL closed the connection: .*administrator"):
            await claim
    finally:
        await keeper.close()
    assert await store.claim(ALICE, [0], LEASE_MS) == {0: 1}


AWAY = [
    *(asyncpg.AdminShutdownError, asyncpg.CrashShutdownError, asyncpg.ConnectionFailureError),
    asyncpg.StatementCompletionUnknownError,
]
REFUSED = [
    *(asyncpg.QueryCanceledError, asyncpg.SerializationError, asyncpg.DeadlockDetectedError),
    *(asyncpg.CannotConnectNowError, asyncpg.CheckViolationError),
]


@pytest.mark.parametrize("error", [*AWAY, *REFUSED])
async def test_only_a_rejected_statement_is_known_to_be_unwritten(
    store: PostgresStore, error: type[asyncpg.PostgresError]
) -> None:
    used: list[asyncpg.Connection] = []

    async def job(connection: asyncpg.Connection) -> None:
        used.append(connection)
        raise error("server message")

    for _ in range(2):
        with pytest.raises(StoreIndeterminate if error in AWAY else postgres_pool.Refused, match="server message"):
            await store._pool.run(job)
    assert (used[0] is used[1]) == (error in REFUSED), "only after a rejected statement the connection is reusable"


async def test_read_with_a_lost_response_is_unavailable(store: PostgresStore, proxy: Proxy) -> None:
    for call in reads(store).values():
        proxy.on_answer = lambda answer: True
        with pytest.raises(StoreUnavailable):
            await call()
        proxy.on_answer = None
        await call()


async def test_put_with_a_lost_response_finds_its_own_write(
    store: PostgresStore, beside: PostgresStore, proxy: Proxy
) -> None:
    for n in range(50):
        proxy.on_answer = cutting = the_first(ANSWERS.is_put)
        assert await store.put(timer(f"t{n}")) is None
        assert cutting.cuts == 1
    assert await beside.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 50}
    assert len(await everything(beside)) == 50


async def test_put_with_a_lost_response_distinguishes_another_timer(
    store: PostgresStore, beside: PostgresStore, proxy: Proxy
) -> None:
    await with_timers(beside, theirs := timer("a"))
    proxy.on_answer = cutting = the_first(ANSWERS.is_put)
    assert await store.put_many([timer("a"), timer("b")]) == [theirs, None]
    assert cutting.cuts == 1
    assert await beside.get("default", "a") == theirs


async def test_put_interrupted_while_waiting_is_written_once(
    store: PostgresStore, beside: PostgresStore, proxy: Proxy, database: str
) -> None:
    await with_timers(beside, timer("so that a count exists"))
    keeper = await asyncpg.connect(database)
    try:
        await keeper.execute("BEGIN; LOCK TABLE duetime.tallies")
        put = asyncio.ensure_future(store.put(timer()))
        while not await keeper.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            pass
        proxy.cut()
        # The server has not noticed, and continues with the statement as soon as it can.
        await keeper.execute("ROLLBACK")
        assert await put is None
    finally:
        await keeper.close()
    assert len(await everything(beside)) == 2
    assert (await beside.tally())[Status.PENDING] == 2


async def test_possibly_written_put_is_not_reported_as_unwritten(store: PostgresStore, proxy: Proxy) -> None:
    await store.ping()
    proxy.on_answer = the_first(ANSWERS.is_put)
    proxy.refuse()
    with pytest.raises(StoreIndeterminate):
        await store.put(timer())


# A server that does not respond.


async def test_calls_to_a_hanging_server_time_out(impatient: None, store: PostgresStore, proxy: Proxy) -> None:
    await store.ping()
    proxy.hang()
    async with asyncio.timeout(10):  # One and a half seconds on an idle machine.
        with pytest.raises(StoreIndeterminate):
            await store.begin(ALICE, {0: 1}, 10)
    for call in (store.ping, lambda: store.put(timer()), lambda: store.renew(ALICE, LEASE_MS)):
        async with asyncio.timeout(10):
            with pytest.raises((StoreUnavailable, StoreIndeterminate)):
                await call()
    proxy.pass_on()
    assert await store.put(timer()) is None


async def test_store_recovers_after_the_server_was_suspended(
    impatient: None, store: PostgresStore, server: Postgres
) -> None:
    await holding(store)
    server.pause()
    try:
        async with asyncio.timeout(20):
            with pytest.raises((StoreUnavailable, StoreIndeterminate)):
                await store.put(timer("a"))
    finally:
        server.resume()
    # The server now runs the statement that it had received, or has given it up: repeating the put shows which.
    assert await store.put(timer("b")) is None
    assert (await existing(store, "b")).id == "b"


async def test_statement_timeout_is_unavailable_and_writes_nothing(
    impatient: None, store: PostgresStore, database: str
) -> None:
    await with_timers(store, timer("so that a count exists"))
    keeper = await asyncpg.connect(database)
    try:
        await keeper.execute("BEGIN; LOCK TABLE duetime.tallies")
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            await store.put(timer())
    finally:
        await keeper.close()
    assert await store.get("default", "a") is None
    assert await store.put(timer()) is None


# A server that rejects.


async def refusal(url: str) -> str:
    store = PostgresStore(url, shards=8, virtual_clock=ManualClock())
    try:
        with pytest.raises(SettingsError) as raised:
            await store.open()
    finally:
        await store.close()
    message = str(raised.value)
    assert message.startswith("DATABASE_URL: ")
    assert "\n" not in message
    assert "s3cret" not in message
    return message


async def test_error_names_an_unknown_database(server: Postgres) -> None:
    assert '"nowhere" does not exist' in await refusal(server.url("nowhere").replace("@", ":s3cret@"))


async def test_error_names_an_unknown_role(server: Postgres) -> None:
    assert '"nobody" does not exist' in await refusal(server.url().replace("postgres@", "nobody:s3cret@"))


async def test_error_does_not_contain_a_wrong_password(server: Postgres, database: str) -> None:
    rules = server.directory / "data" / "pg_hba.conf"
    before = rules.read_text()
    server.sql("DROP ROLE IF EXISTS locked; CREATE ROLE locked LOGIN PASSWORD 'other'")
    rules.write_text("host all locked 127.0.0.1/32 scram-sha-256\n" + before)
    server.stop()
    server.start()
    try:
        message = await refusal(database.replace("postgres@", "locked:s3cret@"))
    finally:
        rules.write_text(before)
        server.sql("SELECT pg_reload_conf()")
    assert 'password authentication failed for user "locked"' in message


async def test_role_without_privileges_is_a_settings_error(server: Postgres, database: str) -> None:
    server.sql("DROP ROLE IF EXISTS guest; CREATE ROLE guest LOGIN")
    assert "permission denied" in await refusal(database.replace("postgres@", "guest@"))


async def test_later_rejected_login_is_unavailable(
    opened: Opened, server: Postgres, proxy: Proxy, database: str
) -> None:
    server.sql("DROP ROLE IF EXISTS leaving; CREATE ROLE leaving LOGIN SUPERUSER")
    store = await opened(proxy.url(database).replace("postgres@", "leaving@"))
    server.sql("ALTER ROLE leaving NOLOGIN")
    try:
        proxy.cut()
        await asyncio.sleep(0.1)
        with pytest.raises(StoreUnavailable):
            await store.renew(ALICE, LEASE_MS)
    finally:
        server.sql("DROP OWNED BY leaving; DROP ROLE leaving", database)


async def test_read_only_server_is_unavailable_for_writes(
    store: PostgresStore, server: Postgres, proxy: Proxy, database: str
) -> None:
    await with_timers(store, timer("t0"))
    name = database.rpartition("/")[2]
    server.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    try:
        proxy.cut()
        await asyncio.sleep(0.1)
        looks = reads(store)
        for call in (*writes(store).values(), looks.pop("ping")):
            with pytest.raises(StoreUnavailable, match="read-only"):
                await call()
        for call in looks.values():
            await call()
    finally:
        server.sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")


# The pool.


async def assert_has_room(store: PostgresStore) -> None:
    """More concurrent calls than connections all succeed, and no connection is leaked."""
    calls = (store._pool.read("SELECT pg_sleep(0.02)") for _ in range(CONNECTIONS_MAX + 1))
    async with asyncio.timeout(20):
        await asyncio.gather(*calls)
    [(number,)] = await store._pool.read("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    assert number <= CONNECTIONS_MAX + 1  # One connection listens.


async def given_up(call: Awaitable[object], after: float) -> None:
    with pytest.raises((TimeoutError, StoreError)):
        async with asyncio.timeout(after):
            await call


@pytest.mark.parametrize(("overdue", "error"), [(True, StoreIndeterminate), (False, AttributeError)])
async def test_any_error_after_the_timeout_is_indeterminate(
    store: PostgresStore, overdue: bool, error: type[Exception]
) -> None:
    async def job(connection: Any) -> None:
        if overdue:
            await asyncio.sleep(0.05)
        else:
            connection = type("Ended", (), {"_protocol": None})()  # a bug of ours is not reported as a timeout
        connection._protocol._get_timeout(None)  # the first thing that the next of several steps does

    with pytest.raises(error):
        await store._pool.run(job, seconds_max=0.01)
    await store.ping()


async def test_failed_calls_return_their_connection(store: PostgresStore) -> None:
    for _ in range(100):
        with pytest.raises(StoreUnavailable, match="division by zero"):
            await store._pool.write("SELECT 1 / 0")
    await assert_has_room(store)


async def test_cancelled_calls_free_their_place_in_the_pool(store: PostgresStore) -> None:
    for n in range(50):
        await asyncio.gather(*(given_up(store._pool.write("SELECT pg_sleep(9)"), 0.001 * (n % 4)) for _ in range(2)))
    await asyncio.sleep(0.2)
    await store._pool.read("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(9)'")
    await asyncio.sleep(0.2)
    await assert_has_room(store)


async def test_calls_interrupted_while_connecting_free_their_place(store: PostgresStore, proxy: Proxy) -> None:
    proxy.hang()
    await asyncio.gather(*(given_up(store.ping(), 0.01 * n) for n in range(30)))
    proxy.refuse()
    proxy.cut()
    await asyncio.gather(*(given_up(store.ping(), 5) for _ in range(30)))
    proxy.allow()
    proxy.pass_on()
    await assert_has_room(store)


async def test_closed_store_raises_unavailable(store: PostgresStore) -> None:
    puts = [asyncio.ensure_future(store.put(t)) for t in spread(50)]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*puts) == [None] * 50
    for call in (writes(store) | reads(store)).values():
        with pytest.raises(StoreUnavailable, match="closed"):
            await call()
