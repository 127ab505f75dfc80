"""The composition root: builds every part from the settings, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from duetime import __version__, descriptors
from duetime.activity import Activity
from duetime.brokers.nats import Names, NatsBroker
from duetime.clock import Clock, SystemClock, VirtualClock
from duetime.deliverer import Deliverer
from duetime.deliverers.broker import BrokerDeliverer
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.doors.admission import Admission
from duetime.doors.broker import BrokerDoor
from duetime.doors.durable import DurableDoor
from duetime.doors.http import Application, Door, Keys
from duetime.doors.operations import OperationsDoor
from duetime.doors.origins import OriginGuard
from duetime.doors.overview import Overview
from duetime.doors.platform import PlatformDoor
from duetime.doors.pulses import Pulses, PulsesDoor
from duetime.doors.reference import ReferenceDoor
from duetime.doors.server import Server, bind
from duetime.doors.sessions import CookieSessions, SessionDoor
from duetime.doors.web import WebDoor
from duetime.doors.wrong_keys import WrongKeys
from duetime.engine.engine import Engine, EngineOptions
from duetime.errors import SettingsError
from duetime.model import FOREVER_MS, HttpTarget, NatsTarget
from duetime.service import Service
from duetime.settings import Settings
from duetime.settings.keyfile import ensure_api_key
from duetime.siblings import Siblings
from duetime.store import About, Hint, Store
from duetime.stores.memory import MemoryStore
from duetime.stores.postgres import PostgresStore
from duetime.stores.sqlite import SqliteStore
from duetime.telemetry import Telemetry
from duetime.workers import Place, Workers

log = logging.getLogger("duetime")

GARBAGE = (20_000, 20, 20)
"""How many objects are made before the collector looks for circles among them. Timers make none, and looking as often
as by default cost a tenth of a delivery."""
SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from another. The default of 5 ms, paid at every step of a commit, would
be most of a timer's lateness under load."""


def build_store(settings: Settings, clock: Clock, *, virtual: bool) -> Store:
    if settings.on_server:
        return PostgresStore(
            settings.database_url,
            shards=settings.shards,
            retention_ms=_retention_ms(settings),
            takeover_now=settings.takeover == "now",
            virtual_clock=clock if virtual else None,
        )
    path = settings.database_path
    if path is None:
        return MemoryStore(clock, shards=settings.shards)
    return SqliteStore(path, clock, shards=settings.shards)


def build_broker(settings: Settings) -> NatsBroker | None:
    if settings.timer_broker_url is None:
        return None
    return NatsBroker(
        settings.timer_broker_url,
        Names(
            commands=settings.broker_commands,
            events=settings.broker_events,
            dead_letters=settings.broker_dead_letters,
            commands_stream=settings.broker_commands_stream,
            events_stream=settings.broker_events_stream,
            dead_letters_stream=settings.broker_dead_letters_stream,
        ),
    )


def _retention_ms(settings: Settings) -> int:
    return FOREVER_MS if settings.retention_ms is None else settings.retention_ms


def build_egress(settings: Settings, clock: Clock) -> Egress:
    allowed = settings.allow_private_targets
    return Egress(
        clock,
        allow_all=allowed is True,
        # No key was set: this is a developer's own machine, whose callbacks go to that machine.
        allow_loopback=allowed is None and settings.api_key is None,
        allow=allowed if isinstance(allowed, tuple) else (),
    )


