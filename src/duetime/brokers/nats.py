"""NATS JetStream behind the broker port.

Commands come through a durable pull consumer that all instances share: each asks for as many as it can hold, so a slow
one gets fewer. Events go out as JetStream publishes, which are confirmed once they are in a stream.

Streams and the consumer are made when they are missing; the ones that are there are never changed, only judged
(``problems``). The connection is made in the background and made again whenever it breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

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

from duetime.broker import BrokerAway, BrokerError, BrokerTimeout, Command

log = logging.getLogger(__name__)

CONSUMER = "duetime"
TAKEN_MAX = 2_000
"""Commands that this instance holds at one time, those that it has asked for included."""
BATCH_MAX = 500
ASK_SECONDS = 5.0
"""How long the server keeps a request for commands; then it is made again."""
ACK_WAIT_SECONDS = 30.0
RECONNECT_SECONDS = 0.5
REQUEST_SECONDS_MAX = 5.0
DEDUPE_SECONDS = 300.0
DEDUPE_SECONDS_MIN = 120.0
DAY_SECONDS = 86_400.0
HEAD_BYTES = len(b"NATS/1.0\r\n\r\n")
"""What is around the headers of a message."""
EVENTS_KEPT_SECONDS = 30 * DAY_SECONDS


class Names(Struct, frozen=True, kw_only=True):
    """Subjects, without the tenant that ends them, and streams."""

    commands: str = "timer.commands.schedule"
    events: str = "timer.events.due"
    dead_letters: str = "timer.dlq.commands"
    commands_stream: str = "TIMER_COMMANDS"
    events_stream: str = "TIMER_EVENTS"
    dead_letters_stream: str = "TIMER_DLQ"


class _Client(Client):
    """The library's client, whom no message can kill: it stops reading at a subject or headers that it can't decode,
    and such a message would come again and again."""

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (IndexError, UnicodeDecodeError):
            return None  # those of a command are of no interest, and a status is well formed

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
                # It connects again by itself, except after an error that the server told it of: then it stays closed.
                while not self._client.is_closed:
                    await self._round()
            except (NatsError, OSError) as error:
                self._say(f"the connection to the broker broke: {error or type(error).__name__}")
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
            reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # seconds, and they need not be whole
            ping_interval=5,
            max_outstanding_pings=2,
        )
        log.info("connected to the broker")
        self._inbox = await client.subscribe(client.new_inbox(), cb=self._on_message)

    async def _round(self) -> None:
        """Set up what is missing, ask for commands if there is room, and wait until something has changed."""
        self._something.clear()
        if self._client.is_connected and not self._set_up.is_set():
            await self._try_to_set_up()
        if self.connected and self._taking:
            await self._ask()
        try:
            async with asyncio.timeout(ASK_SECONDS if self.connected else RECONNECT_SECONDS):
                await self._something.wait()
        except TimeoutError:
            self._asked = 0  # The request is over, whether or not its end was heard of.

    def _servers(self) -> list[str]:
        return [server.strip() for server in self._url.split(",")]

    async def _try_to_set_up(self) -> None:
        try:
            for config in self._streams():
                await self._ensure_stream(config)
            await self._ensure_consumer()
        except (NatsError, APIError, OSError, TimeoutError) as error:
            self._say(f"could not set up the broker's streams: {error or type(error).__name__}")
            return
        self._asked = 0
        self._said = ""
        self._set_up.set()
        for problem in await self.problems():
            log.warning("broker: %s", problem)

    async def _on_disconnect(self) -> None:
        self._set_up.clear()
        # Nobody will answer what was asked on this connection.
        for waiting in list(self._client._resp_map.values()):
            if not waiting.done():
                waiting.set_exception(ConnectionClosedError())
        if not self._closing:
            self._say("the broker is away: HTTP timers go on, the others wait for it")

    async def _on_reconnect(self) -> None:
        log.info("connected to the broker again")
        self._something.set()

    async def _on_close(self) -> None:
        self._something.set()

    async def _on_error(self, error: Exception) -> None:
        self._say(f"the broker can't be reached: {error or type(error).__name__}")

    def _say(self, text: str) -> None:
        """Log it once, not at every try."""
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
                retention=RetentionPolicy.WORK_QUEUE,  # what was taken is gone, what was not is kept for ever
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
            log.info("made the stream %s for %s", config.name, ", ".join(config.subjects or ()))

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
                continue  # A start makes it.
            except (NatsError, APIError, OSError, TimeoutError) as error:
                return [*found, f"the stream {name} can't be looked at: {error or type(error).__name__}"]
            found += [f"the stream {name} {problem}" for problem in _problems(wanted, there)]
        try:
            consumer = (await streams.consumer_info(self._names.commands_stream, CONSUMER)).config
            found += [f"the consumer {CONSUMER} {problem}" for problem in self._consumer_problems(consumer)]
        except NotFoundError:
            pass
        except (NatsError, APIError, OSError, TimeoutError) as error:
            found.append(f"the consumer {CONSUMER} can't be looked at: {error or type(error).__name__}")
        return found

    async def examine(self) -> list[str]:
        """Connect once, look and leave: what is wrong, each in a sentence for people. Nothing is made."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):  # Left alone, it would try for minutes.
                await self._client.connect(
                    self._servers(), name="duetime doctor", allow_reconnect=False, error_cb=_ignore
                )
        except (NatsError, OSError, TimeoutError):
            return ["can't be reached: is TIMER_BROKER_URL right, and does the server run?"]
        try:
            await self._client.jsm(timeout=REQUEST_SECONDS_MAX).account_info()
            return await self.problems()
        except (NatsError, APIError, OSError, TimeoutError):
            return ["has no JetStream, which keeps messages: start it with -js"]
        finally:
            await self._client.close()

    def _consumer_problems(self, there: ConsumerConfig) -> list[str]:
        found = []
        if there.deliver_subject:
            found.append("is a push consumer, and nothing can be asked of it: remove it")
        if there.ack_policy != AckPolicy.EXPLICIT:
            found.append("must have explicit acks: a crash would lose commands")
        if (there.max_deliver or -1) > 0:
            found.append(f"gives up on a command after {there.max_deliver} deliveries")
        wanted = f"{self._names.commands}.*"
        filters = there.filter_subjects or [there.filter_subject or ">"]
        if not any(_covers(pattern, wanted) for pattern in filters):
            found.append(f"does not give out all of {wanted}")
        return found

    # Events out.

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], *, id: str, timeout: float) -> None:
        if not self._client.is_connected:
            raise BrokerAway("the broker is away")
        headers = {**headers, "Nats-Msg-Id": id}
        size = len(body) + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) + HEAD_BYTES
        if size > self._client.max_payload:
            # The server would not only refuse it, but end the connection.
            raise BrokerError(f"the broker takes {self._client.max_payload} bytes at most, and this has {size}")
        try:
            answer = await self._client.request(subject, body, timeout=timeout, headers=headers)
        except ConnectionClosedError:
            # It may have the message, and then it will drop the next one, which has the same id.
            raise BrokerAway("the connection to the broker broke") from None
        except NoRespondersError:
            raise BrokerError(f"no stream takes the subject {subject!r}: add it to one") from None
        except (TimeoutError, nats.errors.TimeoutError):
            raise BrokerTimeout("the broker did not confirm in time") from None
        except (NatsError, OSError) as error:
            raise BrokerError(f"the broker refused it: {error or type(error).__name__}") from error
        try:
            failure = _published(answer.data).error
        except msgspec.MsgspecError:
            raise BrokerError(f"somebody else than a stream answers on the subject {subject!r}") from None
        if failure is not None:
            raise BrokerError(f"the broker refused it: {failure.description or failure.code}")

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
            self._asked = 0  # The end of a request, or why it was refused; the next one comes with the next round.
            headers = message.headers or {}
            if headers.get("Status") == "503":
                self._set_up.clear()  # No stream, no consumer: the server is a new one.
            elif headers.get("Status") == "409":
                self._say(f"the broker gave no commands: {headers.get('Description', 'it does not say why')}")
            if headers.get("Status") not in ("404", "408"):
                await asyncio.sleep(RECONNECT_SECONDS)  # The next one may well have the same answer.
            self._something.set()
            return
        self._asked = max(0, self._asked - 1)
        command = Command(message.subject, message.data, *_place(message.reply), message.reply)
        if not self._taking:
            await self.again([command], delay_ms=0)
            return
        self._arrived.append(command)
        self._something.set()
        self._more.set()

    async def take(self) -> Sequence[Command]:
        while not self._arrived:
            self._more.clear()
            await self._more.wait()
        taken = [self._arrived.popleft() for _ in range(min(BATCH_MAX, len(self._arrived)))]
        self._something.set()  # There is room again.
        return taken

    async def done(self, commands: Sequence[Command]) -> None:
        for command in commands:
            await self._answer(command, b"+ACK")

    async def again(self, commands: Sequence[Command], *, delay_ms: int) -> None:
        for command in commands:
            await self._answer(command, b'-NAK {"delay": %d}' % (delay_ms * 1_000_000))

    async def never(self, command: Command, reason: str) -> None:
        await self._answer(command, b"+TERM " + " ".join(reason.split()).encode()[:200])

    async def _answer(self, command: Command, answer: bytes) -> None:
        # One that gets lost has its command given out again, which is taken for what it is: a repeat.
        try:
            await self._client.publish(command.token, answer)
        except (NatsError, OSError) as error:
            log.debug("could not answer a command: %s", error)

    async def stop_taking(self) -> None:
        self._taking = False
        unseen = list(self._arrived)
        self._arrived.clear()
        if self._inbox is not None and self._client.is_connected:
            # The server still has our last request and would go on to give us commands for seconds.
            try:
                await self._inbox.drain()  # type: ignore[no-untyped-call]
            except (NatsError, OSError, TimeoutError) as error:
                log.debug("could not take the last request back: %s", error)
        await self.again(unseen, delay_ms=0)

    async def close(self) -> None:
        self._closing = True
        if self._client.is_connected:
            try:
                async with asyncio.timeout(REQUEST_SECONDS_MAX):
                    await self._client.flush()
            except (NatsError, OSError, TimeoutError) as error:
                log.warning("could not say goodbye to the broker: %s", error or type(error).__name__)
        await self._client.close()


