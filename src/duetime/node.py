"""The composition root: builds all parts from the settings, runs them, and stops them in order."""

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

from duetime import descriptors
from duetime.activity import Activity
from duetime.brokers.nats import Names, NatsBroker
from duetime.clock import Clock, SystemClock, VirtualClock
from duetime.databases import database_of
from duetime.deliverer import Deliverer
from duetime.deliverers.broker import BrokerDeliverer
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.doors.broker import BrokerDoor
from duetime.doors.connection_limits import ConnectionLimits
from duetime.doors.event_stream import Pulses, PulsesDoor
from duetime.doors.http import Application, Door, Keys
from duetime.doors.http_v1 import HttpV1Door
from duetime.doors.monitoring import MonitoringDoor
from duetime.doors.openapi import document
from duetime.doors.openapi_texts import ABOUT, HTTP_V1, PLATFORM
from duetime.doors.origins import OriginGuard
from duetime.doors.overview import Overview
from duetime.doors.platform import PlatformDoor
from duetime.doors.reference import ReferenceDoor
from duetime.doors.server import Server, bind
from duetime.doors.sessions import CookieSessions, SessionDoor
from duetime.doors.web import WebDoor
from duetime.doors.wrong_keys import WrongKeys
from duetime.engine.engine import Engine, EngineOptions
from duetime.errors import SettingsError
from duetime.model import FOREVER_MS, HttpTarget, NatsTarget
from duetime.namespaces import Namespaces
from duetime.service import Service
from duetime.settings import Settings
from duetime.settings.keyfile import ensure_api_key
from duetime.store import About, Hint, Store
from duetime.stores.connecting import Misconfigured
from duetime.stores.memory import MemoryStore
from duetime.stores.sqlite.store import SqliteStore
from duetime.telemetry import Telemetry
from duetime.version import __version__
from duetime.worker_metrics import WorkerMetrics
from duetime.workers import WorkerContext, Workers

log = logging.getLogger("duetime")

GARBAGE = (20_000, 20, 20)
"""GC thresholds: the number of new objects before reference cycles are collected. Timers create no cycles, and with the
default thresholds, GC took a tenth of the time of a delivery."""
SWITCH_SECONDS = 0.0005
"""The interpreter's thread switch interval. A commit waits for it several times, so the default of 5 ms would cause
most of a timer's lateness under load."""


def build_store(settings: Settings, clock: Clock, *, virtual: bool) -> Store:
    if (database := database_of(settings.database_url)) is not None:
        store: Store = database.load()(
            settings.database_url,
            shards=settings.shards,
            retention_ms=_retention_ms(settings),
            takeover_now=settings.takeover == "now",
            virtual_clock=clock if virtual else None,
        )
        return store
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
        allow_loopback=settings.loopback_targets,
        allow=allowed if isinstance(allowed, tuple) else (),
    )


