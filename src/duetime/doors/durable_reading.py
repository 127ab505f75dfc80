"""From the bodies of the durable door's requests to values: new timers, changes, filters. Large ones off the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from duetime.doors import durable_schema as schema
from duetime.doors import wire
from duetime.doors.durable_values import definition_of, key_of
from duetime.doors.http import Request
from duetime.doors.off_loop import RUN_BYTES_MAX, in_thread, off_loop, runs
from duetime.doors.parts import parts_of
from duetime.errors import InvalidInput, PayloadTooLarge
from duetime.identity import fingerprint_of
from duetime.model import Definition
from duetime.service import NewTimer, Service
from duetime.timetext import parse_duration, parse_time

T = TypeVar("T")


class _Batch(msgspec.Struct):
    """A batch in which every timer is as it should be."""

    timers: Annotated[list[schema.CreateTimer], msgspec.Meta(min_length=1, max_length=schema.BATCH_MAX)]


_batch_decoder = msgspec.json.Decoder(_Batch)
_parts_decoder = msgspec.json.Decoder(schema.BatchIn)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def _decode(body: bytes, kind: type[T]) -> T:
    decoder: msgspec.json.Decoder[T] | None = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return wire.decode(body, kind, decoder)


class Late(msgspec.Struct, frozen=True):
    """A create whose time is past: the repeat of an earlier one, or a mistake."""

    new: NewTimer


Asked = NewTimer | Late


class Reading:
    def __init__(self, service: Service, *, request_bytes_max: int, batch_bytes_max: int, timeout_ms_max: int) -> None:
        self._service = service
        self._request_bytes_max = request_bytes_max
        self._batch_bytes_max = batch_bytes_max
        self._timeout_ms_max = timeout_ms_max

    async def of(self, request: Request, kind: type[T]) -> T:
        body = await request.body(self._request_bytes_max)
        return await off_loop(request, body, _decode, body, kind)

    async def create(self, request: Request) -> Asked:
        body = await request.body(self._request_bytes_max)
        return await off_loop(request, body, self._create, body)

    async def batch(self, request: Request) -> Sequence[Asked | InvalidInput]:
        """Each timer of a batch, or what is wrong with it. They are read all at once, and one by one if they have too
        many bytes for that, or if something is wrong."""
        body = await request.body(self._batch_bytes_max)
        fault: InvalidInput | None = None
        if len(body) <= RUN_BYTES_MAX:
            try:
                return await off_loop(request, body, self._together, body)
            except InvalidInput as error:
                fault = error
        try:
            parts = await off_loop(request, body, self._parts, body)
        except InvalidInput as error:
            raise fault or error from None
        del body  # The parts are copies.
        found: list[Asked | InvalidInput] = []
        for run in runs(parts):
            found += await in_thread(request, self._one_by_one, run)
        return found

    def _create(self, body: bytes) -> Asked:
        return self._asked(_decode(body, schema.CreateTimer), self._service.clock.now())

    def _together(self, body: bytes) -> list[Asked | InvalidInput]:
        now = self._service.clock.now()
        found: list[Asked | InvalidInput] = []
        for timer in wire.decode(body, _Batch, _batch_decoder).timers:
            try:
                found.append(self._asked(timer, now))
            except InvalidInput as error:
                found.append(error)
        return found

    def _parts(self, body: bytes) -> list[bytes]:
        around, parts = parts_of(body, "timers", parts_max=schema.BATCH_MAX, part_bytes_max=self._request_bytes_max)
        if not parts:
            wire.decode(around, schema.BatchIn, _parts_decoder)  # It is no batch, and this tells why.
        return parts

    def _one_by_one(self, parts: Sequence[bytes]) -> list[Asked | InvalidInput]:
        return [self._alone(part) for part in parts]

    def _alone(self, part: bytes) -> Asked | InvalidInput:
        if len(part) > self._request_bytes_max:
            return PayloadTooLarge("timer", f"is larger than {self._request_bytes_max} bytes")
        try:
            return self._create(part)
        except InvalidInput as error:
            return error

    def _asked(self, timer: schema.CreateTimer, now: int) -> Asked:
        namespace, id = key_of(timer)
        if timer.callback_url is None and timer.callback_subject is None:
            raise InvalidInput("callbackUrl", "is required")
        definition = definition_of(timer, None, self._timeout_ms_max)
        execute_at, compared_at = self.time(timer)
        if execute_at is None:
            raise InvalidInput("executeAt", "is required, or a delay")
        new = NewTimer(
            namespace=namespace,
            id=id,
            execute_at=execute_at,
            definition=definition,
            correlation_id=timer.correlation_id,
            # What has no id of the client's can't be asked for again.
            fingerprint="" if id is None else fingerprint_of(definition, timer.correlation_id, compared_at),
        )
        return new if execute_at > now or timer.delay is not None else Late(new)

    def definition(self, fields: schema.Changes, before: Definition | None) -> Definition:
        """The definition that the fields make, of a new timer or out of the one before."""
        return definition_of(fields, before, self._timeout_ms_max)

    def time(self, fields: schema.Changes) -> tuple[int | None, int | None]:
        """When, and the time that a repeat is compared by: none for a delay, which means another time each time."""
        if fields.delay is not None:
            if fields.execute_at is not None:
                raise InvalidInput("delay", "can't be given together with executeAt")
            return self._service.clock.now() + parse_duration(fields.delay, "delay"), None
        at = None if fields.execute_at is None else parse_time(fields.execute_at, "executeAt")
        return at, at

    def is_ahead(self, fields: schema.Changes, execute_at: int | None) -> bool:
        # A delay is from now on, even if now is past by a moment.
        return fields.delay is not None or execute_at is None or execute_at > self._service.clock.now()