async def _ignore(_error: Exception) -> None:
    """What is wrong is raised as well."""


class _Failure(Struct):
    code: int = 0
    description: str = ""


class _Published(Struct):
    stream: str = ""
    error: _Failure | None = None


_published = msgspec.json.Decoder(_Published).decode


def _place(reply: str) -> tuple[int, int]:
    """Which message of its stream a command is, and when that took it:
    ``$JS.ACK.<stream>.<consumer>.<deliveries>.<number>.<number of the delivery>.<nanoseconds>.…``, or the same with a
    domain and an account before the stream."""
    tokens = reply.split(".")
    at = 5 if len(tokens) == 9 else 7
    return int(tokens[at]), int(tokens[at + 2])


def _problems(wanted: StreamConfig, there: StreamConfig) -> list[str]:
    """How a stream that is there may fail those who rely on it, as ends of sentences."""
    found = []
    for subject in wanted.subjects or ():
        if not any(_covers(pattern, subject) for pattern in there.subjects or ()):
            found.append(f"does not take the subject {subject}")
    if there.storage == StorageType.MEMORY:
        found.append("is kept in memory: a restart of the broker loses what is in it")
    if there.discard != DiscardPolicy.NEW and ((there.max_msgs or -1) > 0 or (there.max_bytes or -1) > 0):
        found.append("drops its oldest messages silently when it is full: let it refuse new ones (discard: new)")
    if (there.max_msgs_per_subject or -1) > 0 and not (
        there.discard == DiscardPolicy.NEW and there.discard_new_per_subject
    ):
        found.append(f"keeps {there.max_msgs_per_subject} messages of a subject and drops those before silently")
    if there.retention == RetentionPolicy.INTEREST:
        found.append("drops messages silently while no consumer waits for them (retention: interest)")
    if there.max_age and there.max_age < DAY_SECONDS:
        found.append(f"drops messages silently after {there.max_age:.0f} s, read or not")
    if there.no_ack:
        found.append("confirms nothing (no_ack): a publish can't be known to have arrived")
    if there.duplicate_window is not None and there.duplicate_window < DEDUPE_SECONDS_MIN:
        found.append(f"forgets message ids after {there.duplicate_window:.0f} s: duplicates may come through")
    return found


def _covers(pattern: str, subject: str) -> bool:
    """Whether a stream's subject takes all that ``subject`` stands for."""
    ours, theirs = subject.split("."), pattern.split(".")
    for place, token in enumerate(theirs):
        if token == ">":
            return len(ours) > place
        if place >= len(ours) or (token != "*" and token != ours[place]):
            return False
    return len(ours) == len(theirs)
