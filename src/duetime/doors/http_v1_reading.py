"""Decodes and validates request bodies of the HTTP v1 API: new timers, batches, changes. Large ones in threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from duetime.doors import http_v1_schema as schema
from duetime.doors import wire
from duetime.doors.decode_threads import RUN_BYTES_MAX, in_thread, off_loop, runs
from duetime.doors.http import Request
from duetime.doors.http_v1_values import definition_of, key_of
from duetime.doors.json_parts import parts_of
from duetime.errors import InvalidInput, PayloadTooLarge
from duetime.identity import fingerprint_of
from duetime.instants import Instant
from duetime.model import Definition
from duetime.service import NewTimer, Service
from duetime.timetext import parse_duration, parse_time

T = TypeVar("T")


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    """A batch in which every timer has the right types."""

    timers: Annotated[list[schema.CreateTimer], msgspec.Meta(min_length=1, max_length=schema.BATCH_MAX)]


class _WithoutTimers(msgspec.Struct, forbid_unknown_fields=True):
    """A batch whose timers are not decoded."""

    timers: list[msgspec.Raw]


_batch_decoder = msgspec.json.Decoder(_Batch)
_parts_decoder = msgspec.json.Decoder(schema.BatchIn)
_without_timers_decoder = msgspec.json.Decoder(_WithoutTimers)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def _decode(body: bytes, kind: type[T]) -> T:
    decoder: msgspec.json.Decoder[T] | None = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return wire.decode(body, kind, decoder)


class PastDue(msgspec.Struct, frozen=True):
    """A create request whose time has passed: a repeat of an earlier one, or a mistake."""

    new: NewTimer


CreateRequest = NewTimer | PastDue


class RequestReader:
    def __init__(self, service: Service, *, request_bytes_max: int, batch_bytes_max: int, timeout_ms_max: int) -> None:
        self._service = service
        self._request_bytes_max = request_bytes_max
        self._batch_bytes_max = batch_bytes_max
        self._timeout_ms_max = timeout_ms_max

    async def decode(self, request: Request, kind: type[T]) -> T:
        body = await request.body(self._request_bytes_max)
        return await off_loop(request, body, _decode, body, kind)

    async def create(self, request: Request) -> CreateRequest:
        body = await request.body(self._request_bytes_max)
        return await off_loop(request, body, self._create, body)

    async def batch(self, request: Request) -> Sequence[CreateRequest | InvalidInput]:
        """Each timer of a batch, or its error. They are decoded all at once; or one by one, if the batch is too large
        or that fails."""
        body = await request.body(self._batch_bytes_max)
        fault: InvalidInput | None = None
        if len(body) <= RUN_BYTES_MAX:
            try:
                return await off_loop(request, body, self._all_at_once, body)
            except InvalidInput as error:
                fault = error
        try:
            parts = await off_loop(request, body, self._parts, body)
        except InvalidInput as error:
            raise fault or error from None
        del body  # The parts are copies.
        found: list[CreateRequest | InvalidInput] = []
        for run in runs(parts):
            found += await in_thread(request, self._one_by_one, run)
        return found

    def _create(self, body: bytes) -> CreateRequest:
        return self._validated(_decode(body, schema.CreateTimer), self._service.clock.now())

    def _all_at_once(self, body: bytes) -> list[CreateRequest | InvalidInput]:
        now = self._service.clock.now()
        found: list[CreateRequest | InvalidInput] = []
        for timer in wire.decode(body, _Batch, _batch_decoder).timers:
            try:
                found.append(self._validated(timer, now))
            except InvalidInput as error:
                found.append(error)
        return found

    def _parts(self, body: bytes) -> list[bytes]:
        around, parts = parts_of(body, "timers", parts_max=schema.BATCH_MAX, part_bytes_max=self._request_bytes_max)
        if parts:
            wire.decode(around, _WithoutTimers, _without_timers_decoder)
        else:
            wire.decode(around, schema.BatchIn, _parts_decoder)  # It is not a valid batch: raises the reason.
        return parts

    def _one_by_one(self, parts: Sequence[bytes]) -> list[CreateRequest | InvalidInput]:
        return [self._one(part) for part in parts]

    def _one(self, part: bytes) -> CreateRequest | InvalidInput:
        if len(part) > self._request_bytes_max:
            return PayloadTooLarge("timer", f"is larger than {self._request_bytes_max} bytes")
        try:
            return self._create(part)
        except InvalidInput as error:
            return error

    def _validated(self, timer: schema.CreateTimer, now: Instant) -> CreateRequest:
        namespace, id = key_of(timer)
        if timer.callback_url is None and timer.callback_subject is None:
            raise InvalidInput("callbackUrl", "is required unless callbackSubject is given")
        definition = definition_of(timer, None, self._timeout_ms_max)
        execute_at, delay_ms = self.time(timer)
        if execute_at is None:
            raise InvalidInput("executeAt", "is required unless delay is given")
        compared_at = execute_at if delay_ms is None else None
        new = NewTimer(
            namespace=namespace,
            id=id,
            execute_at=execute_at,
            definition=definition,
            correlation_id=timer.correlation_id,
            # Without an id of the client, a request can't be repeated.
            fingerprint=(
                "" if id is None else fingerprint_of(definition, timer.correlation_id, compared_at, delay_ms=delay_ms)
            ),
        )
        return new if execute_at > now or delay_ms is not None else PastDue(new)

    def definition(self, fields: schema.Changes, before: Definition | None) -> Definition:
        """The definition of a new timer, or the one ``before`` with these changes."""
        return definition_of(fields, before, self._timeout_ms_max)

    def time(self, fields: schema.Changes) -> tuple[Instant | None, int | None]:
        """The requested time, and the delay if one was given in its place."""
        if fields.delay is not None:
            if fields.execute_at is not None:
                raise InvalidInput("delay", "can't be combined with executeAt")
            delay_ms = parse_duration(fields.delay, "delay")
            return self._service.clock.now() + delay_ms, delay_ms
        return None if fields.execute_at is None else parse_time(fields.execute_at, "executeAt"), None

    def is_in_future(self, fields: schema.Changes, execute_at: Instant | None) -> bool:
        # A delay counts from now, even if a moment has passed since.
        return fields.delay is not None or execute_at is None or execute_at > self._service.clock.now()