class Node:
    """One running instance."""

    def __init__(self, settings: Settings, *, virtual_clock: bool = False, place: Place | None = None) -> None:
        self.settings = settings
        self._place = place
        self.virtual_clock = virtual = VirtualClock() if virtual_clock else None
        clock: Clock = virtual or SystemClock()
        self.key_path: Path | None = None
        api_key: str | None = None
        if settings.auth == "key":
            directory = (settings.database_path or Path("duetime.db")).parent
            api_key, self.key_path = ensure_api_key(settings, directory)
        self.telemetry = Telemetry()
        self.descriptors = descriptors.shares(
            descriptors.raise_limit(), connections=settings.max_connections, deliveries=settings.max_in_flight
        )
        self._siblings = Siblings(place.siblings, place.name, self.telemetry.own_page) if place else None
        self.store = build_store(settings, clock, virtual=virtual_clock)
        self.deliverer = HttpDeliverer(
            egress=build_egress(settings, clock),
            clock=clock,
            keys_of=lambda namespace: self.service.signing_keys(namespace),
            version=__version__,
        )
        self.broker = build_broker(settings)
        deliverers: dict[type[Any], Deliverer] = {HttpTarget: self.deliverer}
        deliverers[NatsTarget] = BrokerDeliverer(
            self.broker,
            clock,
            events=settings.broker_events,
            others=(settings.broker_commands, settings.broker_dead_letters),
        )
        self.engine = Engine(
            self.store,
            deliverers,
            clock,
            self.telemetry,
            EngineOptions(
                lease_ms=settings.lease_ttl_ms,
                look_interval_ms=settings.timer_polling_interval_ms,
                begin_max=settings.timer_batch_size,
                in_flight_max=min(settings.max_in_flight, self.descriptors.outbound_max),
                per_destination_max=settings.max_per_destination,
                drain_ms=settings.drain_timeout_ms,
                retention_ms=_retention_ms(settings),
            ),
            about=About(name=f"{socket.gethostname()}:{os.getpid()}", version=__version__, started_at=clock.now()),
            weight=lambda namespace: self.service.weight(namespace),
        )
        self.service = Service(
            self.store,
            deliverers,
            self.engine.clock,
            self.engine.nudge,
            auto_namespaces=settings.auto_namespaces,
            namespaces_max=settings.max_namespaces,
        )
        self.store.on_hint(self._heard)
        # Browsers and attackers go by the machine's clock, and not by a virtual one.
        machine = SystemClock()
        sessions = None if api_key is None else CookieSessions(api_key, machine, self.service)
        keys = Keys(api_key, sessions, WrongKeys(machine, self.telemetry))
        platform = PlatformDoor(self.service, keys, self.telemetry, request_bytes_max=settings.max_request_bytes)
        self._activity = Activity(
            self.service.cluster, self.telemetry, self.service.clock, owner_id=self.engine.ownership.owner_id
        )
        self._pulses = Pulses(self.service, self._activity)
        durable = DurableDoor(
            self.service,
            keys,
            self.telemetry,
            Overview(self.service, self._activity, shards=settings.shards),
            request_bytes_max=settings.max_request_bytes,
            batch_bytes_max=settings.max_batch_bytes,
            shards=settings.shards,
            timeout_ms_max=settings.max_callback_timeout_ms,
        )
        operations = OperationsDoor(
            self.service,
            keys,
            keys if settings.metrics_auth == "key" else Keys(None),
            self.telemetry,
            self._siblings,
            ready=lambda: self._ready,
            watchdog=self.engine.watchdog,
            refusal=platform.refusal,
            virtual_clock=virtual,
        )
        self._broker_door = self.broker and BrokerDoor(
            self.service,
            self.broker,
            self.telemetry,
            events=settings.broker_events,
            dead_letters=settings.broker_dead_letters,
            bytes_max=settings.max_request_bytes,
        )
        reference = ReferenceDoor(durable.operations(), version=__version__, refusal=durable.refusal)
        pulses = PulsesDoor(self._pulses, keys, refusal=durable.refusal)
        session = SessionDoor(keys, sessions, secure=settings.cookie_secure, refusal=durable.refusal)
        web = WebDoor(refusal=durable.refusal)
        doors: list[Door] = [platform, durable, operations, reference, pulses, session, web]
        self._server = Server(
            Application(
                doors,
                fallback=platform,
                under={"/api/": durable},
                guard=None if keys.needed else OriginGuard(settings.host, settings.allowed_hosts),
            ),
            Admission(self.descriptors.inbound_max, self.telemetry, key_needed=keys.needed),
            bodies_bytes_max=settings.bodies_bytes_max,
        )
        self._ready = False
        self._stop = asyncio.Event()
        self.started = asyncio.Event()
        self.port = settings.port

    def _heard(self, hint: Hint) -> None:
        self.engine.heard(hint)
        self.service.heard(hint)

    def stop(self) -> None:
        """Drain and end ``run``."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until ``stop`` is called or the store fails."""
        prepare_interpreter()
        listener = self._place.listener if self._place else bind(self.settings.host, self.settings.port)
        self.port = listener.getsockname()[1]
        try:
            await self.store.open()
        except BaseException:
            listener.close()
            raise
        try:
            await self.service.start()
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._server.serve(listener))
                engine = tasks.create_task(self.engine.run())
                loops = (
                    *(self._watch_store(), self.engine.watchdog.run()),
                    *(self.service.run(), self._activity.run(), self._pulses.run()),
                )
                others = [tasks.create_task(loop) for loop in loops]
                if self._siblings is not None:
                    others.append(tasks.create_task(self._siblings.run()))
                if self.broker is not None:
                    others.append(tasks.create_task(self.broker.run()))
                taking = tasks.create_task(self._broker_door.run()) if self._broker_door else None
                self._ready = True
                self.started.set()
                await self._stop.wait()
                self._ready = False
                if self._broker_door and taking:
                    self._broker_door.drain()
                    await taking
                self.engine.drain()
                await engine
                self._pulses.end()
                self._server.stop()
                await serving
                for task in others:
                    task.cancel()
        finally:
            self._pulses.end()
            await self.deliverer.close()
            if self.broker is not None:
                await self.broker.close()
            await self.store.close()

    async def _watch_store(self) -> None:
        raise await self.store.failure()


