"""Between the durable door's types and the model's: what clients write becomes values, values become what they read."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import astuple

from duetime.activity import Point
from duetime.doors import durable_schema as schema
from duetime.doors import wire
from duetime.doors.http import Request
from duetime.doors.retry_policy import CamelRetryPolicy, checked_policy, shown_policy
from duetime.engine.watchdog import Reason
from duetime.errors import InvalidInput
from duetime.model import (
    DEFAULT_NAMESPACE,
    FOREVER_MS,
    SECOND_MS,
    Attempt,
    Definition,
    HttpTarget,
    Namespace,
    NatsTarget,
    ResponseProtocol,
    RetryPolicy,
    Status,
    Target,
    Timer,
)
from duetime.service import Counted
from duetime.store import Filter, Instance, Place
from duetime.timetext import format_duration, format_time, parse_duration, parse_time

_encode = msgspec.json.Encoder().encode
_BLANK_TARGET = HttpTarget(url="")
_BLANK = Definition(target=_BLANK_TARGET)
_place_decoder = msgspec.json.Decoder(Place)


def key_of(asked: schema.CreateTimer | schema.UpdateTimer | schema.Selection) -> tuple[str, str | None]:
    namespace = asked.namespace or asked.group_id or DEFAULT_NAMESPACE
    if asked.namespace is not None and asked.group_id not in (None, asked.namespace):
        raise InvalidInput("groupId", "is the older name of namespace and must not differ from it")
    id = asked.id if asked.timer_id is None else asked.timer_id
    if asked.id is not None and asked.id != id:
        raise InvalidInput("timerId", "is another name of id and must not differ from it")
    if id is not None:
        wire.check_id(id, "id")
    return wire.check_namespace(namespace, "namespace"), id


def selected(asked: schema.UpdateTimer | schema.Selection) -> tuple[str, str]:
    namespace, id = key_of(asked)
    if id is None:
        raise InvalidInput("timerId", "is required")
    return namespace, id


def path_of(request: Request) -> tuple[str, str]:
    namespace, id = request.parameters
    return wire.check_namespace(namespace, "namespace"), wire.check_id(id, "id")


def definition_of(asked: schema.Changes, before: Definition | None, timeout_ms_max: int) -> Definition:
    """The definition that the fields make, of a new timer or out of the one before."""
    new = before or _BLANK
    timeout_ms = new.timeout_ms
    if asked.callback_timeout is not None:
        timeout_ms = parse_duration(asked.callback_timeout, "callbackTimeout")
        if not 1 <= timeout_ms <= timeout_ms_max:
            raise InvalidInput("callbackTimeout", f"must be from 1ms to {format_duration(timeout_ms_max)}")
    return msgspec.structs.replace(
        new,
        target=_target_of(asked, new.target),
        payload=new.payload if asked.payload is UNSET else asked.payload,
        metadata=new.metadata if asked.metadata is UNSET else asked.metadata,
        retry=new.retry if asked.retry_policy is None else _policy(new.retry, *astuple(asked.retry_policy)),
        timeout_ms=timeout_ms,
        protocol=new.protocol if asked.response_protocol is None else ResponseProtocol(asked.response_protocol),
    )


def _target_of(asked: schema.Changes, old: Target) -> Target:
    url, subject, method = asked.callback_url, asked.callback_subject, asked.callback_method
    headers = old.headers
    if asked.callback_headers is not None:
        headers = wire.check_headers(asked.callback_headers, "callbackHeaders")
    if subject is None and url is None and isinstance(old, NatsTarget):
        subject = old.subject
    if subject is not None:
        if url is not None:
            raise InvalidInput("callbackSubject", "must not come with callbackUrl: a timer goes one way")
        if method is not None:
            raise InvalidInput("callbackMethod", "is for callbackUrl: a NATS message has none")
        return NatsTarget(subject=wire.check_subject(subject, "callbackSubject"), headers=headers)
    before = old if isinstance(old, HttpTarget) else _BLANK_TARGET
    return HttpTarget(
        url=before.url if url is None else wire.check_url(url, "callbackUrl"),
        method=before.method if method is None else method,
        headers=headers,
    )


@lru_cache(maxsize=1_024)  # a service has few policies, and many timers ask for the same
def _policy(default: RetryPolicy, *given: Any) -> RetryPolicy:
    return checked_policy(CamelRetryPolicy(*given), "retryPolicy", default)


def filter_in(query: dict[str, str]) -> Filter:
    return Filter(
        namespace=None if "namespace" not in query else wire.check_namespace(query["namespace"], "namespace"),
        id=None if "id" not in query else wire.check_id(query["id"], "id"),
        status=wire.choice(query, "status", Status, None),
        correlation_id=query.get("correlationId"),
        execute_after=_time_of(query.get("executeAfter"), "executeAfter"),
        execute_before=_time_of(query.get("executeBefore"), "executeBefore"),
    )


def filter_of(asked: schema.CancelIn, status: Status) -> Filter:
    return Filter(
        namespace=None if asked.namespace is None else wire.check_namespace(asked.namespace, "namespace"),
        id=None if asked.id is None else wire.check_id(asked.id, "id"),
        status=status,
        correlation_id=asked.correlation_id,
        execute_after=_time_of(asked.execute_after, "executeAfter"),
        execute_before=_time_of(asked.execute_before, "executeBefore"),
    )


def _time_of(text: str | None, field: str) -> int | None:
    return None if text is None else parse_time(text, field)


def place_of(cursor: str | None, filter: Filter) -> Place | None:
    if cursor is None:
        return None
    try:
        place = _place_decoder.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if place.order is filter.order and abs(place.value) < 1 << 62 and abs(place.mark) < 1 << 62:
            return place
    except (msgspec.MsgspecError, binascii.Error, ValueError, RecursionError):
        pass
    raise InvalidInput("cursor", "must be the nextCursor of a page with the same filters")


def retention_of(text: str) -> int:
    if text == "forever":
        return FOREVER_MS
    ms = parse_duration(text, "retention")
    if ms < SECOND_MS:
        raise InvalidInput("retention", "must be at least 1s, or forever")
    return ms


# From what the service gives to what clients read.


def shown_timer(timer: Timer) -> schema.Timer:
    definition = timer.definition
    target = definition.target
    http = target if isinstance(target, HttpTarget) else None
    return schema.Timer(  # in the order of its fields: twenty names cost as much as all the rest of it
        timer.id,
        timer.namespace,
        format_time(timer.execute_at),
        format_time(timer.fire_at),
        http.url if http else None,
        target.subject if isinstance(target, NatsTarget) else None,
        http.method if http else None,
        target.headers,
        definition.payload or None,
        definition.metadata or None,
        timer.correlation_id,
        shown_policy(definition.retry),
        format_duration(definition.timeout_ms),
        definition.protocol,
        timer.status,
        timer.attempt,
        timer.last_error,
        format_time(timer.created_at),
        format_time(timer.updated_at),
        _time(timer.executed_at),
    )


def shown_namespace(namespace: Namespace, now: int) -> schema.Namespace:
    kept_ms = namespace.retention_ms
    return schema.Namespace(
        name=namespace.name,
        shards=namespace.shards,
        retention=None if kept_ms is None else "forever" if kept_ms >= FOREVER_MS else format_duration(kept_ms),
        weight=namespace.weight,
        paused=namespace.paused,
        created_at=format_time(namespace.created_at),
        secrets=[
            schema.SecretInfo(s.id, format_time(s.created_at), _time(s.expires_at)) for s in namespace.signing(now)
        ],
    )


def shown_instance(instance: Instance) -> schema.Instance:
    about, offset_ms = instance.about, instance.about.clock_offset_ms
    return schema.Instance(
        id=instance.owner_id.hex(),
        name=about.name,
        version=about.version,
        started_at=format_time(about.started_at),
        alive_until=format_time(instance.alive_until),
        serving=about.serving,
        clock_offset=f"{'-' if offset_ms < 0 else ''}{format_duration(abs(offset_ms))}",
        shards=list(instance.shards),
    )


def shown_attempt(timer: Timer, attempt: Attempt) -> schema.Attempt:
    return schema.Attempt(
        attempt.number,
        format_time(attempt.sent_at),
        format_duration(attempt.duration_ms),
        attempt.outcome,
        attempt.status,
        attempt.error,
        attempt.answer,
        timer.delivery_id_of(attempt.firing) if attempt.firing else None,
    )


def shown_count(counted: Counted) -> schema.Count:
    return schema.Count(counted.timers, counted.more)


def shown_point(point: Point) -> schema.Point:
    def rounded(ms: float | None) -> float | None:
        return None if ms is None else round(ms, 1)

    return schema.Point(
        format_time(point.at),
        round(point.fires_per_second, 2),
        rounded(point.lateness_p50_ms),
        rounded(point.lateness_p99_ms),
    )


def unowned_of(instances: Sequence[Instance], shards: int) -> list[int]:
    """The shards that none of these owns."""
    owned = {shard for instance in instances for shard in instance.shards}
    return [shard for shard in range(shards) if shard not in owned]


def overdue_of(instances: Sequence[Instance]) -> dict[Reason, int]:
    """How many timers are overdue at all of these, by reason."""
    counts = Counter[str]()
    for instance in instances:
        counts.update(instance.about.overdue)
    return {reason: counts[reason] for reason in Reason if counts[reason]}


def cursor_of(place: Place | None) -> str | None:
    """The place where a page ended, as text that nobody needs to understand."""
    return None if place is None else base64.urlsafe_b64encode(_encode(place)).decode().rstrip("=")


def _time(at: int | None) -> str | None:
    return None if at is None else format_time(at)
