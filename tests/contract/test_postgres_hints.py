"""Hints between instances that share a PostgreSQL database: heard by the others, merged, and again after a cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from duetime.store import Hint
from duetime.stores import postgres_hints
from duetime.stores.postgres import PostgresStore
from tests.contract.timers import timer
from tests.postgres import Postgres
from tests.proxy import Proxy, nth


@pytest.fixture
def proxy(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What lies between the listener and the server. The listener does not wait long before it connects again."""
    monkeypatch.setattr(postgres_hints, "AGAIN_SECONDS", 0.02)
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


class Listener:
    """A store, and what it has heard."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.heard: list[Hint] = []
        store.on_hint(self.heard.append)

    async def hears(self, speaker: PostgresStore) -> None:
        """Wait until a hint of ``speaker`` arrives: from then on both are listening and talking."""
        await eventually(lambda: bool(self.heard), meanwhile=lambda: speaker.hint(Hint(shards=True)))
        await settled(self.store, speaker)
        self.heard.clear()


async def eventually(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    for _ in range(1000):
        if condition():
            return
        meanwhile()
        await asyncio.sleep(0.02)
    raise AssertionError("it does not happen")


async def settled(*stores: PostgresStore) -> None:
    """Wait until nothing that was said is on its way: a put and a get take longer than a hint."""
    for store in stores:
        await eventually(lambda store=store: store._hints._unsaid is None)
    await asyncio.sleep(0.1)


async def pair(opened, url: str, speakers_url: str) -> tuple[Listener, PostgresStore]:
    listener, speaker = Listener(await opened(url)), await opened(speakers_url)
    await listener.hears(speaker)
    return listener, speaker


async def test_what_one_says_the_others_hear_and_it_does_not(opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    third, itself = Listener(await opened(database)), Listener(speaker)
    await third.hears(speaker)
    listener.heard.clear()
    hint = Hint(due_at=1234, namespaces=True)
    speaker.hint(hint)
    await eventually(lambda: len(listener.heard) == len(third.heard) == 1)
    assert listener.heard == third.heard == [hint]
    assert itself.heard == []


async def test_what_is_said_at_once_becomes_one_hint(opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    for hint in (Hint(due_at=300), Hint(due_at=100), Hint(shards=True), Hint(due_at=200), Hint(namespaces=True)):
        speaker.hint(hint)
    await eventually(lambda: bool(listener.heard))
    assert listener.heard == [Hint(due_at=100, shards=True, namespaces=True)]


async def test_of_a_thousand_hints_the_earliest_instant_arrives(opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    for n in range(1000):
        speaker.hint(Hint(due_at=5000 - n))
        if n % 10 == 0:
            await asyncio.sleep(0)
    await eventually(lambda: bool(listener.heard) and min(h.due_at for h in listener.heard) == 4001)
    assert len(listener.heard) < 1000


async def test_another_database_hears_nothing(opened, server: Postgres, database: str) -> None:
    elsewhere = server.fresh()
    apart = Listener(await opened(elsewhere))
    listener, speaker = await pair(opened, database, database)
    speaker.hint(Hint(due_at=1))
    await eventually(lambda: bool(listener.heard))
    assert apart.heard == []


async def test_after_a_cut_it_listens_and_talks_again(opened, proxy: Proxy, database: str) -> None:
    listener, speaker = await pair(opened, proxy.url(database), proxy.url(database))
    for _ in range(3):
        proxy.cut()
        await listener.hears(speaker)


async def test_after_a_time_without_a_server_it_listens_again(opened, proxy: Proxy, database: str) -> None:
    listener, speaker = await pair(opened, proxy.url(database), database)
    proxy.refuse()
    proxy.cut()
    speaker.hint(Hint(due_at=1))  # Nobody hears this one.
    await asyncio.sleep(0.1)
    proxy.allow()
    await listener.hears(speaker)


async def test_a_cut_while_it_starts_to_listen_is_one_like_any_other(opened, proxy: Proxy, database: str) -> None:
    speaker = await opened(database)
    proxy.on_answer = nth(b"LISTEN")
    listener = Listener(await opened(proxy.url(database)))
    await eventually(lambda: bool(listener.heard), meanwhile=lambda: speaker.hint(Hint(shards=True)))


async def test_what_is_no_hint_is_passed_over(opened, server: Postgres, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    server.sql("NOTIFY duetime, 'hello?'", database)
    speaker.hint(Hint(due_at=7))
    await eventually(lambda: bool(listener.heard))
    assert listener.heard == [Hint(due_at=7)]


async def test_closing_says_what_has_been_said(opened, database: str) -> None:
    listener, speaker = await pair(opened, database, database)
    speaker.hint(Hint(due_at=77))
    await speaker.close()
    await eventually(lambda: bool(listener.heard))
    assert listener.heard == [Hint(due_at=77)]


async def test_closing_does_not_wait_for_a_server_that_is_gone(opened, proxy: Proxy, database: str) -> None:
    _, speaker = await pair(opened, database, proxy.url(database))
    proxy.refuse()
    proxy.cut()
    speaker.hint(Hint(due_at=77))
    async with asyncio.timeout(20):
        await speaker.close()


async def test_a_store_that_hints_still_puts(opened, database: str) -> None:
    # Hints travel on a connection of their own: no put waits for one.
    _, speaker = await pair(opened, database, database)
    for n in range(50):
        speaker.hint(Hint(due_at=n))
        assert await speaker.put(timer(f"t{n}")) is None
