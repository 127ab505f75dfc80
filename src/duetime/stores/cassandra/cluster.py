"""Leases of shards and the live instances, in one partition; every write to it is conditional on what was read.

A claim has two steps. It takes the lease here, with a version one higher, and then writes the fence into the shard's
own partition; only then is the shard held. If a process stops between the two, the former owner's fence stays until the
next claim, and nobody has written with the new version. ``renew`` repeats the second step where it is missing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from duetime.errors import StoreError, StoreUnavailable
from duetime.instants import Instant
from duetime.store import About, Instance, Renewal
from duetime.stores.cassandra.driver import Call, Session
from duetime.stores.cassandra.partition import Partition
from duetime.stores.cassandra.schema import shard_key
from duetime.stores.datagram_hints import DatagramHints
from duetime.stores.unreadable import about_of

TRIES_MAX = 8
AGAIN_SECONDS = 0.05
_SHARD, _INSTANCE = 0, 1

_READ = (
    "SELECT kind, key, owner, version, lease_until, about, serving, alive_until, address FROM cluster WHERE part = 0"
)
_WHERE = "WHERE part = 0 AND kind = {} AND key = ?"
_LEASE = f"UPDATE cluster SET lease_until = ? {_WHERE.format(_SHARD)} IF owner = ? AND version = ?"
_CLAIM = (
    f"UPDATE cluster SET owner = ?, version = ?, lease_until = ? {_WHERE.format(_SHARD)} "
    "IF version = ? AND owner = ? AND lease_until = ?"
)
_FREE = f"UPDATE cluster SET owner = ?, lease_until = 0 {_WHERE.format(_SHARD)} IF owner = ? AND version = ?"
_LIVE = (
    f"UPDATE cluster SET about = ?, serving = ?, alive_until = ?, address = ? {_WHERE.format(_INSTANCE)} "
    "IF alive_until = ?"
)
_GONE = f"DELETE FROM cluster {_WHERE.format(_INSTANCE)} IF alive_until = ?"

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class _Lease(NamedTuple):
    owner: bytes | None
    version: int
    until: int


class _Member(NamedTuple):
    about: bytes
    serving: bool
    alive_until: int
    address: str | None


class _Conflict(Exception):
    """Another instance has changed what a write was based on."""


class Cluster:
    def __init__(
        self,
        session: Session,
        partitions: Sequence[Partition],
        hints: DatagramHints,
        now: Callable[[], Awaitable[Instant]],
    ) -> None:
        self._session = session
        self._partitions = partitions
        self._hints = hints
        self._now = now
        self._lock = asyncio.Lock()
        self._fences: dict[int, tuple[bytes, int]] = {}
        """The fences that this process has written or seen."""

    async def _read(self) -> tuple[dict[int, _Lease], dict[bytes, _Member]]:
        leases, members = {}, {}
        for kind, key, owner, version, until, about, serving, alive_until, address in await self._session.read(_READ):
            if kind == _SHARD:
                leases[int.from_bytes(key, "big")] = _Lease(owner, version, until)
            elif alive_until is not None:
                members[key] = _Member(about, serving, alive_until, address)
        return leases, members

    async def _write(self, calls: Sequence[Call]) -> None:
        if calls and not await self._session.apply(calls):
            raise _Conflict

    async def renew(self, owner_id: bytes, lease_ms: int, about: About) -> Renewal:
        renewal, members = await self._tried(lambda: self._renew(owner_id, lease_ms, about))
        self._hints.set_peers(members)
        held = await self._fenced(owner_id, renewal.held)
        return msgspec.structs.replace(renewal, held=held)

    async def _renew(self, owner_id: bytes, lease_ms: int, about: About) -> tuple[Renewal, list[str | None]]:
        now = await self._now()
        leases, members = await self._read()
        held = {shard: lease.version for shard, lease in leases.items() if lease.owner == owner_id}
        calls = [Call(_LEASE, (now + lease_ms, shard_key(shard), owner_id, version)) for shard, version in held.items()]
        before = members.get(owner_id)
        row = _Member(_encode(about), about.serving, now + lease_ms, self._hints.address)
        calls.append(Call(_LIVE, (*row, owner_id, before and before.alive_until)))
        live = {owner_id: row}
        for id, member in members.items():
            if id != owner_id and member.alive_until <= now:
                calls.append(Call(_GONE, (id, member.alive_until)))
            elif id != owner_id:
                live[id] = member
        await self._write(calls)
        untils = {shard: now + lease_ms if shard in held else lease.until for shard, lease in leases.items()}
        others = [until for shard, until in untils.items() if until > now and shard not in held]
        renewal = Renewal(
            now=now,
            held=held,
            instances=frozenset(id for id, member in live.items() if member.serving),
            free=frozenset(shard for shard, until in untils.items() if until <= now),
            free_at=None if not others else Instant(min(others)),
        )
        return renewal, [member.address for member in live.values()]

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        claimed = await self._tried(lambda: self._claim(owner_id, shards, lease_ms))
        return await self._fenced(owner_id, claimed)

    async def _claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        now = await self._now()
        leases, _ = await self._read()
        calls, claimed = [], {}
        for shard in shards:
            lease = leases[shard]
            if lease.until <= now or lease.owner == owner_id:
                claimed[shard] = lease.version + 1
                after = owner_id, lease.version + 1, now + lease_ms
                calls.append(Call(_CLAIM, (*after, shard_key(shard), lease.version, lease.owner, lease.until)))
        await self._write(calls)
        return claimed

    async def _fenced(self, owner_id: bytes, versions: Mapping[int, int]) -> dict[int, int]:
        """Write the fence of each of these shards where it is missing. Return those that have it."""

        async def fence(shard: int, version: int) -> bool:
            if self._fences.get(shard) != (owner_id, version):
                if not await self._partitions[shard].claim(owner_id, version):
                    return False
                self._fences[shard] = owner_id, version
            return True

        done = await asyncio.gather(*(fence(*each) for each in versions.items()), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException) and not isinstance(result, StoreError):
                raise result
        return {
            shard: version for (shard, version), result in zip(versions.items(), done, strict=True) if result is True
        }

    async def release(self, owner_id: bytes, shards: Collection[int] | None) -> None:
        """Release these shards, or all of this owner and the owner itself."""
        leases, _ = await self._read()
        ours = [shard for shard in (leases if shards is None else shards) if leases[shard].owner == owner_id]
        for shard in ours:
            self._fences.pop(shard, None)
        await asyncio.gather(*(self._partitions[shard].release(owner_id) for shard in ours))
        await self._tried(lambda: self._release(owner_id, ours, leave=shards is None))

    async def _release(self, owner_id: bytes, shards: Collection[int], *, leave: bool) -> None:
        leases, members = await self._read()
        calls = [
            Call(_FREE, (None, shard_key(shard), owner_id, leases[shard].version))
            for shard in shards
            if leases[shard].owner == owner_id
        ]
        if leave and owner_id in members:
            calls.append(Call(_GONE, (owner_id, members[owner_id].alive_until)))
        await self._write(calls)

    async def instances(self) -> list[Instance]:
        now = await self._now()
        leases, members = await self._read()
        return [
            Instance(
                owner_id=id,
                about=about_of(member.about),
                alive_until=Instant(member.alive_until),
                shards=tuple(sorted(shard for shard, lease in leases.items() if lease.owner == id)),
            )
            for id, member in sorted(members.items())
            if member.alive_until > now
        ]

    async def _tried(self, change: Callable[[], Awaitable[T]]) -> T:
        """Read and write, again if another instance has written in between."""
        for tries in range(TRIES_MAX):
            async with self._lock:
                try:
                    return await change()
                except _Conflict:
                    pass
            await asyncio.sleep(random.uniform(0, AGAIN_SECONDS * (tries + 1)))
        raise StoreUnavailable("other instances keep changing the leases; try again")
