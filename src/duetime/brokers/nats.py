"""NATS JetStream behind the broker port.

Commands arrive through a durable pull consumer that all instances share: each pulls as many as it has room for, so a
slow one gets fewer. Events are JetStream publishes, which the server acks once they are in a stream.

Missing streams and a missing consumer are created; existing ones are never changed, only checked (``problems``). The
connection is opened in the background, and again whenever it breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import nats
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import Error as NatsError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, NotFoundError
from nats.js.manager import JetStreamManager

from duetime.broker import BrokerAway, BrokerError, BrokerTimeout, Command

log = logging.getLogger(__name__)

CONSUMER = "duetime"
TAKEN_MAX = 2_000
"""The most commands that this instance holds, including those that it has requested."""
BATCH_MAX = 500
ASK_SECONDS = 5.0
"""How long the server keeps a pull request; then it is sent again."""
ACK_WAIT_SECONDS = 30.0
RECONNECT_SECONDS = 0.5
REQUEST_SECONDS_MAX = 5.0
DEDUPE_SECONDS = 300.0
DEDUPE_SECONDS_MIN = 120.0
DAY_SECONDS = 86_400.0
HEAD_BYTES = len(b"NATS/1.0\r\n\r\n")
"""The framing of a message's headers."""
EVENTS_KEPT_SECONDS = 30 * DAY_SECONDS


class Names(Struct, frozen=True, kw_only=True):
    """Streams, and subjects without the tenant at their end."""

    commands: str = "timer.commands.schedule"
    events: str = "timer.events.due"
    dead_letters: str = "timer.dlq.commands"
    commands_stream: str = "TIMER_COMMANDS"
    events_stream: str = "TIMER_EVENTS"
    dead_letters_stream: str = "TIMER_DLQ"


class _Client(Client):
    """The library's client, made robust against messages that it can't decode: it would stop reading at such a subject
    or header, and the server would redeliver the message again and again."""

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (IndexError, UnicodeDecodeError):
            return None  # headers of commands are not used, and status headers are always valid

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        return super()._build_message(sid, subject.decode(errors="replace").encode(), reply, data, headers)


