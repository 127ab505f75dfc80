"""The simulation is worth what it catches: each of these breaks one rule of the design, and some history must tell."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import pytest

from duetime import lifecycle
from duetime.engine.ownership import Ownership
from duetime.model import Status, Timer
from duetime.stores.memory import MemoryStore
from tests.simulation.history import History

Patch = pytest.MonkeyPatch


def no_fence(patch: Patch) -> None:
    patch.setattr(MemoryStore, "_fences", lambda self, owner_id, shard, version: True)


def early(patch: Patch) -> None:
    begin = MemoryStore.begin

    async def hasty(self: MemoryStore, *arguments: object) -> object:
        self._clock.skew_ms += 1_000
        try:
            return await begin(self, *arguments)
        finally:
            self._clock.skew_ms -= 1_000

    patch.setattr(MemoryStore, "begin", hasty)


def delivery_id_of_the_attempt(patch: Patch) -> None:
    patch.setattr(Timer, "delivery_id", property(lambda timer: f"{timer.id}-{timer.firing}-{timer.attempt}"))


def forgotten_lost_begin(patch: Patch) -> None:
    """After a begin or record of unknown fate the shards are not claimed anew."""
    patch.setattr(Ownership, "distrust", lambda self, shards: None)


def blind_swap(patch: Patch) -> None:
    """A cancel or move is written without looking at the revision."""

    async def swap(self: MemoryStore, before: Timer, after: Timer | None) -> bool:
        if after is not None:
            self._timers[before.namespace, before.id] = after
        return True

    patch.setattr(MemoryStore, "swap", swap)


def forward_cursor(patch: Patch) -> None:
    """Due timers are looked for from where the last look ended."""
    begin = MemoryStore.begin

    async def forward(self: MemoryStore, owner_id: bytes, held: dict[int, int], limit: int) -> object:
        seen = self.__dict__.setdefault("seen", {}).setdefault(owner_id, 0)
        behind = {k: t for k, t in self._timers.items() if t.fire_at < seen and t.status is Status.PENDING}
        for key in behind:
            del self._timers[key]
        begun = await begin(self, owner_id, held, limit)
        self.seen[owner_id] = max([seen, *(t.fire_at for t in begun.timers)])
        self._timers.update(behind)
        return begun

    patch.setattr(MemoryStore, "begin", forward)


def done_before_it_is_recorded(patch: Patch) -> None:
    """A begun timer counts as completed, so that a crash loses it."""
    begin = lifecycle.begin

    def final(timer: Timer, *, now: int, version: int) -> Timer:
        return msgspec.structs.replace(begin(timer, now=now, version=version), status=Status.COMPLETED)

    patch.setattr(lifecycle, "begin", final)


def takeover_of_the_living(patch: Patch) -> None:
    """Executing timers are begun again whoever began them."""
    begin = MemoryStore.begin

    async def greedy(self: MemoryStore, *arguments: object) -> object:
        for key, timer in self._timers.items():
            if timer.status is Status.EXECUTING:
                self._timers[key] = lifecycle.replace(timer, status=Status.PENDING)
        return await begin(self, *arguments)

    patch.setattr(MemoryStore, "begin", greedy)


@pytest.mark.parametrize(
    "broken",
    [
        no_fence,
        early,
        delivery_id_of_the_attempt,
        forgotten_lost_begin,
        blind_swap,
        forward_cursor,
        done_before_it_is_recorded,
        takeover_of_the_living,
    ],
)
def test_a_broken_rule_is_caught(
    broken: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    broken(monkeypatch)
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(AssertionError):
        for seed in range(200):  # some are seen in few histories, and which those are changes with the engine
            History(seed, level=seed % 3).run()