def prepare_interpreter() -> None:
    """For one event loop beside a writing thread, with many objects that come and go and make no circles."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    gc.set_threshold(*GARBAGE)


async def serve(settings: Settings, *, virtual_clock: bool = False, place: Place | None = None) -> None:
    """Run one node in the foreground until a signal ends it; or, as a worker, until standard input ends, too."""
    node = Node(settings, virtual_clock=virtual_clock, place=place)
    loop = asyncio.get_running_loop()
    if place is not None:
        loop.add_reader(sys.stdin.fileno(), _on_end_of_input, node)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, node, number)
    announcing = asyncio.create_task(_announce(node))
    try:
        await node.run()
    finally:
        announcing.cancel()
    log.info("stopped")


def _on_signal(node: Node, number: int) -> None:
    log.info("%s: finishing what is in flight, then stopping", signal.Signals(number).name)
    node.stop()


def _on_end_of_input(node: Node) -> None:
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    log.error("the process that started this one is gone: finishing what is in flight, then stopping")
    node.stop()


async def serve_many(settings: Settings) -> int:
    """Run ``DUETIME_WORKERS`` processes on one port in the foreground until a signal ends them; their exit code."""
    if settings.auth == "key":
        ensure_api_key(settings, Path.cwd())  # before the workers, who would all make one
    listener = bind(settings.host, settings.port)
    listener.set_inheritable(True)
    log.info("%d workers share port %d", settings.workers, listener.getsockname()[1])
    try:
        directory = tempfile.TemporaryDirectory(prefix="duetime-")
    except OSError as error:
        raise SettingsError(
            f"DUETIME_WORKERS: need a directory for their sockets, which TMPDIR may name: {error}"
        ) from error
    with directory as siblings:
        return await Workers(settings.workers, listener, Path(siblings)).run()


async def _announce(node: Node) -> None:
    await node.started.wait()
    settings = node.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    shown = "localhost" if host in ("127.0.0.1", "0.0.0.0") else host
    log.info("Duetime %s is listening on http://%s:%d", __version__, shown, node.port)
    log.info("timers are kept in %s", settings.database_shown)
    descriptors.report(node.descriptors)
    if settings.auth != "key":
        log.warning("DUETIME_AUTH=none: anyone who can reach this port can use it")
    elif node.key_path is not None:
        log.info("the API key is in %s", node.key_path)
    if settings.allow_private_targets is None and settings.api_key is None:
        log.info("no API_KEY is set, so this is a developer's machine: callbacks may go to loopback addresses")
    if node.virtual_clock:
        log.warning('--virtual-clock: POST /clock {"advance": "3d"} moves time; for development only')
