"""Run by ``test_new_field`` with the copy that has two more fields: every method that writes a timer keeps both."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from duetime import lifecycle
from duetime.model import Outcome, OutcomeKind, Status
from duetime.store import Filter
from tests.clocks import START, ManualClock
from tests.contract.stores import STORES
from tests.contract.timers import everything, timer

ALICE = b"a" * 16
SUCCESS = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
FAILURE = Outcome(kind=OutcomeKind.UNREACHABLE, error="refused")


async def use(name: str, place: Path | str) -> None:
    clock = ManualClock()
    store: Any = await STORES[name].opened(place, clock)
    noted = [timer(f"t{n}", note=f"it's {n}", weight=n) for n in range(4)]
    assert await store.put_many(noted) == [None] * 4
    assert await store.put(timer("t0")) == noted[0]
    plain: Any = timer("plain", at=START + 60_000)
    assert await store.put(plain) is None
    assert await store.get("default", "plain") == plain and (plain.note, plain.weight) == (None, 7)
    swapped = replace(noted[3], revision=noted[3].revision + 1, note="swapped", weight=33)
    assert await store.swap(noted[3], swapped)

    held = await store.claim(ALICE, range(store.shards), 60_000)
    begun = {t.id: t for t in (await store.begin(ALICE, held, 10)).timers}
    marks = {"t0": ("it's 0", 0), "t1": ("it's 1", 1), "t2": ("it's 2", 2), "t3": ("swapped", 33)}
    assert {id: (t.note, t.weight) for id, t in begun.items()} == marks

    recorded: dict[str, Any] = {}
    for id, outcome in (("t0", SUCCESS), ("t1", replace(FAILURE, final=True)), ("t2", FAILURE)):
        after = lifecycle.settle(begun[id], outcome, sent_at=clock.now(), now=clock.now(), uniform=max)
        recorded[id] = replace(after, note=f"recorded {id}", weight=100)
    assert list(await store.record(ALICE, [(begun[id], after) for id, after in recorded.items()])) == [True] * 3
    for id, after in recorded.items():
        assert await store.get("default", id) == after, id

    assert recorded["t2"].status is Status.PENDING
    canceled = replace(lifecycle.cancel(recorded["t2"], now=clock.now()), note="canceled")
    assert await store.swap(recorded["t2"], canceled)
    lists = bool(store.abilities.orders)
    found: Any = (
        (await store.page(Filter(namespace="default"), 10)).timers if lists else (await everything(store)).values()
    )
    listed = {t.id: t.note for t in found}
    wanted = {"t0": "recorded t0", "t1": "recorded t1", "t2": "canceled", "t3": "swapped", "plain": None}
    assert listed == wanted, listed
    await store.close()


if __name__ == "__main__":
    _, name, place = sys.argv
    asyncio.run(use(name, place if "://" in place else Path(place)))
    print("kept by every verb")
