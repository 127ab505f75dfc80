"""The broker door: ScheduleTimer commands in, DueTimeReached events out.

A command is answered only after its timer is durable; until then the broker keeps it, and gives it out again when we
die. One that breaks the rules is copied to the dead letters with what is wrong with it, beside the others: these never
wait for a dead letter.
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

AGAIN_MS = 1_000
DEAD_LETTER_SECONDS = 5.0
DEAD_LETTERS_AT_ONCE = 32
DEAD_LETTERS_WAITING_MAX = 1_000
"""How many bad commands wait to be copied at most; the broker gives the others out again later."""
CUT_BYTES_MIN = 4_096
"""A dead letter that is refused and not smaller than this may be too large; it is cut."""
UNTIL_TAKEN = RetryPolicy(
    max_retries=1_000_000, max_duration_ms=3650 * DAY_MS, initial_interval_ms=SECOND_MS, max_interval_ms=30 * SECOND_MS
)
"""An event is published until the broker has it: nobody is there to be told that it failed."""


class Schedule(Struct, rename="camel"):
    tenant_id: str
    service_call_id: str
    due_at: str


class Message(Struct, rename="camel"):
    """An envelope with a payload, or a bare payload."""

    type: str = "ScheduleTimer"
    payload: Schedule | None = None
    tenant_id: str | None = None
    correlation_id: str | None = None
    service_call_id: str | None = None
    due_at: str | None = None


_decoder = msgspec.json.Decoder(Message)

Bad = tuple[Command, DuetimeError]
"""A command that can't be taken, and why."""


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
        self._burying = 0

    async def run(self) -> None:
        """Take commands until ``drain``, then answer what was taken and give the rest back."""
        taking = asyncio.ensure_future(self._broker.take())
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            async with asyncio.TaskGroup() as burials:
                while True:
                    await asyncio.wait([taking, draining], return_when=asyncio.FIRST_COMPLETED)
                    if taking.done():
                        bad = await self._schedule(taking.result())
                        burials.create_task(self._bury_all(bad))
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
        """Make timers of the commands, all in one durable write, and answer each."""
        await self._bury_all(await self._schedule(commands))

    async def _schedule(self, commands: Sequence[Command]) -> list[Bad]:
        """Make timers of the commands and answer them; return those that can't be taken, which are not answered yet."""
        bad: list[Bad] = []
        wanted: list[tuple[Command, NewTimer]] = []
        for command in commands:
            try:
                wanted.append((command, self._wanted(command)))
            except InvalidInput as error:
                bad.append((command, error))
        done: list[Command] = []
        later: list[Command] = []
        try:
            made = await self._service.schedule_many([new for _, new in wanted])
        except StoreError as error:
            log.warning("%d commands have to wait for the store: %s", len(wanted), error)
            made = [error] * len(wanted)
        for (command, _), refusal in zip(wanted, made, strict=True):
            if refusal is None:
                done.append(command)
            elif isinstance(refusal, StoreError):
                later.append(command)
            else:
                bad.append((command, refusal))
        self._telemetry.created("broker", len(done))
        await self._broker.done(done)
        await self._broker.again(later, delay_ms=AGAIN_MS)
        return bad

    def _wanted(self, command: Command) -> NewTimer:
        if len(command.data) > self._bytes_max:
            raise InvalidInput("body", f"is larger than {self._bytes_max} bytes")
        message = wire.decode(command.data, Message, _decoder)
        if message.type != "ScheduleTimer":
            raise InvalidInput("type", "must be ScheduleTimer")
        schedule = message.payload or _bare(message)
        if message.tenant_id is None:
            raise InvalidInput("tenantId", "is required")
        if message.tenant_id != schedule.tenant_id:
            raise InvalidInput("tenantId", "must be the same in the envelope and in the payload")
        tenant = wire.check_namespace(schedule.tenant_id, "tenantId")
        if "." in tenant:
            raise InvalidInput("tenantId", "must be one token of a subject: no dots")
        if command.subject.rpartition(".")[2] != tenant:
            raise InvalidInput("tenantId", "must be the last token of the subject")
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

    async def _bury_all(self, bad: Sequence[Bad]) -> None:
        """Copy these to the dead letters, a few at a time, while there is room for them and until ``drain``."""
        room = max(0, DEAD_LETTERS_WAITING_MAX - self._burying)
        some = bad[:room]
        self._burying += len(some)
        try:
            await self._broker.again([command for command, _ in bad[room:]], delay_ms=AGAIN_MS)
            async with asyncio.TaskGroup() as burials:
                for command, error in some:
                    burials.create_task(self._bury_in_turn(command, error))
        finally:
            self._burying -= len(some)

    async def _bury_in_turn(self, command: Command, error: DuetimeError) -> None:
        async with self._turns:
            if self._draining.is_set():
                await self._broker.again([command], delay_ms=0)
            else:
                await self._bury(command, error)

    async def _bury(self, command: Command, error: DuetimeError) -> None:
        """Copy a command that can't be taken to the dead letters, then have nobody try it again."""
        log.warning("a command on %s can't be taken: %s", command.subject, error)
        self._telemetry.refused_command()
        headers = {"duetime-error": _header(str(error)), "duetime-subject": _header(command.subject)}
        try:
            await self._copy(command, headers)
        except BrokerError as failure:
            log.warning("could not keep it among the dead letters, trying again: %s", failure)
            await self._broker.again([command], delay_ms=AGAIN_MS)
            return
        await self._broker.never(command, str(error))

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
            # One that fills a message to the brim leaves no room for the headers. Half of it tells enough.
            headers = {**headers, "duetime-size": str(whole)}
            await self._broker.publish(self._dead_letters, command.data[: whole // 2], headers, id=id, timeout=timeout)


def _header(text: str) -> str:
    """A text as a header can carry it to every client: on one line, not long, and in ASCII."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()[:500]


def _bare(message: Message) -> Schedule:
    for name, value in (
        ("tenantId", message.tenant_id),
        ("serviceCallId", message.service_call_id),
        ("dueAt", message.due_at),
    ):
        if value is None:
            raise InvalidInput(name, "is required")
    return Schedule(message.tenant_id or "", message.service_call_id or "", message.due_at or "")
