"""The NATS API: takes ScheduleTimer commands, and creates timers that publish DueTimeReached events.

A command is acked only after its timer is durable; if the instance dies before that, the broker redelivers the command.
An invalid command is copied to the dead letters with the reason. Valid commands never wait for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from duetime.broker import Broker, BrokerAway, BrokerError, BrokerTimeout, Command
from duetime.doors import wire
from duetime.errors import DuetimeError, InvalidInput, StoreError
from duetime.lifecycle import stamp_of
from duetime.model import DAY_MS, SECOND_MS, BodyFormat, Definition, NatsTarget, ResponseProtocol, RetryPolicy
from duetime.service import NewTimer, Service
from duetime.telemetry import Telemetry
from duetime.timetext import parse_time

log = logging.getLogger(__name__)

RETRY_MS = 1_000
DEAD_LETTER_SECONDS = 5.0
DEAD_LETTERS_AT_ONCE = 32
DEAD_LETTERS_WAITING_MAX = 1_000
"""The most invalid commands that wait to be copied; the broker redelivers the others later."""
CUT_BYTES_MIN = 4_096
"""If the broker rejects a dead letter of at least this size, it may be too large: publish half of it."""
UNTIL_TAKEN = RetryPolicy(
    max_retries=1_000_000, max_duration_ms=3650 * DAY_MS, initial_interval_ms=SECOND_MS, max_interval_ms=30 * SECOND_MS
)
"""Publish an event until the broker acks it: there is no client to report a failure to."""


_SCHEDULE = "ScheduleTimer"


class Schedule(Struct, rename="camel"):
    tenant_id: str
    service_call_id: str
    due_at: str
    tag: str = msgspec.field(default=_SCHEDULE, name="_tag")


class Message(Struct, rename="camel"):
    """An envelope with a payload, or a bare payload."""

    type: str = _SCHEDULE
    tag: str = msgspec.field(default=_SCHEDULE, name="_tag")  # checked only in a bare payload, not in an envelope
    payload: Schedule | None = None
    tenant_id: str | None = None
    correlation_id: str | None = None
    service_call_id: str | None = None
    due_at: str | None = None


_decoder = msgspec.json.Decoder(Message)

Bad = tuple[Command, DuetimeError]
"""An invalid command, and the reason."""


class BrokerDoor:
    def __init__(
        self, service: Service, broker: Broker, telemetry: Telemetry, *, events: str, dead_letters: str, bytes_max: int
    ) -> None:
        self._service = service
        self._broker = broker
        self._telemetry = telemetry
        self._events = events
        self._dead_letters = dead_letters
        self._bytes_max = bytes_max
        self._draining = asyncio.Event()
        self._turns = asyncio.Semaphore(DEAD_LETTERS_AT_ONCE)
        self._rejecting = 0

    async def run(self) -> None:
        """Handle commands until ``drain``; then finish those received and nack the rest."""
        taking = asyncio.ensure_future(self._broker.take())
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            async with asyncio.TaskGroup() as rejections:
                while True:
                    await asyncio.wait([taking, draining], return_when=asyncio.FIRST_COMPLETED)
                    if taking.done():
                        bad = await self._schedule(taking.result())
                        rejections.create_task(self._reject_all(bad))
                        if not draining.done():
                            taking = asyncio.ensure_future(self._broker.take())
                            continue
                    break
                await self._broker.stop_taking()
        finally:
            taking.cancel()
            draining.cancel()

    def drain(self) -> None:
        self._draining.set()

    async def handle(self, commands: Sequence[Command]) -> None:
        """Create the timers of these commands, all durable before the first ack, and ack, nack or reject each."""
        await self._reject_all(await self._schedule(commands))

    async def _schedule(self, commands: Sequence[Command]) -> list[Bad]:
        """Create the timers of these commands and ack them; returns the invalid ones, which are not rejected yet."""
        bad: list[Bad] = []
        wanted: list[tuple[Command, NewTimer]] = []
        for command in commands:
            try:
                wanted.append((command, self._wanted(command)))
            except InvalidInput as error:
                bad.append((command, error))
        stored: list[Command] = []
        later: list[Command] = []
        try:
            made = await self._service.schedule_many([new for _, new in wanted])
        except StoreError as error:
            log.warning("%d commands wait for the store: %s", len(wanted), error)
            made = [error] * len(wanted)
        for (command, _), refusal in zip(wanted, made, strict=True):
            if refusal is None:
                stored.append(command)
            elif isinstance(refusal, StoreError):
                later.append(command)
            else:
                bad.append((command, refusal))
        self._telemetry.created("nats", len(stored))
        await self._broker.ack(stored)
        await self._broker.nack(later, delay_ms=RETRY_MS)
        return bad

    def _wanted(self, command: Command) -> NewTimer:
        if len(command.data) > self._bytes_max:
            raise InvalidInput("body", f"is larger than {self._bytes_max} bytes")
        message = wire.decode(command.data, Message, _decoder)
        if message.type != _SCHEDULE:
            raise InvalidInput("type", f"must be {_SCHEDULE}")
        schedule = message.payload or _bare(message)
        if schedule.tag != _SCHEDULE:
            raise InvalidInput("payload._tag" if message.payload else "_tag", f"must be {_SCHEDULE}")
        if message.tenant_id is None:
            raise InvalidInput("tenantId", "is required")
        if message.tenant_id != schedule.tenant_id:
            raise InvalidInput("tenantId", "must be the same in the envelope and in the payload")
        tenant = wire.check_namespace(schedule.tenant_id, "tenantId")
        if "." in tenant:
            raise InvalidInput("tenantId", "must not contain dots: it is one token of the subject")
        if command.subject.rpartition(".")[2] != tenant:
            raise InvalidInput("tenantId", "must be the last token of the command's subject")
        correlation_id = message.correlation_id
        if correlation_id is not None:
            wire.check_id(correlation_id, "correlationId")
        return NewTimer(
            namespace=tenant,
            id=wire.check_id(schedule.service_call_id, "serviceCallId"),
            execute_at=parse_time(schedule.due_at, "dueAt"),
            definition=Definition(
                target=NatsTarget(subject=f"{self._events}.{tenant}"),
                body=BodyFormat.EVENT,
                protocol=ResponseProtocol.STATUS,
                retry=UNTIL_TAKEN,
            ),
            correlation_id=correlation_id,
            fingerprint=stamp_of(command.number, command.taken_at_ns),
        )

    async def _reject_all(self, bad: Sequence[Bad]) -> None:
        """Copy these to the dead letters, a few at a time; nack those for which there is no room."""
        room = max(0, DEAD_LETTERS_WAITING_MAX - self._rejecting)
        some = bad[:room]
        self._rejecting += len(some)
        try:
            await self._broker.nack([command for command, _ in bad[room:]], delay_ms=RETRY_MS)
            async with asyncio.TaskGroup() as rejections:
                for command, error in some:
                    rejections.create_task(self._reject_in_turn(command, error))
        finally:
            self._rejecting -= len(some)

    async def _reject_in_turn(self, command: Command, error: DuetimeError) -> None:
        async with self._turns:
            if self._draining.is_set():
                await self._broker.nack([command], delay_ms=0)
            else:
                await self._reject(command, error)

    async def _reject(self, command: Command, error: DuetimeError) -> None:
        """Copy an invalid command to the dead letters, then reject it permanently."""
        log.warning("a command on %s is invalid: %s", command.subject, error)
        self._telemetry.refused_command()
        headers = {"duetime-error": _header(str(error)), "duetime-subject": _header(command.subject)}
        try:
            await self._copy(command, headers)
        except BrokerError as failure:
            log.warning("could not publish the dead letter, retrying: %s", failure)
            await self._broker.nack([command], delay_ms=RETRY_MS)
            return
        await self._broker.reject(command, str(error))

    async def _copy(self, command: Command, headers: dict[str, str]) -> None:
        id, timeout = f"{command.subject}-{command.number}", DEAD_LETTER_SECONDS
        try:
            await self._broker.publish(self._dead_letters, command.data, headers, id=id, timeout=timeout)
        except (BrokerAway, BrokerTimeout):
            raise
        except BrokerError:
            whole = len(command.data)
            if whole < CUT_BYTES_MIN:
                raise
            # A command of the maximum message size leaves no room for the headers. Half of it is enough.
            headers = {**headers, "duetime-size": str(whole)}
            await self._broker.publish(self._dead_letters, command.data[: whole // 2], headers, id=id, timeout=timeout)


def _header(text: str) -> str:
    """The text as a header value that every client can read: one line, short, ASCII."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()[:500]


def _bare(message: Message) -> Schedule:
    for name, value in (
        ("tenantId", message.tenant_id),
        ("serviceCallId", message.service_call_id),
        ("dueAt", message.due_at),
    ):
        if value is None:
            raise InvalidInput(name, "is required")
    return Schedule(message.tenant_id or "", message.service_call_id or "", message.due_at or "", message.tag)
