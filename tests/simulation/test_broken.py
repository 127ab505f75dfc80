"""Tests of the simulation itself: each mutation breaks one rule of the design, and some history must catch it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from duetime import lifecycle
from duetime.engine import destinations, engine, lanes
from duetime.engine.destinations import Destination, Destinations, Trust
from duetime.engine.dispatcher import Dispatcher
from duetime.engine.engine import Engine
from duetime.engine.lanes import Lanes
from duetime.engine.ownership import Ownership
from duetime.engine.recorder import Recorder
from duetime.instants import Instant
from duetime.model import Outcome, Status, Timer, Unsent
from duetime.store import Begun
from duetime.stores.memory import MemoryStore
from tests.engine import test_isolation as isolation
from tests.simulation.history import History
from tests.simulation.world import Machine

Patch = pytest.MonkeyPatch


def no_fence(patch: Patch) -> None:
    patch.setattr(MemoryStore, "_fences", lambda self, owner_id, shard, version: True)


def early(patch: Patch) -> None:
    look = MemoryStore._look

    def hasty(self: MemoryStore, *arguments: Any) -> Any:
        assert isinstance(self._clock, Machine)
        self._clock.skew_ms += 1_000
        try:
            return look(self, *arguments)
        finally:
            self._clock.skew_ms -= 1_000

    patch.setattr(MemoryStore, "_look", hasty)


def delivery_id_of_the_attempt(patch: Patch) -> None:
    patch.setattr(Timer, "delivery_id", property(lambda timer: f"{timer.id}-{timer.firing}-{timer.attempt}"))


def forgotten_lost_begin(patch: Patch) -> None:
    """The shards are not claimed again after a begin or record with an unknown result."""
    patch.setattr(Ownership, "distrust", lambda self, shards: None)


def blind_swap(patch: Patch) -> None:
    """A cancel or move is written without checking the revision."""

    async def swap(self: MemoryStore, before: Timer, after: Timer | None) -> bool:
        if after is not None:
            self._timers[before.namespace, before.id] = after
        return True

    patch.setattr(MemoryStore, "swap", swap)


def forward_cursor(patch: Patch) -> None:
    """Each poll for due timers starts where the last one ended."""
    look = MemoryStore._look

    def forward(self: MemoryStore, owner_id: bytes, held: dict[int, int]) -> Any:
        seen = self.__dict__.setdefault("seen", {})
        now, ours, due, later = look(self, owner_id, held)
        due = [timer for timer in due if timer.fire_at >= seen.get(owner_id, 0)]
        seen[owner_id] = max([seen.get(owner_id, 0), *(timer.fire_at for timer in due)])
        return now, ours, due, later

    patch.setattr(MemoryStore, "_look", forward)


def done_before_it_is_recorded(patch: Patch) -> None:
    """A begun timer counts as completed, so a crash loses it."""
    begin = lifecycle.begin

    def final(timer: Timer, *, now: Instant, version: int) -> Timer:
        return msgspec.structs.replace(begin(timer, now=now, version=version), status=Status.COMPLETED)

    patch.setattr(lifecycle, "begin", final)


def takeover_of_the_living(patch: Patch) -> None:
    """Executing timers are begun again, whichever instance began them."""
    look = MemoryStore._look

    def greedy(self: MemoryStore, *arguments: Any) -> Any:
        for key, timer in self._timers.items():
            if timer.status is Status.EXECUTING:
                self._timers[key] = replace(timer, status=Status.PENDING)
        return look(self, *arguments)

    patch.setattr(MemoryStore, "_look", greedy)


def counted_put_back(patch: Patch) -> None:
    """An unsent attempt uses up a retry."""
    defer = lifecycle.defer

    def counting(timer: Timer, **named: Any) -> Timer:
        return msgspec.structs.replace(defer(timer, **named), attempt=timer.attempt)

    patch.setattr(lifecycle, "defer", counting)


def lost_put_back(patch: Patch) -> None:
    """An unsent timer is not put back."""

    def settled(self: Dispatcher, destination: Destination, timer: Timer, outcome: Outcome, now: Instant) -> None:
        destination.back_off(now)

    patch.setattr(Dispatcher, "_unsent", settled)


def pause_unknown_to_lanes(patch: Patch) -> None:
    """A look by lane begins timers of a paused namespace."""
    begin_lanes = MemoryStore.begin_lanes

    async def restless(self: MemoryStore, *arguments: Any) -> Begun:
        self._paused = lambda timer: False  # type: ignore[method-assign]
        try:
            return await begin_lanes(self, *arguments)
        finally:
            del self._paused

    patch.setattr(MemoryStore, "begin_lanes", restless)


def no_survey(patch: Patch) -> None:
    """No survey runs, and nothing checks whether looks by lane can end."""

    async def never(self: Engine) -> None:
        await asyncio.Event().wait()

    patch.setattr(Engine, "_survey", never)


def unfenced_lanes(patch: Patch) -> None:
    """A look by lane trusts the given shards without a fence."""
    begin_lanes = MemoryStore.begin_lanes

    async def trusting(self: MemoryStore, owner_id: bytes, held: dict[int, int], *arguments: Any) -> Begun:
        self._fences = lambda owner_id, shard, version: True  # type: ignore[method-assign]
        try:
            return await begin_lanes(self, owner_id, held, *arguments)
        finally:
            del self._fences

    patch.setattr(MemoryStore, "begin_lanes", trusting)


def broken_attempt_ends_it(patch: Patch) -> None:
    """An attempt that ended with an internal error is not put back."""
    unsent = Dispatcher._unsent

    def left(self: Any, destination: Any, timer: Timer, outcome: Outcome, now: Instant) -> None:
        if outcome.cause is not Unsent.INTERNAL:
            unsent(self, destination, timer, outcome, now)

    patch.setattr(Dispatcher, "_unsent", left)


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
        counted_put_back,
        lost_put_back,
        pause_unknown_to_lanes,
        no_survey,
        unfenced_lanes,
        broken_attempt_ends_it,
    ],
)
def test_the_simulation_catches_a_broken_rule(
    broken: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    broken(monkeypatch)
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(AssertionError):
        for seed in range(200):  # few histories catch some of these, and which ones changes with the engine
            History(seed, level=seed % 3).run()


# These mutations lose no timer but make it late or cost too much. A scene catches each of them.


def forgetful_lanes(patch: Patch) -> None:
    """Timers learned during a look are lost with it."""
    update = Lanes.update_after_look

    def forgetful(self: Lanes, *arguments: Any) -> set[str]:
        self._learned.clear()
        return update(self, *arguments)

    patch.setattr(Lanes, "update_after_look", forgetful)


def short_sighted_survey(patch: Patch) -> None:
    """A survey looks no further ahead when the next one comes later."""
    patch.setattr(Engine, "_survey_until", lambda self: self._clock.now())


def no_breaker(patch: Patch) -> None:
    patch.setattr(destinations, "BREAK_AFTER", 1 << 30)


def patient_breaker(patch: Patch) -> None:
    """Each pause is as long as the first one."""
    patch.setattr(destinations, "BREAK_MS_MAX", destinations.BREAK_MS)


def trust_for_ever(patch: Patch) -> None:
    """A destination that has responded once is trusted, however long it has been silent."""
    trust = Destination.trust

    def trusting(self: Destination, now: Instant) -> Trust:
        return Trust.PROVEN if self._answered and not self._misses else trust(self, now)

    patch.setattr(Destination, "trust", trusting)


def no_first_attempt(patch: Patch) -> None:
    """An idle destination waits until hanging attempts have ended."""
    patch.setattr(Destination, "held", property(lambda self: self.running + len(self.waiting) or 0.5))


def guilt_by_namespace(patch: Patch) -> None:
    """Hanging attempts use up the share of working destinations in the same namespace."""
    unproven = Destinations.unproven

    def nothing(self: Destinations, now: Instant) -> Any:
        by_trust, by_namespace = unproven(self, now)
        return by_trust, type(by_namespace)()

    patch.setattr(Destinations, "unproven", nothing)


def greedy_looks(patch: Patch) -> None:
    """A look takes all free slots."""
    patch.setattr(Engine, "_begin_max", lambda self: self._free())


def lanes_out_of_reach(patch: Patch) -> None:
    """Lanes beyond those that a look serves are never served."""
    portions = Lanes.portions

    def content(self: Lanes, *arguments: Any, **named: Any) -> Any:
        some, next_at = portions(self, *arguments, **named)
        return some, None if next_at == named["now"] else next_at

    patch.setattr(Lanes, "portions", content)


def stubborn_queues(patch: Patch) -> None:
    """A queue that was put back is filled again at once."""
    patch.setattr(destinations, "UNQUEUED_MS", 0)


def few_lanes_remembered(patch: Patch) -> None:
    patch.setattr(destinations, "LANES_MAX", 40)


def no_weights(patch: Patch) -> None:
    portions, limits = Lanes.portions, Destinations.limits

    def even(self: Lanes, *arguments: Any, **named: Any) -> Any:
        return portions(self, *arguments, **(named | {"weight": lambda name: 1}))

    patch.setattr(Lanes, "portions", even)
    patch.setattr(Destinations, "limits", lambda self, now, free, weight: limits(self, now, free, lambda name: 1))


def lanes_for_ever(patch: Patch) -> None:
    """The engine never returns to the oldest first."""
    patch.setattr(Engine, "_go_by_age", lambda self: None)


def hasty_return(patch: Patch) -> None:
    """The engine returns to the oldest first as soon as it can, and needs a survey for the next burst."""
    patch.setattr(engine, "BY_LANE_MS", 0)


def waits_of_their_own(patch: Patch) -> None:
    """Each waiting lane requests a look of its own, and soon."""
    patch.setattr(lanes, "_next_multiple", lambda now, wait_ms: now + 1)


def leaking_slots(patch: Patch) -> None:
    patch.setattr(Destination, "leave", lambda self, timer: None)


def payloads_for_free(patch: Patch) -> None:
    patch.setattr(Recorder, "size", lambda self, namespace: 1)


Scene = Callable[[], None]


@pytest.mark.parametrize(
    ("broken", "scene"),
    [
        (forgetful_lanes, isolation.test_timers_created_during_a_look_are_not_late),
        (short_sighted_survey, isolation.test_timers_that_fall_due_between_slow_surveys_are_not_late),
        (no_breaker, lambda: isolation.test_a_dead_destination_of_many_namespaces_causes_few_writes(4)),
        (
            patient_breaker,
            isolation.test_a_refusing_destination_gets_growing_pauses_and_then_everything,
        ),
        (trust_for_ever, isolation.test_proven_destinations_that_start_to_hang_leave_slots_for_others),
        (no_first_attempt, isolation.test_a_destination_that_failed_once_is_served_while_others_hang),
        (
            guilt_by_namespace,
            lambda: isolation.test_hundreds_of_dead_destinations_do_not_stop_working_ones("hang", 4),
        ),
        (greedy_looks, lambda: isolation.test_one_namespace_leaves_slots_for_others_even_if_there_are_few(True)),
        (lanes_out_of_reach, isolation.test_many_destinations_with_one_timer_each_are_served_promptly),
        (stubborn_queues, lambda: isolation.test_a_slow_destination_causes_few_writes(1)),
        (few_lanes_remembered, lambda: isolation.test_a_dead_destination_of_many_namespaces_causes_few_writes(4)),
        (no_weights, lambda: isolation.test_bursts_progress_by_weight(True)),
        (no_weights, lambda: isolation.test_bursts_progress_by_weight(False)),
        (
            lanes_for_ever,
            lambda: isolation.test_after_trouble_the_engine_returns_to_oldest_first_with_a_clean_state({}),
        ),
        (hasty_return, isolation.test_not_every_burst_causes_a_survey),
        (waits_of_their_own, lambda: isolation.test_held_back_timers_need_few_looks(*isolation.HELD_BACK[-1])),
        (leaking_slots, isolation.test_a_burst_of_one_namespace_does_not_delay_another),
        (payloads_for_free, isolation.test_large_payloads_take_several_slots),
    ],
)
def test_a_scene_catches_a_broken_rule(
    broken: Callable[[Patch], None], scene: Scene, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    broken(monkeypatch)
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(AssertionError):
        scene()