class NatsBroker:
    def __init__(self, url: str, names: Names) -> None:
        self._url = url
        self._names = names
        self._client = _Client()
        self._inbox: Subscription | None = None
        self._arrived: deque[Command] = deque()
        self._something = asyncio.Event()
        self._more = asyncio.Event()
        self._asked = 0
        self._taking = True
        self._closing = False
        self._set_up = asyncio.Event()
        self._said = ""

    @property
    def connected(self) -> bool:
        return self._client.is_connected and self._set_up.is_set()

    # The connection.

    async def run(self) -> None:
        while True:
            try:
                await self._connect()
                # The client reconnects by itself, except after an error from the server: then it stays closed.
                while not self._client.is_closed:
                    await self._round()
            except (NatsError, OSError) as error:
                self._say(f"lost the connection to the broker: {str(error) or type(error).__name__}")
                await self._client.close()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _connect(self) -> None:
        self._client = client = _Client()
        await client.connect(
            self._servers(),
            name="duetime",
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_close,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # seconds; a float works
            ping_interval=5,
            max_outstanding_pings=2,
        )
        log.info("connected to the broker")
        self._inbox = await client.subscribe(client.new_inbox(), cb=self._on_message)

    async def _round(self) -> None:
        """Create what is missing, request commands if there is room, and wait for a change."""
        self._something.clear()
        if self._client.is_connected and not self._set_up.is_set():
            await self._try_to_set_up()
        if self.connected and self._taking:
            await self._ask()
        try:
            async with asyncio.timeout(ASK_SECONDS if self.connected else RECONNECT_SECONDS):
                await self._something.wait()
        except TimeoutError:
            self._asked = 0  # The request has expired, even if the server's notice was lost.

    def _servers(self) -> list[str]:
        return [server.strip() for server in self._url.split(",")]

    async def _try_to_set_up(self) -> None:
        try:
            for config in self._streams():
                await self._ensure_stream(config)
            await self._ensure_consumer()
        except (NatsError, APIError, OSError, TimeoutError) as error:
            self._say(f"could not set up the broker's streams: {str(error) or type(error).__name__}")
            return
        self._asked = 0
        self._said = ""
        self._set_up.set()
        for problem in await self.problems():
            log.warning("broker: %s", problem)

    async def _on_disconnect(self) -> None:
        self._set_up.clear()
        # Requests on the old connection will get no response.
        for waiting in list(self._client._resp_map.values()):
            if not waiting.done():
                waiting.set_exception(ConnectionClosedError())
        if not self._closing:
            self._say("the broker is not connected: timers with NATS callbacks wait for it")

    async def _on_reconnect(self) -> None:
        log.info("reconnected to the broker")
        self._something.set()

    async def _on_close(self) -> None:
        self._something.set()

    async def _on_error(self, error: Exception) -> None:
        self._say(f"the broker can't be reached: {str(error) or type(error).__name__}")

    def _say(self, text: str) -> None:
        """Log a problem once, not at every try."""
        if text != self._said:
            self._said = text
            log.warning("%s", text)

    # Streams and the consumer.

    def _streams(self) -> list[StreamConfig]:
        names = self._names
        return [
            StreamConfig(
                name=names.commands_stream,
                subjects=[f"{names.commands}.*"],
                retention=RetentionPolicy.WORK_QUEUE,  # acked messages are deleted, others kept forever
                discard=DiscardPolicy.NEW,
                storage=StorageType.FILE,
                duplicate_window=DEDUPE_SECONDS,
            ),
            StreamConfig(
                name=names.events_stream,
                subjects=[f"{names.events}.*"],
                discard=DiscardPolicy.NEW,
                storage=StorageType.FILE,
                max_age=EVENTS_KEPT_SECONDS,
                duplicate_window=DEDUPE_SECONDS,
            ),
            StreamConfig(
                name=names.dead_letters_stream,
                subjects=[names.dead_letters],
                discard=DiscardPolicy.NEW,
                storage=StorageType.FILE,
                max_age=EVENTS_KEPT_SECONDS,
            ),
        ]

    async def _ensure_stream(self, config: StreamConfig) -> None:
        streams = self._client.jsm(timeout=REQUEST_SECONDS_MAX)
        try:
            await streams.stream_info(str(config.name))
        except NotFoundError:
            await streams.add_stream(config)
            log.info("created the stream %s for %s", config.name, ", ".join(config.subjects or ()))

    async def _ensure_consumer(self) -> None:
        streams = self._client.jsm(timeout=REQUEST_SECONDS_MAX)
        stream = self._names.commands_stream
        try:
            await streams.consumer_info(stream, CONSUMER)
        except NotFoundError:
            config = ConsumerConfig(
                durable_name=CONSUMER,
                filter_subject=f"{self._names.commands}.*",
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_SECONDS,
                max_ack_pending=10 * TAKEN_MAX,
            )
            await streams.add_consumer(stream, config)

    async def problems(self) -> list[str]:
        streams = self._client.jsm(timeout=REQUEST_SECONDS_MAX)
        found: list[str] = []
        for wanted in self._streams():
            name = str(wanted.name)
            try:
                there = (await streams.stream_info(name)).config
            except NotFoundError:
                continue  # The service creates it at startup.
            except (NatsError, APIError, OSError, TimeoutError) as error:
                return [*found, f"the stream {name} can't be read: {str(error) or type(error).__name__}"]
            found += [f"the stream {name} {problem}" for problem in _problems(wanted, there)]
        try:
            consumer = (await streams.consumer_info(self._names.commands_stream, CONSUMER)).config
            found += [f"the consumer {CONSUMER} {problem}" for problem in self._consumer_problems(consumer)]
        except NotFoundError:
            found += await self._rivals(streams)
        except (NatsError, APIError, OSError, TimeoutError) as error:
            found.append(f"the consumer {CONSUMER} can't be read: {str(error) or type(error).__name__}")
        return found

    async def _rivals(self, streams: JetStreamManager) -> list[str]:
        """Consumers that prevent the service from creating its own: a work queue has one consumer for each message."""
        stream = self._names.commands_stream
        try:
            if (await streams.stream_info(stream)).config.retention != RetentionPolicy.WORK_QUEUE:
                return []
            consumers = await streams.consumers_info(stream)
        except (NatsError, APIError, OSError, TimeoutError):
            return []
        return [
            f"the consumer {each.name} of the stream {stream} receives the commands: remove it, or Duetime gets none"
            for each in consumers
            if self._gets_commands(each.config)
        ]

    async def examine(self) -> list[str]:
        """Connect once and return the problems, each as a sentence for users. Creates nothing."""
        where = "NATS at " + ", ".join(urlsplit(server).netloc.rpartition("@")[2] for server in self._servers())
        reason = "no response"

        async def note(error: Exception) -> None:
            nonlocal reason
            reason = str(error) or reason

        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):  # The client itself would try for minutes.
                await self._client.connect(self._servers(), name="duetime doctor", allow_reconnect=False, error_cb=note)
        except (NatsError, OSError, TimeoutError):
            return [f"can't connect to {where}: {reason}; check TIMER_BROKER_URL, and that the server is running"]
        try:
            await self._client.jsm(timeout=REQUEST_SECONDS_MAX).account_info()
            return await self.problems()
        except (NatsError, APIError, OSError, TimeoutError):
            return [f"{where} has no JetStream, which stores messages: start it with -js"]
        finally:
            await self._client.close()

    def _consumer_problems(self, there: ConsumerConfig) -> list[str]:
        found = []
        if there.deliver_subject:
            found.append("is a push consumer, and Duetime needs a pull consumer: remove it")
        if there.ack_policy != AckPolicy.EXPLICIT:
            found.append("must have explicit acks, or a crash would lose commands: remove it")
        if (there.max_deliver or -1) > 0:
            found.append(f"drops a command after {there.max_deliver} deliveries: set max_deliver to -1")
        wanted = f"{self._names.commands}.*"
        if not any(_covers(pattern, wanted) for pattern in _filters(there)):
            found.append(f"does not deliver all of {wanted}: set its filter subject to {wanted}")
        return found

    def _gets_commands(self, consumer: ConsumerConfig) -> bool:
        wanted = f"{self._names.commands}.*"
        return any(_covers(pattern, wanted) or _covers(wanted, pattern) for pattern in _filters(consumer))

    # Events out.

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], *, id: str, timeout: float) -> None:
        if not self._client.is_connected:
            raise BrokerAway("the broker is not connected")
        headers = {**headers, "Nats-Msg-Id": id}
        size = len(body) + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) + HEAD_BYTES
        if size > self._client.max_payload:
            # The server would reject it and also close the connection.
            raise BrokerError(f"the message has {size} bytes; the broker accepts {self._client.max_payload} at most")
        try:
            answer = await self._client.request(subject, body, timeout=timeout, headers=headers)
        except ConnectionClosedError:
            # If the broker has the message, it will drop the next one with the same id.
            raise BrokerAway("lost the connection to the broker") from None
        except NoRespondersError:
            raise BrokerError(f"no stream has the subject {subject!r}: add it to one") from None
        except (TimeoutError, nats.errors.TimeoutError):
            raise BrokerTimeout("the broker sent no ack in time") from None
        except (NatsError, OSError) as error:
            raise BrokerError(f"the broker rejected the message: {str(error) or type(error).__name__}") from error
        try:
            failure = _published(answer.data).error
        except msgspec.MsgspecError:
            raise BrokerError(f"the reply on the subject {subject!r} is not a stream's ack") from None
        if failure is not None:
            raise BrokerError(f"the broker rejected the message: {failure.description or failure.code}")

    # Commands in.

    async def _ask(self) -> None:
        room = TAKEN_MAX - len(self._arrived) - self._asked
        if room < TAKEN_MAX // 2:
            return
        self._asked += room
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._names.commands_stream}.{CONSUMER}"
        asked = {"batch": room, "expires": int(ASK_SECONDS * 1e9)}
        assert self._inbox is not None
        await self._client.publish(subject, msgspec.json.encode(asked), reply=self._inbox.subject)

    async def _on_message(self, message: Msg) -> None:
        if not message.reply:
            self._asked = 0  # The request has ended or was rejected; the next round sends a new one.
            headers = message.headers or {}
            if headers.get("Status") == "503":
                self._set_up.clear()  # No stream or no consumer: the server is a new one.
            elif headers.get("Status") == "409":
                self._say(f"the broker delivered no commands: {headers.get('Description', 'unknown reason')}")
            if headers.get("Status") not in ("404", "408"):
                await asyncio.sleep(RECONNECT_SECONDS)  # The next request would probably get the same response.
            self._something.set()
            return
        self._asked = max(0, self._asked - 1)
        command = Command(message.subject, message.data, *_place(message.reply), message.reply)
        if not self._taking:
            await self.nack([command], delay_ms=0)
            return
        self._arrived.append(command)
        self._something.set()
        self._more.set()

    async def take(self) -> Sequence[Command]:
        while not self._arrived:
            self._more.clear()
            await self._more.wait()
        taken = [self._arrived.popleft() for _ in range(min(BATCH_MAX, len(self._arrived)))]
        self._something.set()  # There is room for more.
        return taken

    async def ack(self, commands: Sequence[Command]) -> None:
        for command in commands:
            await self._answer(command, b"+ACK")

    async def nack(self, commands: Sequence[Command], *, delay_ms: int) -> None:
        for command in commands:
            await self._answer(command, b'-NAK {"delay": %d}' % (delay_ms * 1_000_000))

    async def reject(self, command: Command, reason: str) -> None:
        await self._answer(command, b"+TERM " + " ".join(reason.split()).encode()[:200])

    async def _answer(self, command: Command, answer: bytes) -> None:
        # If an ack is lost, the command is redelivered and recognized as a duplicate.
        try:
            await self._client.publish(command.token, answer)
        except (NatsError, OSError) as error:
            log.debug("could not ack a command: %s", error)

    async def stop_taking(self) -> None:
        self._taking = False
        unseen = list(self._arrived)
        self._arrived.clear()
        if self._inbox is not None and self._client.is_connected:
            # The server still has our last request and would deliver commands for seconds.
            try:
                await self._inbox.drain()  # type: ignore[no-untyped-call]
            except (NatsError, OSError, TimeoutError) as error:
                log.debug("could not withdraw the last request: %s", error)
        await self.nack(unseen, delay_ms=0)

    async def close(self) -> None:
        self._closing = True
        if self._client.is_connected:
            try:
                async with asyncio.timeout(REQUEST_SECONDS_MAX):
                    await self._client.flush()
            except (NatsError, OSError, TimeoutError) as error:
                log.warning("could not flush the connection to the broker: %s", str(error) or type(error).__name__)
        await self._client.close()


