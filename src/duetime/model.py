"""The domain: what a timer is and what one delivery brought. Pure values, no I/O, no clock.

Instants are whole milliseconds since the Unix epoch (UTC) and end in ``_at``; durations are whole milliseconds and
end in ``_ms``. Values are frozen: a change is a new value, made by ``lifecycle``.
"""

from __future__ import annotations

import enum
import re
from functools import lru_cache
from hashlib import blake2b, md5

import msgspec
from msgspec import Raw, Struct

from duetime.urls import origin_of

DEFAULT_NAMESPACE = "default"

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
FOREVER_MS = 1 << 53
"""A retention that never ends: longer than any store's clock can count."""

ABSENT = Raw(b"")
"""The payload or metadata that the client did not give; an explicit ``null`` is ``Raw(b"null")``."""


class Status(enum.StrEnum):
    PENDING = "pending"
    EXECUTING = "executing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    final: bool

    def __init__(self, value: str) -> None:
        self.final = value not in ("pending", "executing")


class RetryPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a failed attempt is tried again. The defaults are those of the durable door."""

    max_retries: int = 3
    max_duration_ms: int = DAY_MS
    initial_interval_ms: int = 30 * SECOND_MS
    backoff_multiplier: float = 2.0
    max_interval_ms: int = 10 * MINUTE_MS
    jitter: bool = True


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
    """The key of what shares a concurrency limit and a circuit breaker: for HTTP the scheme, host and port."""
    return origin_of(target.url) if isinstance(target, HttpTarget) else "nats"


class BodyFormat(enum.StrEnum):
    """What a callback's body looks like; each door has its own."""

    PAYLOAD = "payload"  # the payload as it is (platform door)
    ENVELOPE = "envelope"  # {"id", "namespace", "executeAt", "attempt", "payload"} (durable door)
    EVENT = "event"  # a DueTimeReached envelope (broker door)


class ResponseProtocol(enum.StrEnum):
    """How a callback's answer is read."""

    STATUS = "status"  # any 2xx completes
    ANSWER = "answer"  # 200 with {"ok": true} completes, {"ok": false, "nextExecuteAt": T} reschedules