class Node:
    """One running instance."""

    def __init__(self, settings: Settings, *, virtual_clock: bool = False, worker: WorkerContext | None = None) -> None:
        self.settings = settings
        self._worker = worker
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
        self._worker_metrics = (
            WorkerMetrics(worker.metrics_directory, worker.name, self.telemetry.own_page) if worker else None
        )
        self.store = build_store(settings, clock, virtual=virtual_clock)
        self.deliverer = HttpDeliverer(
            egress=build_egress(settings, clock),
            clock=clock,
            keys_of=lambda namespace: self.namespaces.signing_keys(namespace),
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
            weight=lambda namespace: self.namespaces.weight(namespace),
        )
        self.namespaces = Namespaces(
            self.store,
            self.engine.clock,
            self.engine.nudge,
            auto=settings.auto_namespaces,
            number_max=settings.max_namespaces,
        )
        self.service = Service(self.store, self.namespaces, deliverers, self.engine.clock, self.engine.nudge)
        self.store.on_hint(self._heard)
        # Sessions and wrong keys use the machine's clock, never a virtual one.
        machine = SystemClock()
        sessions = None if api_key is None else CookieSessions(api_key, machine, self.store)
        keys = Keys(api_key, sessions, WrongKeys(machine, self.telemetry))
        platform = PlatformDoor(self.service, keys, self.telemetry, request_bytes_max=settings.max_request_bytes)
        self._activity = Activity(
            self.service.cluster, self.telemetry, self.service.clock, owner_id=self.engine.ownership.owner_id
        )
        self._pulses = Pulses(self.service, self._activity)
        http_v1 = HttpV1Door(
            self.service,
            self.namespaces,
            keys,
            self.telemetry,
            Overview(self.service, self._activity, shards=settings.shards),
            request_bytes_max=settings.max_request_bytes,
            batch_bytes_max=settings.max_batch_bytes,
            shards=settings.shards,
            timeout_ms_max=settings.max_callback_timeout_ms,
        )
        monitoring = MonitoringDoor(
            self.service,
            keys,
            keys if settings.metrics_auth == "key" else Keys(None),
            self.telemetry,
            self._worker_metrics,
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
        apis = [
            (HTTP_V1, http_v1.operations()),
            (PLATFORM, [*platform.operations(), *monitoring.operations()]),
        ]
        reference = ReferenceDoor(document(ABOUT, apis, version=__version__), refusal=http_v1.refusal)
        pulses = PulsesDoor(self._pulses, keys, refusal=http_v1.refusal)
        session = SessionDoor(
            keys, sessions, self.store.abilities, secure=settings.cookie_secure, refusal=http_v1.refusal
        )
        web = WebDoor(refusal=http_v1.refusal)
        doors: list[Door] = [platform, http_v1, monitoring, reference, pulses, session, web]
        self._server = Server(
            Application(
                doors,
                fallback=platform,
                under={"/api/": http_v1},
                guard=None if keys.needed else OriginGuard(settings.host, settings.allowed_hosts),
            ),
            ConnectionLimits(self.descriptors.inbound_max, self.telemetry, key_needed=keys.needed),
            bodies_bytes_max=settings.bodies_bytes_max,
        )
        self._ready = False
        self._stop = asyncio.Event()
        self.started = asyncio.Event()
        self.port = settings.port

    def _heard(self, hint: Hint) -> None:
        self.engine.heard(hint)
        self.namespaces.heard(hint)

    def stop(self) -> None:
        """Make ``run`` drain and return."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until ``stop`` is called or the store fails."""
        prepare_interpreter()
        listener = self._worker.listener if self._worker else bind(self.settings.host, self.settings.port)
        self.port = listener.getsockname()[1]
        opened = False
        try:
            opened = await self._open_store()
        finally:
            if not opened:
                listener.close()
        if not opened:
            return
        try:
            await self.namespaces.start()
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._server.serve(listener))
                engine = tasks.create_task(self.engine.run())
                loops = (
                    *(self._watch_store(), self.engine.watchdog.run()),
                    *(self.namespaces.run(), self._activity.run(), self._pulses.run()),
                )
                others = [tasks.create_task(loop) for loop in loops]
                if self._worker_metrics is not None:
                    others.append(tasks.create_task(self._worker_metrics.run()))
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

    async def _open_store(self) -> bool:
        """Open the store, which may wait for its database. Returns False if ``stop`` was called meanwhile."""
        opening = asyncio.create_task(self.store.open())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            opening.cancel()  # without effect if it is done
            await asyncio.wait((opening, stopping))
        if opening.cancelled():
            return False
        try:
            opening.result()
        except Misconfigured as error:
            raise SettingsError(f"DATABASE_URL: {error}") from error
        return True

    async def _watch_store(self) -> None:
        raise await self.store.failure()


def prepare_interpreter() -> None:
    """Tune the interpreter for one event loop beside a writer thread, with many short-lived objects without cycles."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    gc.set_threshold(*GARBAGE)


async def serve(settings: Settings, *, virtual_clock: bool = False, worker: WorkerContext | None = None) -> None:
    """Run one node in the foreground until a signal stops it; a worker also stops when its standard input is closed."""
    node = Node(settings, virtual_clock=virtual_clock, worker=worker)
    loop = asyncio.get_running_loop()
    if worker is not None:
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
    log.info("%s: finishing attempts in flight, then stopping", signal.Signals(number).name)
    node.stop()


def _on_end_of_input(node: Node) -> None:
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    log.error("the parent process is gone: finishing attempts in flight, then stopping")
    node.stop()


async def serve_many(settings: Settings) -> int:
    """Run ``DUETIME_WORKERS`` processes on one port in the foreground until a signal stops them; the exit code."""
    if settings.auth == "key":
        ensure_api_key(settings, Path.cwd())  # before the workers start, or each would generate one
    listener = bind(settings.host, settings.port)
    listener.set_inheritable(True)
    log.info("%d workers share port %d", settings.workers, listener.getsockname()[1])
    try:
        directory = tempfile.TemporaryDirectory(prefix="duetime-")
    except OSError as error:
        raise SettingsError(
            f"DUETIME_WORKERS: could not create a temporary directory for the workers' sockets (set TMPDIR): {error}"
        ) from error
    with directory as metrics_directory:
        return await Workers(settings.workers, listener, Path(metrics_directory)).run()


async def _announce(node: Node) -> None:
    await node.started.wait()
    settings = node.settings
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    shown = "localhost" if host == "127.0.0.1" else host
    log.info("Duetime %s is listening on http://%s:%d", __version__, shown, node.port)
    log.info("timers are stored in %s", settings.database_shown)
    descriptors.report(node.descriptors)
    if settings.auth != "key":
        log.warning("DUETIME_AUTH=none: anyone who can reach this port can use it")
    elif node.key_path is not None:
        log.info("the API key is in %s", node.key_path)
    if settings.loopback_targets:
        log.info("API_KEY is not set, so callbacks may go to loopback addresses (for development)")
    if node.virtual_clock:
        log.warning('--virtual-clock: POST /clock {"advance": "3d"} moves the time forward; for development only')
        if settings.on_server or settings.database_path:
            log.warning(
                "the virtual clock also fires the timers in %s; use DATABASE_URL=memory: for tests",
                settings.database_shown,
            )
