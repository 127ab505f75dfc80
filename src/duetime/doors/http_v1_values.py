"""Converts between the types of the HTTP v1 API (``http_v1_schema``) and those of the model."""

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
from duetime.doors import http_v1_schema as schema
from duetime.doors import wire
from duetime.doors.http import Request
from duetime.doors.retry_policy import CamelRetryPolicy, checked_policy, shown_policy
from duetime.errors import InvalidCursor, InvalidInput
from duetime.instants import Instant
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
from duetime.overdue import Reason
from duetime.service import Counted
from duetime.store import Abilities, Cursor, Filter, Instance, Order
from duetime.timetext import format_duration, format_time, parse_duration, parse_time

SECONDS_END = len("2026-01-31T09:00:00")

_encode = msgspec.json.Encoder().encode
_BLANK_TARGET = HttpTarget(url="")
_BLANK = Definition(target=_BLANK_TARGET)
_cursor_decoder = msgspec.json.Decoder(Cursor)


def key_of(fields: schema.CreateTimer | schema.UpdateTimer | schema.Selection) -> tuple[str, str | None]:
    namespace = fields.namespace or fields.group_id or DEFAULT_NAMESPACE
    if fields.namespace is not None and fields.group_id not in (None, fields.namespace):
        raise InvalidInput("groupId", "is the older name of namespace: if both are given, they must be equal")
    id = fields.id if fields.timer_id is None else fields.timer_id
    if fields.id is not None and fields.id != id:
        raise InvalidInput("timerId", "is another name of id: if both are given, they must be equal")
    if id is not None:
        wire.check_id(id, "id")
    return wire.check_namespace(namespace, "groupId" if fields.namespace is None else "namespace"), id


def selected(fields: schema.UpdateTimer | schema.Selection) -> tuple[str, str]:
    namespace, id = key_of(fields)
    if id is None:
        raise InvalidInput("timerId", "is required")
    return namespace, id


def path_of(request: Request) -> tuple[str, str]:
    namespace, id = request.parameters
    return wire.check_namespace(namespace, "namespace"), wire.check_id(id, "id")


def definition_of(fields: schema.Changes, before: Definition | None, timeout_ms_max: int) -> Definition:
    """The definition of a new timer, or the one ``before`` with these changes."""
    new = before or _BLANK
    timeout_ms = new.timeout_ms
    if fields.callback_timeout is not None:
        timeout_ms = parse_duration(fields.callback_timeout, "callbackTimeout")
        if not 1 <= timeout_ms <= timeout_ms_max:
            raise InvalidInput("callbackTimeout", f"must be from 1ms to {format_duration(timeout_ms_max)}")
    return msgspec.structs.replace(
        new,
        target=_target_of(fields, new.target),
        payload=new.payload if fields.payload is UNSET else fields.payload,
        metadata=new.metadata if fields.metadata is UNSET else fields.metadata,
        retry=new.retry if fields.retry_policy is None else _policy(new.retry, *astuple(fields.retry_policy)),
        timeout_ms=timeout_ms,
        protocol=new.protocol if fields.response_protocol is None else ResponseProtocol(fields.response_protocol),
    )


def _target_of(fields: schema.Changes, old: Target) -> Target:
    url, subject, method = fields.callback_url, fields.callback_subject, fields.callback_method
    headers = old.headers
    if fields.callback_headers is not None:
        headers = wire.check_headers(fields.callback_headers, "callbackHeaders")
    if subject is None and url is None and isinstance(old, NatsTarget):
        subject = old.subject
    if subject is not None:
        if url is not None:
            raise InvalidInput("callbackSubject", "can't be combined with callbackUrl: a timer has one target")
        if method is not None:
            raise InvalidInput("callbackMethod", "can't be combined with callbackSubject: a NATS message has no method")
        return NatsTarget(subject=wire.check_subject(subject, "callbackSubject"), headers=headers)
    before = old if isinstance(old, HttpTarget) else _BLANK_TARGET
    return HttpTarget(
        url=before.url if url is None else wire.check_url(url, "callbackUrl"),
        method=before.method if method is None else method,
        headers=headers,
    )


