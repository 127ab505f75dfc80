"""The domain: timers, their targets and retry policies, attempts, outcomes, namespaces. Pure values: no I/O, no clock.

Instants are whole milliseconds since the Unix epoch (UTC) and end in ``_at``; their types are in ``instants``.
Durations are whole milliseconds and end in ``_ms``. Values are frozen: ``lifecycle`` creates changed copies.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from hashlib import blake2b, md5

import msgspec
from msgspec import Raw, Struct

from duetime.instants import CreatedAt, DeadlineAt, ExecuteAt, ExecutedAt, FireAt, Instant, StartedAt
from duetime.urls import origin_of

DEFAULT_NAMESPACE = "default"

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
FOREVER_MS = 1 << 53
"""A retention that never ends: longer than the time range of any store."""

ABSENT = Raw(b"")
"""Payload or metadata that the client omitted; an explicit ``null`` is ``Raw(b"null")``."""


class Status(enum.StrEnum):
    """A timer is pending, then executing, then completed or failed, or pending again for a retry. A pending timer can
    be canceled."""

    PENDING = "pending"
    EXECUTING = "executing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    final: bool

    def __init__(self, value: str) -> None:
        self.final = value not in ("pending", "executing")


class RetryPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When to retry a failed attempt. The defaults are those of the HTTP v1 API."""

    max_retries: int = 3
    max_duration_ms: int = DAY_MS
    initial_interval_ms: int = 30 * SECOND_MS
    backoff_multiplier: float = 2.0
    max_interval_ms: int = 10 * MINUTE_MS
    jitter: bool = True
    give_up_on: tuple[int, ...] = ()  # HTTP statuses that fail the timer without another attempt


SINGLE_ATTEMPT = RetryPolicy(max_retries=0)


class HttpTarget(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="http", tag_field="type"):
    url: str
    method: str = "POST"
    headers: dict[str, str] = {}


class NatsTarget(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="nats", tag_field="type"):
    subject: str
    headers: dict[str, str] = {}


Target = HttpTarget | NatsTarget


def destination_of(target: Target) -> str:
    """What a concurrency limit and a circuit breaker apply to: for HTTP the scheme, host and port."""
    return origin_of(target.url) if isinstance(target, HttpTarget) else "nats"


class BodyFormat(enum.StrEnum):
    """The format of a callback's body, by the API that created the timer."""

    PAYLOAD = "payload"  # the payload as it is (platform API)
    ENVELOPE = "envelope"  # {"id", "namespace", "executeAt", "attempt", "payload"} (HTTP v1 API)
    EVENT = "event"  # a DueTimeReached envelope (NATS API)


class ResponseProtocol(enum.StrEnum):
    """How the response to a callback is interpreted."""

    STATUS = "status"  # any 2xx completes
    ANSWER = "answer"  # 200 with {"ok": true} or an empty 2xx completes, {"ok": false, "nextExecuteAt": T} reschedules


