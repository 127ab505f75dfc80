"""What clients can do with timers: the only way in, whichever door they came through.

A door hands over checked values; this makes the timer, writes it and nudges the engine. Changes are read, decided by
``lifecycle`` and written conditionally, so one that loses a race against a firing is told so and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from random import getrandbits

import msgspec
from msgspec import Struct

from duetime import lifecycle, rotation
from duetime.clock import Clock
from duetime.deliverer import Deliverers
from duetime.errors import (
    DuetimeError,
    NamespaceConflict,
    Quarantined,
    StoreError,
    StoreUnavailable,
    TimerConflict,
    TimerNotFinal,
    TimerNotFound,
    TimerNotPending,
    TooManyNamespaces,
    UnknownNamespace,
)
from duetime.identity import new_ids
from duetime.model import Definition, Namespace, NatsTarget, Secret, Status, Target, Timer, destination_of
from duetime.sharding import shard_of
from duetime.store import Filter, Hint, Instance, Page, Place, Quarantine, Query, Store, Taken

log = logging.getLogger(__name__)

NAMESPACES_SECONDS = 5.0
"""How old what is known of namespaces may be when a hint got lost."""

CHANGE_TRIES_MAX = 10
REVISION_BITS = 48
CHANGES_AT_ONCE = 32
"""How many of a filter's timers are changed, or of a batch's destinations begin to be checked, at a time: enough to
share commits, few enough to let others in."""
COUNT_MAX = 10_000
"""Beyond how many timers nobody counts one by one."""


class NewTimer(Struct, frozen=True, kw_only=True):
    """What a create asks for, checked by its door."""

    namespace: str
    id: str | None = None
    execute_at: int
    definition: Definition
    correlation_id: str | None = None
    fingerprint: str = ""


class Counted(Struct, frozen=True):
    """How many timers there are, or how many at least."""

    timers: int
    more: bool = False


class Service:
    def __init__(
        self,
        store: Store,
        deliverers: Deliverers,
        clock: Clock,
        nudge: Callable[..., None],
        *,
        auto_namespaces: bool = False,
        namespaces_max: int | None = None,
    ) -> None:
        self._store = store
        self._deliverers = deliverers
        self._nudge = nudge
        self._auto_namespaces = auto_namespaces
        self._namespaces_max = namespaces_max
        self._namespaces: dict[str, Namespace] = {}
        self._changed = asyncio.Event()
        self._new_ids = new_ids(clock)
        self.clock = clock
        self.changes = 0
        """How often timers were changed through this instance in a way that may leave all counts as they were."""

    async def start(self) -> None:
        """Learn the namespaces."""
        for namespace in await self._store.namespaces():
            self._learn(namespace)

    def _learn(self, namespace: Namespace) -> None:
        """Keep a copy of a namespace, unless a newer one came while it was under way."""
        known = self._namespaces.get(namespace.name)
        if known is None or namespace.revision >= known.revision:
            self._namespaces[namespace.name] = namespace

    async def run(self) -> None:
        """Keep up with what other instances do to the namespaces."""
        while True:
            await self.clock.sleep(NAMESPACES_SECONDS, self._changed)
            self._changed.clear()
            try:
                await self.start()
            except StoreError as error:
                log.debug("could not read the namespaces: %s", error)

    def heard(self, hint: Hint) -> None:
        """Another instance knows something."""
        if hint.namespaces:
            self._changed.set()

    # Timers.

    async def create(self, new: NewTimer) -> tuple[Timer, bool]:
        """Write a new timer and return it with True; a repeat of the same request returns the first one with False."""
        await self.check_target(new.definition.target)
        timer = await self._made(new)
        there = await self._store.put(timer)
        if there is not None:
            return _repeat(there, new.fingerprint), False
        self._nudge(timer)
        return timer, True

    async def create_many(self, news: Sequence[NewTimer]) -> list[tuple[Timer, bool] | DuetimeError]:
        """``create`` for each, in one durable write; one that can't be made does not stop the others."""
        targets = [new.definition.target for new in news]
        # All of NATS is one destination, of which some subjects are closed.
        places = [target.subject if isinstance(target, NatsTarget) else destination_of(target) for target in targets]
        refused = await self._refused_targets(dict(zip(places, targets, strict=True)))
        answers: list[tuple[Timer, bool] | DuetimeError] = []
        now = self.clock.now()
        for new, place in zip(news, places, strict=True):
            if place in refused:
                answers.append(refused[place])
                continue
            try:
                namespace = self._namespaces.get(new.namespace) or await self._namespace_for(new.namespace)
                answers.append((self._timer(new, namespace, now), True))
            except DuetimeError as error:
                answers.append(error)
        timers = [answer[0] for answer in answers if isinstance(answer, tuple)]
        taken = iter(await self._store.put_many(timers))
        for n, answer in enumerate(answers):
            if isinstance(answer, tuple) and (there := next(taken)) is not None:
                try:
                    answers[n] = await self._first(answer[0], there), False
                except (TimerConflict, TimerNotFound, Quarantined) as error:
                    answers[n] = error
        if timers:
            self._nudge(*timers)
        return answers

    async def _first(self, new: Timer, there: Timer | Taken) -> Timer:
        """The timer that an earlier, equal request made. It is as large as this one: all of a batch may be read."""
        if isinstance(there, Taken):
            _check_same(there.fingerprint, new.fingerprint)
            return await self.get(new.namespace, new.id)
        return _repeat(there, new.fingerprint)

    async def _refused_targets(self, places: Mapping[str, Target]) -> dict[str, DuetimeError]:
        """Which places are closed; each is asked about once, all at the same time. The checks begin a few at a
        time: a thousand of them at once would hold up the event loop."""
        refused: dict[str, DuetimeError] = {}

        async def check(place: str, target: Target) -> None:
            try:
                await self.check_target(target)
            except DuetimeError as error:
                refused[place] = error

        async with asyncio.TaskGroup() as checks:
            for begun, (place, target) in enumerate(places.items(), 1):
                checks.create_task(check(place, target))
                if begun % CHANGES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        return refused

    async def schedule_many(self, news: Sequence[NewTimer]) -> list[DuetimeError | None]:
        """Make the timers of these commands in one durable write. One that is pending already is moved to the new time,
        one that has been fired is left alone: a command may come more than once, and behind later ones, which its stamp
        tells (``fingerprint``). Namespaces are made as they are needed."""
        errors: list[DuetimeError | None] = [None] * len(news)
        made: list[tuple[int, Timer]] = []
        for place, new in enumerate(news):
            try:
                if new.namespace not in self._namespaces:
                    await self.create_namespace(new.namespace, shards=None, retention_ms=None)
                made.append((place, await self._made(new)))
            except TooManyNamespaces as error:
                errors[place] = error
        timers = [timer for _, timer in made]
        taken = await self._store.put_many(timers) if timers else []
        latest: dict[tuple[str, str], int] = {}  # which of the commands about a timer that is there counts
        for place, timer in enumerate(timers):
            key = timer.namespace, timer.id
            if taken[place] is not None and (
                key not in latest or lifecycle.is_later(timer.fingerprint, timers[latest[key]].fingerprint)
            ):
                latest[key] = place
        places = list(latest.values())
        for start in range(0, len(places), CHANGES_AT_ONCE):
            some = places[start : start + CHANGES_AT_ONCE]
            failures = await asyncio.gather(*(self._command(timers[place], taken[place]) for place in some))
            for place, failure in zip(some, failures, strict=True):
                errors[made[place][0]] = failure
        if timers:
            self._nudge(*timers)
        return errors

    async def _command(self, new: Timer, there: Timer | Taken | None) -> DuetimeError | None:
        """Have the command that would have made ``new`` do to the timer in its place what it still may."""

        def commanded(timer: Timer) -> Timer:
            return lifecycle.command(timer, execute_at=new.execute_at, stamp=new.fingerprint, now=self.clock.now())

        known = there if isinstance(there, Timer) else None
        if there is None or (known is not None and commanded(known) is known):
            return None
        try:
            await self._change(new.namespace, new.id, commanded, known)
        except TimerNotFound:
            pass  # It was removed meanwhile.
        except DuetimeError as error:
            return error
        return None

    async def upsert(self, new: NewTimer) -> Timer:
        """Write a timer, in the place of the one with its identity if there is one that is not executing."""
        await self.check_target(new.definition.target)
        timer = await self._made(new)
        for _ in range(CHANGE_TRIES_MAX):
            there = await self._store.put(timer)
            after = timer if there is None else lifecycle.renew(there, timer)
            if there is None or await self._store.swap(there, after):
                self.changes += 1
                self._nudge(after)
                return after
        raise StoreUnavailable("the timer keeps changing; try again")

    async def _made(self, new: NewTimer) -> Timer:
        namespace = self._namespaces.get(new.namespace) or await self._namespace_for(new.namespace)
        return self._timer(new, namespace, self.clock.now())

    def _timer(self, new: NewTimer, namespace: Namespace, now: int) -> Timer:
        id = new.id or next(self._new_ids)
        shard = shard_of(namespace.name, id, namespace_shards=namespace.shards, shards=self._store.shards)
        execute_at = fire_at = new.execute_at
        revision = firing = getrandbits(REVISION_BITS)
        return Timer(
            *(namespace.name, id, shard, new.definition, execute_at, fire_at, now, now, revision, firing),
            *(new.fingerprint, new.correlation_id),
        )

    async def check_target(self, target: Target) -> None:
        await self._deliverers[type(target)].check(target)

    async def repeated(self, namespace: str, id: str, fingerprint: str) -> Timer | None:
        """The timer that an earlier, equal request made, if there is one."""
        there = await self._store.get(namespace, id)
        return None if there is None else _repeat(there, fingerprint)

    async def get(self, namespace: str, id: str) -> Timer:
        timer = await self._store.get(namespace, id)
        if timer is None:
            raise TimerNotFound
        return timer

    async def find(self, query: Query) -> tuple[list[Timer], int]:
        """One page by number, without payloads, and the exact number of timers that the query matches."""
        timers = await self._store.find(msgspec.structs.replace(query, brief=True))
        counts = await self._store.tally(query.namespace)
        return timers, sum(counts.values()) if query.status is None else counts[query.status]

    async def page(self, filter: Filter, limit: int, after: Place | None) -> Page:
        return await self._store.page(filter, limit, after)

    async def count(self, filter: Filter) -> Counted:
        """How many timers the filter matches: exactly where the tallies tell, counted up to ``COUNT_MAX`` otherwise."""
        if filter == Filter(namespace=filter.namespace, status=filter.status):
            counts = await self._store.tally(filter.namespace)
            return Counted(sum(counts.values()) if filter.status is None else counts[filter.status])
        return _counted(await self._store.count(filter, COUNT_MAX + 1))

    async def forecast(self, bounds: Sequence[int]) -> list[Counted]:
        """How many pending timers are due from each bound up to the next one."""
        return [_counted(number) for number in await self._store.forecast(bounds, COUNT_MAX + 1)]

    def destination(self, timer: Timer) -> str:
        """What the timer shares limits and fate with when it is fired."""
        return destination_of(timer.definition.target)

    async def update(
        self,
        namespace: str,
        id: str,
        *,
        execute_at: int | None,
        change: Callable[[Definition], Definition],
        correlation_id: str | None = None,
    ) -> Timer:
        """Change a pending timer; ``change`` says what becomes of its definition."""

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
        """Cancel a pending timer; one that is canceled already stays so."""

        def canceled(timer: Timer) -> Timer:
            if timer.status is Status.CANCELED:
                return timer
            return lifecycle.cancel(timer, now=self.clock.now())

        return await self._change(namespace, id, canceled)

    async def cancel_all(self, filter: Filter, limit: int) -> Counted:
        """Cancel up to ``limit`` of the pending timers that the filter matches; how many, and whether there is more."""
        pending = msgspec.structs.replace(filter, status=Status.PENDING)
        return await self._change_all(pending, limit, lambda timer: lifecycle.cancel(timer, now=self.clock.now()))

    async def delete(self, namespace: str, id: str) -> None:
        """Remove a timer that is not executing, with its history."""
        for _ in range(CHANGE_TRIES_MAX):
            timer = await self.get(namespace, id)
            if timer.status is Status.EXECUTING:
                raise TimerNotPending("delete", timer.status)
            if await self._store.swap(timer, None):
                return
        raise StoreUnavailable("the timer keeps changing; try again")

    async def replay(self, namespace: str, id: str) -> Timer:
        """Fire a finished timer once more, now."""
        return await self._change(namespace, id, lambda timer: lifecycle.replay(timer, now=self.clock.now()))

    async def replay_all(self, filter: Filter, limit: int) -> Counted:
        """Replay up to ``limit`` of the final timers that the filter matches; how many, and whether there is more."""
        return await self._change_all(filter, limit, lambda timer: lifecycle.replay(timer, now=self.clock.now()))

    async def _change_all(self, filter: Filter, limit: int, change: Callable[[Timer], Timer]) -> Counted:
        changed = seen = 0
        after: Place | None = None
        while True:
            page = await self._store.page(filter, limit - seen, after)
            for start in range(0, len(page.timers), CHANGES_AT_ONCE):
                some = page.timers[start : start + CHANGES_AT_ONCE]
                done = await asyncio.gather(*(self._changed_first(timer, change) for timer in some))
                changed += sum(done)
            seen += len(page.timers)
            after = page.next
            if after is None or seen >= limit:
                return Counted(changed, after is not None)

    async def _changed_first(self, timer: Timer, change: Callable[[Timer], Timer]) -> bool:
        """Change a timer; False when somebody else has changed it so that it can't be any more."""
        try:
            await self._change(timer.namespace, timer.id, change, timer)
            return True
        except (TimerNotPending, TimerNotFinal, TimerNotFound):
            return False

    async def _change(
        self, namespace: str, id: str, change: Callable[[Timer], Timer], known: Timer | None = None
    ) -> Timer:
        """Replace a timer by what ``change`` makes of it; ``known`` is how it was a moment ago."""
        for _ in range(CHANGE_TRIES_MAX):
            before, known = known or await self.get(namespace, id), None
            after = change(before)
            if after is before or await self._store.swap(before, after):
                self.changes += 1
                if after.status is Status.PENDING:
                    self._nudge(after)
                return after
        raise StoreUnavailable("the timer keeps changing; try again")

    # Namespaces.

    def namespaces(self) -> list[Namespace]:
        return sorted(self._namespaces.values(), key=lambda namespace: namespace.name)

    async def namespace(self, name: str) -> Namespace:
        known = self._namespaces.get(name)
        return await self._read_namespace(name) if known is None else known

    async def _read_namespace(self, name: str) -> Namespace:
        """The namespace as it is now: another instance may have made or changed it."""
        there = await self._store.namespace(name)
        if there is None:
            raise UnknownNamespace(name)
        self._learn(there)
        return there

    async def _namespace_for(self, name: str) -> Namespace:
        if name not in self._namespaces and self._auto_namespaces:
            return (await self.create_namespace(name, shards=None, retention_ms=None))[0]
        return await self.namespace(name)

    async def create_namespace(
        self, name: str, *, shards: int | None, retention_ms: int | None, weight: int | None = None
    ) -> tuple[Namespace, bool]:
        """Make a namespace and return it with True; one with the same settings is returned with False."""
        new = Namespace(
            name=name,
            shards=shards or self._store.shards,
            created_at=self.clock.now(),
            retention_ms=retention_ms,
            weight=1 if weight is None else weight,
        )
        there = await self._store.put_namespace(new, self._namespaces_max)
        self._learn(there or new)
        if there is None:
            self._store.hint(Hint(namespaces=True))
            return new, True
        if (
            shards not in (None, there.shards)
            or retention_ms not in (None, there.retention_ms)
            or weight not in (None, there.weight)
        ):
            raise NamespaceConflict(f"namespace '{name}' exists with other settings")
        return there, False

    async def change_namespace(self, name: str, change: Callable[[Namespace], Namespace]) -> Namespace:
        """Replace a namespace by what ``change`` makes of it."""
        for _ in range(CHANGE_TRIES_MAX):
            before = await self._read_namespace(name)
            after = msgspec.structs.replace(change(before), revision=before.revision + 1)
            if await self._store.swap_namespace(before, after):
                self._learn(after)
                self._store.hint(Hint(namespaces=True))
                self._nudge()
                return after
        raise StoreUnavailable(f"namespace '{name}' keeps changing; try again")

    def weight(self, namespace: str) -> int:
        """The share of a namespace beside the others."""
        known = self._namespaces.get(namespace)
        return 1 if known is None else known.weight

    def signing_keys(self, namespace: str) -> list[bytes] | None:
        """The keys that sign the namespace's callbacks now, newest first; none for one that has no secret. None while
        this instance does not know the namespace; it is read at once."""
        known = self._namespaces.get(namespace)
        if known is None:
            self._changed.set()
            return None
        return [secret.key for secret in known.signing(self.clock.now())] if known.secrets else []

    async def add_secret(self, name: str, key: bytes) -> Secret:
        """A new signing secret. The one before it signs too, until it is deleted or its time is over."""
        now = self.clock.now()
        secret = Secret(id=str(uuid.uuid4()), key=key, created_at=now)

        await self.change_namespace(name, lambda namespace: rotation.add(namespace, secret, now))
        return secret

    async def delete_secret(self, name: str, id: str) -> None:
        await self.change_namespace(name, lambda namespace: rotation.remove(namespace, id, self.clock.now()))

    # Sessions of the web page.

    async def end_session(self, id: bytes, ends_at: int, *, forget_before: int) -> None:
        await self._store.end_session(id, ends_at, forget_before=forget_before)

    async def session_ended(self, id: bytes, ends_at: int) -> bool:
        return await self._store.session_ended(id, ends_at)

    # The store as a whole.

    async def cluster(self) -> list[Instance]:
        return await self._store.cluster()

    async def tally(self) -> dict[Status, int]:
        return await self._store.tally()

    async def quarantine(self) -> Quarantine:
        return await self._store.quarantine()

    async def ping(self) -> None:
        await self._store.ping()


def _counted(number: int) -> Counted:
    return Counted(min(number, COUNT_MAX), number > COUNT_MAX)


def _repeat(there: Timer, fingerprint: str) -> Timer:
    _check_same(there.fingerprint, fingerprint)
    return there


def _check_same(there: str, fingerprint: str) -> None:
    if there != fingerprint:
        raise TimerConflict("a timer was made with this key or id and other parameters")