@lru_cache(maxsize=1_024)  # many timers have the same few policies
def _policy(default: RetryPolicy, *given: Any) -> RetryPolicy:
    return checked_policy(CamelRetryPolicy(*given), "retryPolicy", default)


def filter_in(query: dict[str, str]) -> Filter:
    return Filter(
        namespace=None if "namespace" not in query else wire.check_namespace(query["namespace"], "namespace"),
        id=None if "id" not in query else wire.check_id(query["id"], "id"),
        status=wire.choice(query, "status", Status, None),
        correlation_id=query.get("correlationId"),
        execute_after=_time_in(query, "executeAfter"),
        execute_before=_time_in(query, "executeBefore"),
    )


def _time_in(query: dict[str, str], name: str) -> Instant | None:
    text = query.get(name)
    try:
        return _time_of(text, name)
    except InvalidInput as error:
        if text is None or " " not in text[SECONDS_END:]:
            raise
        # In a query, + stands for a space, so this was probably an offset.
        raise InvalidInput(name, f"{error.reason}; in a URL, write + as %2B") from None


def filter_of(fields: schema.CancelIn, status: Status) -> Filter:
    namespace = None if fields.namespace == "*" else fields.namespace
    return Filter(
        namespace=None if namespace is None else wire.check_namespace(namespace, "namespace"),
        id=None if fields.id is None else wire.check_id(fields.id, "id"),
        status=status,
        correlation_id=fields.correlation_id,
        execute_after=_time_of(fields.execute_after, "executeAfter"),
        execute_before=_time_of(fields.execute_before, "executeBefore"),
    )


def _time_of(text: str | None, field: str) -> Instant | None:
    return None if text is None else parse_time(text, field)


def decode_cursor(cursor: str | None, filter: Filter) -> Cursor | None:
    if cursor is None:
        return None
    try:
        position = _cursor_decoder.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if position.order is filter.order and abs(position.value) < 1 << 62:
            return position
    except (msgspec.MsgspecError, binascii.Error, ValueError, RecursionError):
        pass
    raise InvalidCursor


def retention_of(text: str) -> int:
    if text == "forever":
        return FOREVER_MS
    try:
        ms = parse_duration(text, "retention")
    except InvalidInput:
        ms = 0
    if ms < SECOND_MS:
        raise InvalidInput("retention", "must be a duration of at least 1s, like 12h or 30d, or forever")
    return ms


# From the model to responses.


def shown_timer(timer: Timer) -> schema.Timer:
    definition = timer.definition
    target = definition.target
    http = target if isinstance(target, HttpTarget) else None
    return schema.Timer(  # positional: twenty keywords would double the cost
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


def shown_namespace(namespace: Namespace, now: Instant) -> schema.Namespace:
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
    return schema.Count(counted.timers, counted.more, counted.estimated)


def shown_abilities(abilities: Abilities) -> schema.Abilities:
    return schema.Abilities(
        orders=[order for order in Order if order in abilities.orders],
        offset_max=abilities.offset_max,
        counts_exactly=abilities.counts_exactly,
        expires_history=abilities.expires_history,
        time_source=abilities.time_source,
    )


def shown_point(point: Point) -> schema.ActivityPoint:
    def rounded(ms: float | None) -> float | None:
        return None if ms is None else round(ms, 1)

    return schema.ActivityPoint(
        format_time(point.at),
        round(point.fires_per_second, 2),
        rounded(point.lateness_p50_ms),
        rounded(point.lateness_p99_ms),
    )


def unowned_of(instances: Sequence[Instance], shards: int) -> list[int]:
    """The shards that none of these instances owns."""
    owned = {shard for instance in instances for shard in instance.shards}
    return [shard for shard in range(shards) if shard not in owned]


def overdue_of(instances: Sequence[Instance]) -> dict[str, int]:
    """The overdue timers of these instances together, by reason."""
    counts = Counter[str]()
    for instance in instances:
        counts.update(instance.about.overdue)
    return {reason: counts[reason] for reason in Reason if counts[reason]}


def encode_cursor(position: Cursor | None) -> str | None:
    """The end of a page as an opaque string."""
    return None if position is None else base64.urlsafe_b64encode(_encode(position)).decode().rstrip("=")


def _time(at: Instant | None) -> str | None:
    return None if at is None else format_time(at)