class Definition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the client requested except the time. Stored as one JSON document, the payload byte for byte."""

    target: Target
    payload: Raw = ABSENT
    metadata: Raw = ABSENT
    retry: RetryPolicy = RetryPolicy()
    timeout_ms: int = 30 * SECOND_MS
    body: BodyFormat = BodyFormat.ENVELOPE
    protocol: ResponseProtocol = ResponseProtocol.ANSWER


class OutcomeKind(enum.StrEnum):
    """The result of an attempt: a response, no connection, a timeout, an address or subject that is not allowed, or
    nothing was sent."""

    ANSWERED = "answered"  # the target responded
    UNREACHABLE = "unreachable"  # no connection, or it broke before the response
    TIMED_OUT = "timed_out"
    REFUSED = "refused"  # the address guard blocked it, or the broker has no stream for it
    UNSENT = "unsent"  # nothing was sent: the attempt does not count


class Unsent(enum.StrEnum):
    """Why nothing was sent."""

    DESCRIPTORS = "descriptors"  # the process is out of file descriptors, ports or memory for a socket
    LOOKUPS = "lookups"  # no thread became free for the DNS lookup in time
    INTERNAL = "internal_error"  # a bug of Duetime; the log has the traceback
    BROKER = "broker"  # the broker is not connected
    NAMESPACE = "namespace"  # this instance has not read the namespace and its signing secrets yet
    DESTINATION = "destination"  # its concurrency limit is reached, or its circuit breaker is open
    LEASE = "lease"  # the shard may have another owner by now, or the attempt waited too long
    DRAIN = "drain"  # the instance is stopping


LANES_CACHED_MAX = 16_384
ATTEMPTS_KEPT_MAX = 10
ANSWER_CHARS_KEPT_MAX = 200


class Attempt(Struct, frozen=True, array_like=True):
    """The record of an attempt, stored with its timer as history."""

    number: int
    sent_at: Instant
    duration_ms: int
    outcome: OutcomeKind
    status: int | None = None  # of an HTTP response
    error: str | None = None
    answer: str = ""  # the beginning of the response body
    firing: int = 0  # the firing that it belongs to; 0 in rows of older versions


# Copying a hash object takes a third of the time of creating one.
_UUID_HASH = blake2b(digest_size=16, person=b"duetime-timer")
_DELIVERY_HASH = blake2b(digest_size=16, person=b"duetime-delivery")


class Timer(Struct, frozen=True, array_like=True):
    """A scheduled callback and its state. Stores that keep it as JSON write an array.

    Hot paths build it positionally, because keywords cost three times as much. So each instant has its own type.
    """

    namespace: str
    id: str
    shard: int
    definition: Definition
    execute_at: ExecuteAt  # the time that the client requested
    fire_at: FireAt  # when the next attempt is due
    created_at: CreatedAt
    updated_at: Instant
    revision: int  # starts at a random number; each write increments it
    firing: int  # the revision that started this firing: the root of its delivery id
    fingerprint: str = ""  # of the create request, to distinguish a repeat from a conflict; the stamp of a command
    correlation_id: str | None = None
    status: Status = Status.PENDING
    attempt: int = 0  # number of the latest attempt of this firing
    failures: int = 0  # attempts of this firing that were recorded as failed
    lost: int = 0  # latest attempts in a row whose outcome was never recorded
    last_error: str | None = None
    started_at: StartedAt | None = None  # when this firing began; after a failure, when its retry window opened
    executed_at: ExecutedAt | None = None  # when the timer completed or failed
    deadline_at: DeadlineAt | None = None  # while executing: after it, the attempt counts as lost
    version: int = 0  # while executing: the version of the shard at the begin of the attempt
    attempts: tuple[Attempt, ...] = ()  # the latest recorded attempts, oldest first

    @property
    def uuid(self) -> bytes:
        return timer_uuid(self.namespace, self.id)

    @property
    def lane(self) -> int:
        return lane_of(self.namespace, destination_of(self.definition.target))

    @property
    def delivery_id(self) -> str:
        """Stable for one firing: the same on each of its attempts and on any duplicate."""
        return self.delivery_id_of(self.firing)

    def delivery_id_of(self, firing: int) -> str:
        hashed = _DELIVERY_HASH.copy()
        hashed.update(f"{self.namespace}\0{self.id}\0{firing}".encode())
        h = hashed.hexdigest()
        return f"{h[:8]}-{h[8:12]}-5{h[13:16]}-a{h[17:20]}-{h[20:]}"  # a name-based UUID; uuid.UUID is too slow here


@lru_cache(maxsize=LANES_CACHED_MAX)
def lane_of(namespace: str, destination: str) -> int:
    """The key of the lane: a namespace's timers for one destination. It is the same in every store, and SQL can compute
    it too, for migrations of old rows."""
    return int(md5(f"{namespace} {destination}".encode(), usedforsecurity=False).hexdigest()[:15], 16)


_UUID = re.compile(r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}").fullmatch


def timer_uuid(namespace: str, id: str) -> bytes:
    """The row key of a timer, the same in every store: a hash. If the id is a UUID, its first five bytes come first.

    Generated ids begin with the time, like version 7 UUIDs. So timers that are created together are close together in
    an index; with random keys, each insert into a large index touches a page of its own (docs/decisions/0013).
    """
    hashed = _UUID_HASH.copy()
    hashed.update(f"{namespace}\0{id}".encode())
    digest = hashed.digest()
    return bytes.fromhex(id[:8] + id[9:11]) + digest[:11] if len(id) == 36 and _UUID(id) else digest


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one delivery attempt. Deliverers return it and do not raise."""

    kind: OutcomeKind
    status: int | None = None  # of an HTTP response
    body: bytes = b""  # the first bytes of the response body
    error: str | None = None  # a message for users
    retry_after_ms: int | None = None
    cause: Unsent | None = None  # of UNSENT
    final: bool = False  # a retry would have the same result


class Secret(Struct, frozen=True, kw_only=True):
    """A key that signs the callbacks of one namespace."""

    id: str
    key: bytes
    created_at: Instant
    expires_at: Instant | None = None  # set when a newer secret replaces it


class Namespace(Struct, frozen=True, kw_only=True):
    name: str
    shards: int  # the number of shards that its timers are spread over; fixed
    created_at: Instant
    retention_ms: int | None = None  # how long final timers are kept; None: as long as the settings say
    paused: bool = False
    secrets: tuple[Secret, ...] = ()
    weight: int = 1  # its share of the capacity, relative to the other namespaces
    revision: int = 0  # each change increments it

    def signing(self, now: Instant) -> list[Secret]:
        """The secrets that sign now, newest first."""
        return [s for s in self.secrets if s.expires_at is None or s.expires_at > now]


def replace(timer: Timer, **changes: object) -> Timer:
    """The timer after one more write."""
    return msgspec.structs.replace(timer, revision=timer.revision + 1, **changes)
