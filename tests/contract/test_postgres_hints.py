"""Hints between instances on one PostgreSQL: they reach the others, are merged, and work again after an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from duetime.instants import Instant
from duetime.store import Hint
from duetime.stores.postgres import hints as postgres_hints
from duetime.stores.postgres.store import PostgresStore
from tests.contract.stores import Opened
from tests.contract.timers import timer
from tests.postgres import Postgres
from tests.proxy import Proxy, nth


@pytest.fixture
def proxy(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy between the listener and the server. The listener reconnects quickly."""
    monkeypatch.setattr(postgres_hints, "RETRY_SECONDS", 0.02)
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


class Listener:
    """A store and the hints that it received."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.heard: list[Hint] = []
        store.on_hint(self.heard.append)

    async def hears(self, speaker: PostgresStore) -> None:
        """Wait until a hint of ``speaker`` arrives; from then on both can send and receive."""
        await eventually(lambda: bool(self.heard), meanwhile=lambda: speaker.hint(Hint(shards=True)))
        await settled(self.store, speaker)
        self.heard.clear()


async def eventually(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    for _ in range(1000):
        if condition():
            return
        meanwhile()
        await asyncio.sleep(0.02)
    raise AssertionError("timed out")


def _has_sent_all(store: PostgresStore) -> bool:
    return store._hints._pending is None


async def settled(*stores: PostgresStore) -> None:
    """Wait until no hint is in transit: a put and a get take longer than a hint."""
    for store in stores:
        await eventually(partial(_has_sent_all, store))
    await asyncio.sleep(0.1)


async def pair(opened: Opened, url: str, speakers_url: str) -> tuple[Listener, PostgresStore]:
    listener, speaker = Listener(await opened(url)), await opened(speakers_url)
    await listener.hears(speaker)
    return listener, speaker


async def test_hint_reaches_all_other_instances_but_not_its_sender(opened: Opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    third, itself = Listener(await opened(database)), Listener(speaker)
    await third.hears(speaker)
    listener.heard.clear()
    hint = Hint(due_at=Instant(1234), namespaces=True)
    speaker.hint(hint)
    await eventually(lambda: len(listener.heard) == len(third.heard) == 1)
    assert listener.heard == third.heard == [hint]
    assert itself.heard == []


async def test_hints_sent_together_are_merged(opened: Opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    for hint in (
        Hint(due_at=Instant(300)),
        Hint(due_at=Instant(100)),
        Hint(shards=True),
        Hint(due_at=Instant(200)),
        Hint(namespaces=True),
    ):
        speaker.hint(hint)
    await eventually(lambda: bool(listener.heard))
    assert listener.heard == [Hint(due_at=Instant(100), shards=True, namespaces=True)]


async def test_merged_hints_keep_the_earliest_instant(opened: Opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    for n in range(1000):
        speaker.hint(Hint(due_at=Instant(5000 - n)))
        if n % 10 == 0:
            await asyncio.sleep(0)
    await eventually(lambda: bool(listener.heard) and 4001 in {h.due_at for h in listener.heard})
    assert len(listener.heard) < 1000


async def test_hint_does_not_reach_another_database(opened: Opened, server: Postgres, database: str) -> None:
    elsewhere = server.fresh()
    apart = Listener(await opened(elsewhere))
    listener, speaker = await pair(opened, database, database)
    speaker.hint(Hint(due_at=Instant(1)))
    await eventually(lambda: bool(listener.heard))
    assert apart.heard == []


async def test_hints_work_again_after_a_broken_connection(opened: Opened, proxy: Proxy, database: str) -> None:
    listener, speaker = await pair(opened, proxy.url(database), proxy.url(database))
    for _ in range(3):
        proxy.cut()
        await listener.hears(speaker)


async def test_hints_work_again_after_a_server_outage(opened: Opened, proxy: Proxy, database: str) -> None:
    listener, speaker = await pair(opened, proxy.url(database), database)
    proxy.refuse()
    proxy.cut()
    speaker.hint(Hint(due_at=Instant(1)))  # This hint is lost.
    await asyncio.sleep(0.1)
    proxy.allow()
    await listener.hears(speaker)


async def test_connection_broken_during_listen_is_retried(opened: Opened, proxy: Proxy, database: str) -> None:
    speaker = await opened(database)
    proxy.on_answer = nth(b"LISTEN")
    listener = Listener(await opened(proxy.url(database)))
    await eventually(lambda: bool(listener.heard), meanwhile=lambda: speaker.hint(Hint(shards=True)))


async def test_invalid_notifications_are_ignored(opened: Opened, server: Postgres, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    server.sql("NOTIFY duetime, 'hello?'", database)
    speaker.hint(Hint(due_at=Instant(7)))
    await eventually(lambda: bool(listener.heard))
    assert listener.heard == [Hint(due_at=Instant(7))]


async def test_close_sends_the_pending_hint(opened: Opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    speaker.hint(Hint(due_at=Instant(77)))
    await speaker.close()
    await eventually(lambda: bool(listener.heard))
    assert listener.heard == [Hint(due_at=Instant(77))]


async def test_close_does_not_wait_for_a_dead_server(opened: Opened, proxy: Proxy, database: str) -> None:
    _, speaker = await pair(opened, database, proxy.url(database))
    proxy.refuse()
    proxy.cut()
    speaker.hint(Hint(due_at=Instant(77)))
    async with asyncio.timeout(20):
        await speaker.close()


async def test_pending_hints_do_not_delay_puts(opened: Opened, database: str) -> None:
    # Hints have a connection of their own, so no put waits for one.
    _, speaker = await pair(opened, database, database)
    for n in range(50):
        speaker.hint(Hint(due_at=Instant(n)))
        assert await speaker.put(timer(f"t{n}")) is None
