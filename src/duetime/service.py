"""All operations on timers; every API goes through this module.

The APIs pass validated values. The service creates the timer, writes it and nudges the engine. To change a timer, it
reads the timer, computes the new one with ``lifecycle`` and writes it conditionally: a change that loses a race against
a firing fails with an error and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import getrandbits

import msgspec
from msgspec import Struct

from duetime import lifecycle
from duetime.clock import Clock
from duetime.deliverer import Deliverers
from duetime.errors import (
    Contended,
    DuetimeError,
    Quarantined,
    TimerConflict,
    TimerNotFinal,
    TimerNotFound,
    TimerNotPending,
    TooManyNamespaces,
)
from duetime.identity import is_repeat, new_ids
from duetime.instants import CreatedAt, ExecuteAt, FireAt, Instant
from duetime.model import Definition, Namespace, NatsTarget, Status, Target, Timer, destination_of
from duetime.namespaces import CHANGE_TRIES_MAX, Namespaces
from duetime.sharding import shard_of
from duetime.store import Cursor, Filter, Instance, Page, Quarantine, Query, Store, Taken

REVISION_BITS = 48
CHANGES_AT_ONCE = 32
"""How many timers of a bulk operation change at once: enough to share commits, few enough to leave room for other
requests. Also how many checks of targets start before the event loop gets a turn."""
COUNT_MAX = 10_000
"""Counts of rows stop here."""


class NewTimer(Struct, frozen=True, kw_only=True):
    """The validated values of a create request."""

    namespace: str
    id: str | None = None
    execute_at: Instant
    definition: Definition
    correlation_id: str | None = None
    fingerprint: str = ""


class Counted(Struct, frozen=True):
    """A number of timers: exact, a lower bound (``more``) or an estimate."""

    timers: int
    more: bool = False
    estimated: bool = False


class Service:
    def __init__(
        self,
        store: Store,
        namespaces: Namespaces,
        deliverers: Deliverers,
        clock: Clock,
        nudge: Callable[..., None],
    ) -> None:
        self._store = store
        self._deliverers = deliverers
        self._nudge = nudge
        self._namespaces = namespaces
        self._new_ids = new_ids(clock)
        self._estimates = not store.abilities.counts_exactly
        self.abilities = store.abilities
        self.clock = clock
        self.changes = 0
        """Incremented when this instance changes a timer: web pages refresh even if all counts stay the same."""

    async def create(self, new: NewTimer) -> tuple[Timer, bool]:
        """Store a new timer and return it with True; a repeated request returns the existing timer with False."""
        await self.check_target(new.definition.target)
        timer = await self._build(new)
        existing = await self._store.put(timer)
        if existing is not None:
            return _checked_repeat(existing, new.fingerprint), False
        self._nudge(timer)
        return timer, True

    async def create_many(self, news: Sequence[NewTimer]) -> list[tuple[Timer, bool] | DuetimeError]:
        """``create`` for each, all durable when this returns; an error of one does not affect the others."""
        targets = [new.definition.target for new in news]
        # All of NATS is one destination, but each subject needs a check: some are reserved.
        keys = [target.subject if isinstance(target, NatsTarget) else destination_of(target) for target in targets]
        refused = await self._refused_targets(dict(zip(keys, targets, strict=True)))
        answers: list[tuple[Timer, bool] | DuetimeError] = []
        known, now = self._namespaces.known, self.clock.now()
        for new, key in zip(news, keys, strict=True):
            if key in refused:
                answers.append(refused[key])
                continue
            try:
                namespace = known.get(new.namespace) or await self._namespaces.of_new_timer(new.namespace)
                answers.append((self._new_timer(new, namespace, now), True))
            except DuetimeError as error:
                answers.append(error)
        timers = [answer[0] for answer in answers if isinstance(answer, tuple)]
        taken = iter(await self._store.put_many(timers))
        for n, answer in enumerate(answers):
            if isinstance(answer, tuple) and (existing := next(taken)) is not None:
                try:
                    answers[n] = await self._existing_timer(answer[0], existing), False
                except (TimerConflict, TimerNotFound, Quarantined) as error:
                    answers[n] = error
        if timers:
            self._nudge(*timers)
        return answers

    async def _existing_timer(self, new: Timer, existing: Timer | Taken) -> Timer:
        """The timer that an earlier, equal request created. Reading it is safe in a batch: it is as large as this
        one."""
        if isinstance(existing, Taken):
            _check_repeat(existing, new.namespace, new.id, new.fingerprint)
            return await self.get(new.namespace, new.id)
        return _checked_repeat(existing, new.fingerprint)

    async def _refused_targets(self, targets: Mapping[str, Target]) -> dict[str, DuetimeError]:
        """The errors of the refused targets, by their keys. Checks all targets concurrently. The checks start a few at
        a time, because a thousand at once would block the event loop."""
        refused: dict[str, DuetimeError] = {}

        async def check(key: str, target: Target) -> None:
            try:
                await self.check_target(target)
            except DuetimeError as error:
                refused[key] = error

        async with asyncio.TaskGroup() as checks:
            for begun, (key, target) in enumerate(targets.items(), 1):
                checks.create_task(check(key, target))
                if begun % CHANGES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return refused

    async def schedule_many(self, news: Sequence[NewTimer]) -> list[DuetimeError | None]:
        """Create the timers of these commands, all durable when this returns. A timer that is already pending moves to
        the new time, and one that has been fired does not change. Commands may arrive more than once and out of order;
        their stamps (``fingerprint``) tell which one is later. Missing namespaces are created."""
        errors: list[DuetimeError | None] = [None] * len(news)
        made: list[tuple[int, Timer]] = []
        for index, new in enumerate(news):
            try:
                if new.namespace not in self._namespaces.known:
                    await self._namespaces.create(new.namespace)
                made.append((index, await self._build(new)))
            except TooManyNamespaces as error:
                errors[index] = error
        timers = [timer for _, timer in made]
        taken = await self._store.put_many(timers) if timers else []
        latest: dict[tuple[str, str], int] = {}  # the latest of the commands for each existing timer
        for index, timer in enumerate(timers):
            key = timer.namespace, timer.id
            if taken[index] is not None and (
                key not in latest or lifecycle.is_later(timer.fingerprint, timers[latest[key]].fingerprint)
            ):
                latest[key] = index
        indexes = list(latest.values())
        for start in range(0, len(indexes), CHANGES_AT_ONCE):
            some = indexes[start : start + CHANGES_AT_ONCE]
            failures = await asyncio.gather(*(self._apply_command(timers[index], taken[index]) for index in some))
            for index, failure in zip(some, failures, strict=True):
                errors[made[index][0]] = failure
        if timers:
            self._nudge(*timers)
        return errors

    async def _apply_command(self, new: Timer, existing: Timer | Taken | None) -> DuetimeError | None:
        """Apply the command that would have created ``new`` to the existing timer."""

        def commanded(timer: Timer) -> Timer:
            return lifecycle.command(timer, execute_at=new.execute_at, stamp=new.fingerprint, now=self.clock.now())

        known = existing if isinstance(existing, Timer) else None
        if existing is None or (known is not None and commanded(known) is known):
            return None
        try:
            await self._change(new.namespace, new.id, commanded, known)
        except TimerNotFound:
            pass  # It has been deleted.
        except DuetimeError as error:
            return error
        return None

    async def upsert(self, new: NewTimer) -> Timer:
        """Store a timer; replaces an existing timer with the same identity unless that is executing."""
        await self.check_target(new.definition.target)
        timer = await self._build(new)
        for _ in range(CHANGE_TRIES_MAX):
            existing = await self._store.put(timer)
            after = timer if existing is None else lifecycle.renew(existing, timer)
            if existing is None or await self._store.swap(existing, after):
                self.changes += 1
                self._nudge(after)
                return after
        raise Contended

    async def _build(self, new: NewTimer) -> Timer:
        namespace = self._namespaces.known.get(new.namespace) or await self._namespaces.of_new_timer(new.namespace)
        return self._new_timer(new, namespace, self.clock.now())

    def _new_timer(self, new: NewTimer, namespace: Namespace, now: Instant) -> Timer:
        id = new.id or next(self._new_ids)
        revision = firing = getrandbits(REVISION_BITS)
        return Timer(
            namespace.name,
            id,
            shard_of(namespace.name, id, namespace_shards=namespace.shards, shards=self._store.shards),
            new.definition,
            ExecuteAt(new.execute_at),
            FireAt(new.execute_at),
            CreatedAt(now),
            now,
            revision,
            firing,
            new.fingerprint,
            new.correlation_id,
        )

    async def check_target(self, target: Target) -> None:
        await self._deliverers[type(target)].check(target)

    async def repeated(self, namespace: str, id: str, fingerprint: str) -> Timer | None:
        """The timer that an earlier, equal request created; None if the id is free."""
        existing = await self._store.get(namespace, id)
        return None if existing is None else _checked_repeat(existing, fingerprint)

    async def get(self, namespace: str, id: str) -> Timer:
        timer = await self._store.get(namespace, id)
        if timer is None:
            raise TimerNotFound(namespace, id)
        return timer

    async def page_by_offset(self, query: Query) -> tuple[list[Timer], Counted]:
        """A page by offset, without payloads, and the number of timers that match the query."""
        self.abilities.check_query(query)
        timers = await self._store.page_by_offset(msgspec.structs.replace(query, brief=True))
        return timers, await self._tallied(query.namespace, query.status)

    async def page(self, filter: Filter, limit: int, after: Cursor | None) -> Page:
        self.abilities.check_filter(filter)
        return await self._store.page(filter, limit, after)

    async def count(self, filter: Filter) -> Counted:
        """How many timers match the filter: exact if the tallies have it, otherwise counted up to ``COUNT_MAX``."""
        if filter == Filter(namespace=filter.namespace, status=filter.status):
            return await self._tallied(filter.namespace, filter.status)
        self.abilities.check_filter(filter)
        return self._counted(await self._store.count(filter, COUNT_MAX + 1))

    async def _tallied(self, namespace: str | None, status: Status | None) -> Counted:
        counts = await self._store.tally(namespace)
        return Counted(sum(counts.values()) if status is None else counts[status], estimated=self._estimates)

    async def forecast(self, bounds: Sequence[Instant]) -> list[Counted]:
        """How many pending timers are due from each bound up to the next one."""
        return [self._counted(number) for number in await self._store.forecast(bounds, COUNT_MAX + 1)]

    def _counted(self, number: int) -> Counted:
        return Counted(min(number, COUNT_MAX), number > COUNT_MAX, self._estimates)

    def destination(self, timer: Timer) -> str:
        """The timer's destination, whose concurrency limit and circuit breaker apply to it."""
        return destination_of(timer.definition.target)

    async def update(
        self,
        namespace: str,
        id: str,
        *,
        execute_at: Instant | None,
        change: Callable[[Definition], Definition],
        correlation_id: str | None = None,
    ) -> Timer:
        """Change a pending timer; ``change`` returns its new definition."""

        def amended(timer: Timer) -> Timer:
            return lifecycle.amend(
                timer,
                now=self.clock.now(),
                execute_at=execute_at,
                definition=change(timer.definition),
                correlation_id=timer.correlation_id if correlation_id is None else correlation_id,
            )

        return await self._change(namespace, id, amended)

    async def cancel(self, namespace: str, id: str) -> Timer:
        """Cancel a pending timer; does nothing if it is already canceled."""

        def canceled(timer: Timer) -> Timer:
            if timer.status is Status.CANCELED:
                return timer
            return lifecycle.cancel(timer, now=self.clock.now())

        return await self._change(namespace, id, canceled)

    async def cancel_all(self, filter: Filter, limit: int) -> Counted:
        """Cancel up to ``limit`` pending timers that match the filter; returns how many, and whether there are more."""
        pending = msgspec.structs.replace(filter, status=Status.PENDING)
        return await self._change_all(pending, limit, lambda timer: lifecycle.cancel(timer, now=self.clock.now()))

    async def delete(self, namespace: str, id: str) -> None:
        """Delete a timer and its history, unless it is executing."""
        for _ in range(CHANGE_TRIES_MAX):
            timer = await self.get(namespace, id)
            if timer.status is Status.EXECUTING:
                raise TimerNotPending("delete", timer.status)
            if await self._store.swap(timer, None):
                return
        raise Contended

    async def replay(self, namespace: str, id: str) -> Timer:
        """Fire a finished timer again, now."""
        return await self._change(namespace, id, lambda timer: lifecycle.replay(timer, now=self.clock.now()))

    async def replay_all(self, filter: Filter, limit: int) -> Counted:
        """Replay up to ``limit`` final timers that match the filter; returns how many, and whether there are more."""
        return await self._change_all(filter, limit, lambda timer: lifecycle.replay(timer, now=self.clock.now()))

    async def _change_all(self, filter: Filter, limit: int, change: Callable[[Timer], Timer]) -> Counted:
        self.abilities.check_filter(filter)
        changed = seen = 0
        after: Cursor | None = None
        while True:
            page = await self._store.page(filter, limit - seen, after)
            for start in range(0, len(page.timers), CHANGES_AT_ONCE):
                some = page.timers[start : start + CHANGES_AT_ONCE]
                done = await asyncio.gather(*(self._try_change(timer, change) for timer in some))
                changed += sum(done)
            seen += len(page.timers)
            after = page.next
            if after is None or seen >= limit:
                return Counted(changed, after is not None)

    async def _try_change(self, timer: Timer, change: Callable[[Timer], Timer]) -> bool:
        """Change a timer; False if it can't be changed any more because of a concurrent change."""
        try:
            await self._change(timer.namespace, timer.id, change, timer)
            return True
        except (TimerNotPending, TimerNotFinal, TimerNotFound):
            return False

    async def _change(
        self, namespace: str, id: str, change: Callable[[Timer], Timer], known: Timer | None = None
    ) -> Timer:
        """Replace a timer with the result of ``change``; ``known`` is a recently read copy, for the first try."""
        for _ in range(CHANGE_TRIES_MAX):
            before, known = known or await self.get(namespace, id), None
            after = change(before)
            if after is before or await self._store.swap(before, after):
                self.changes += 1
                if after.status is Status.PENDING:
                    self._nudge(after)
                return after
        raise Contended

    # The store as a whole.

    async def cluster(self) -> list[Instance]:
        return await self._store.cluster()

    async def tally(self) -> dict[Status, int]:
        return await self._store.tally()

    async def quarantine(self) -> Quarantine:
        return await self._store.quarantine()

    async def ping(self) -> None:
        await self._store.ping()


def _checked_repeat(existing: Timer, fingerprint: str) -> Timer:
    _check_repeat(existing, existing.namespace, existing.id, fingerprint)
    return existing


def _check_repeat(existing: Timer | Taken, namespace: str, id: str, fingerprint: str) -> None:
    if not is_repeat(fingerprint, existing.fingerprint):
        raise TimerConflict(namespace, id)