class Definition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the client asked for, apart from when. Stored as one JSON document, the payload byte for byte."""

    target: Target
    payload: Raw = ABSENT
    metadata: Raw = ABSENT
    retry: RetryPolicy = RetryPolicy()
    timeout_ms: int = 30 * SECOND_MS
    body: BodyFormat = BodyFormat.ENVELOPE
    protocol: ResponseProtocol = ResponseProtocol.ANSWER


class OutcomeKind(enum.StrEnum):
    ANSWERED = "answered"  # the target said something
    UNREACHABLE = "unreachable"  # no connection, or it broke before the answer
    TIMED_OUT = "timed_out"
    REFUSED = "refused"  # the address guard did not let it out, or the broker has no place for it
    UNSENT = "unsent"  # nothing left us: the attempt does not count


class Unsent(enum.StrEnum):
    """Why nothing was sent."""

    DESCRIPTORS = "descriptors"  # the process is out of file descriptors, ports or memory for a socket
    LOOKUPS = "lookups"  # no thread became free for the DNS lookup in time
    INTERNAL = "internal_error"  # a bug of ours; the log has the traceback
    BROKER = "broker"  # the broker is not connected
    NAMESPACE = "namespace"  # this instance does not know the namespace yet, nor what signs its callbacks
    DESTINATION = "destination"  # it can't take more now
    LEASE = "lease"  # the shard may have another owner by now, or it waited too long
    DRAIN = "drain"  # the instance is stopping


LANES_CACHED_MAX = 16_384
ATTEMPTS_KEPT_MAX = 10
ANSWER_CHARS_KEPT_MAX = 200


class Attempt(Struct, frozen=True, array_like=True):
    """What is kept of an attempt, with its timer, for people to look at."""

    number: int
    sent_at: int
    duration_ms: int
    outcome: OutcomeKind
    status: int | None = None  # of an HTTP answer
    error: str | None = None
    answer: str = ""  # how the answer began
    firing: int = 0  # which firing of the timer it belongs to; 0 where that was not kept


# Copying one that is set up takes a third of the time of setting one up.
_UUID_HASH = blake2b(digest_size=16, person=b"duetime-timer")
_DELIVERY_HASH = blake2b(digest_size=16, person=b"duetime-delivery")


class Timer(Struct, frozen=True, array_like=True):
    """One promise: call this target, with this payload, at this time. As JSON, which stores use, it is an array.

    Who makes many gives the fields in their order: twenty names cost three times as much as all the rest of it.
    """

    namespace: str
    id: str
    shard: int
    definition: Definition
    execute_at: int  # when the client asked for it
    fire_at: int  # when the next attempt is due
    created_at: int
    updated_at: int
    revision: int  # starts at a random number and goes up by one with every write
    firing: int  # the revision that started this firing: the root of its delivery id
    fingerprint: str = ""  # of the create request, to tell a repeat from a conflict; of a command, its stamp
    correlation_id: str | None = None
    status: Status = Status.PENDING
    attempt: int = 0  # number of the latest attempt of this firing
    failures: int = 0  # attempts of this firing that were recorded as failed
    lost: int = 0  # latest attempts in a row whose outcome was never recorded
    last_error: str | None = None
    started_at: int | None = None  # when this firing was begun; after a failure, when its retry window opened
    executed_at: int | None = None  # when the timer became completed or failed
    deadline_at: int | None = None  # when executing: until when the attempt may be under way
    version: int = 0  # when executing: the version of the shard that began the attempt
    attempts: tuple[Attempt, ...] = ()  # the latest recorded ones, oldest first

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
        return f"{h[:8]}-{h[8:12]}-5{h[13:16]}-a{h[17:20]}-{h[20:]}"  # a name-based UUID, spelled out: it is hot


@lru_cache(maxsize=LANES_CACHED_MAX)
def lane_of(namespace: str, destination: str) -> int:
    """What the timers of one namespace for one destination have in common, the same in every store: by it they are
    held back and let out. Databases must be able to compute it, too, to bring old rows up to date."""
    return int(md5(f"{namespace} {destination}".encode(), usedforsecurity=False).hexdigest()[:15], 16)


_UUID = re.compile(r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}").fullmatch


def timer_uuid(namespace: str, id: str) -> bytes:
    """The row key of a timer, the same in every store: a hash, behind the beginning of an id that is a UUID.

    Ours begin with the time, as those of version 7 do. So timers that are made together lie together in an index, where
    a random key costs a page for each timer once there are many (docs/decisions/0013).
    """
    hashed = _UUID_HASH.copy()
    hashed.update(f"{namespace}\0{id}".encode())
    digest = hashed.digest()
    return bytes.fromhex(id[:8] + id[9:11]) + digest[:11] if len(id) == 36 and _UUID(id) else digest


class Outcome(Struct, frozen=True, kw_only=True):
    """What one delivery attempt brought. Deliverers return it and do not raise."""

    kind: OutcomeKind
    status: int | None = None  # of an HTTP answer
    body: bytes = b""  # the first bytes of the answer
    error: str | None = None  # for people
    retry_after_ms: int | None = None
    cause: Unsent | None = None  # of UNSENT
    final: bool = False  # another attempt would end the same way


class Secret(Struct, frozen=True, kw_only=True):
    """A key that signs the callbacks of one namespace."""

    id: str
    key: bytes
    created_at: int
    expires_at: int | None = None  # set when a newer one replaced it


class Namespace(Struct, frozen=True, kw_only=True):
    name: str
    shards: int  # how many of the cluster's shards its timers are spread over; fixed
    created_at: int
    retention_ms: int | None = None  # how long final timers are kept; None: what the settings say
    paused: bool = False
    secrets: tuple[Secret, ...] = ()
    weight: int = 1  # its share of what namespaces compete for, beside the others
    revision: int = 0  # goes up by one with every change

    def signing(self, now: int) -> list[Secret]:
        """The secrets that sign now, newest first."""
        return [s for s in self.secrets if s.expires_at is None or s.expires_at > now]


def replace(timer: Timer, **changes: object) -> Timer:
    """The timer after one more write."""
    return msgspec.structs.replace(timer, revision=timer.revision + 1, **changes)