class _Failure(Struct):
    code: int = 0
    description: str = ""


class _Published(Struct):
    stream: str = ""
    error: _Failure | None = None


_published = msgspec.json.Decoder(_Published).decode


def _place(reply: str) -> tuple[int, int]:
    """The sequence number of a command in its stream and the time when the stream stored it, from its reply subject:
    ``$JS.ACK.<stream>.<consumer>.<deliveries>.<number>.<number of the delivery>.<nanoseconds>.…``, or the same with a
    domain and an account before the stream."""
    tokens = reply.split(".")
    at = 5 if len(tokens) == 9 else 7
    return int(tokens[at]), int(tokens[at + 2])


def _problems(wanted: StreamConfig, there: StreamConfig) -> list[str]:
    """Settings of an existing stream that may lose messages, as ends of sentences."""
    found = []
    for subject in wanted.subjects or ():
        if not any(_covers(pattern, subject) for pattern in there.subjects or ()):
            found.append(f"does not have the subject {subject}: add it")
    if there.storage == StorageType.MEMORY:
        found.append("is stored in memory, so a restart of the broker loses its messages: store it in files")
    if there.discard != DiscardPolicy.NEW and ((there.max_msgs or -1) > 0 or (there.max_bytes or -1) > 0):
        found.append("drops its oldest messages silently when it is full: make it reject new ones (discard: new)")
    if (there.max_msgs_per_subject or -1) > 0 and not (
        there.discard == DiscardPolicy.NEW and there.discard_new_per_subject
    ):
        found.append(
            f"keeps {there.max_msgs_per_subject} messages per subject and drops older ones silently: set "
            "max_msgs_per_subject to -1"
        )
    if there.retention == RetentionPolicy.INTEREST:
        found.append("drops messages silently while it has no consumer: set retention to limits")
    if there.max_age and there.max_age < DAY_SECONDS:
        found.append(f"drops messages silently after {there.max_age:.0f} s, read or not: set max_age to at least 1 day")
    if there.no_ack:
        found.append("sends no acks, so Duetime can't tell whether a publish has arrived: set no_ack to false")
    if there.duplicate_window is not None and there.duplicate_window < DEDUPE_SECONDS_MIN:
        found.append(
            f"forgets message ids after {there.duplicate_window:.0f} s, so duplicates may come through: set "
            f"duplicate_window to at least {DEDUPE_SECONDS_MIN:.0f} s"
        )
    return found


def _filters(consumer: ConsumerConfig) -> list[str]:
    return consumer.filter_subjects or [consumer.filter_subject or ">"]


def _covers(pattern: str, subject: str) -> bool:
    """Whether a stream's subject pattern matches everything that ``subject`` matches."""
    ours, theirs = subject.split("."), pattern.split(".")
    for place, token in enumerate(theirs):
        if token == ">":
            return len(ours) > place
        if place >= len(ours) or (token != "*" and token != ours[place]):
            return False
    return len(ours) == len(theirs)
