"""Real Cassandra for tests: nodes that can be paused, killed, emptied, cut off and restarted.

``make cassandra`` fetches the program. A cluster of three nodes has the addresses 127.0.0.1 to 127.0.0.3 and the same
ports on each; with a ``Network`` of its own, which needs root, it has an address in a network namespace per node. The
nodes stop with the process that started them.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from duetime.stores.cassandra.driver import Session, is_ready
from duetime.stores.cassandra.schema import TABLES
from tests.ports import free_port
from tests.postgres import Missing
from tests.server_process import ServerProcess, die_with_parent
from tests.servers import NotStarted, until

_SERVERS = Path(__file__).parents[1] / ".servers"
JARS = _SERVERS / "cassandra/lib"
FAKETIME = _SERVERS / "faketime/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
START_SECONDS_MAX = 180.0
TOOL_SECONDS_MAX = 120.0

_EXPORTED = (
    *("java.base/java.lang.ref", "java.base/java.lang.reflect", "java.base/jdk.internal.misc"),
    *("java.base/jdk.internal.ref", "java.base/sun.nio.ch", "java.management.rmi/com.sun.jmx.remote.internal.rmi"),
    *("java.rmi/sun.rmi.registry", "java.rmi/sun.rmi.server", "java.rmi/sun.rmi.transport.tcp", "java.sql/java.sql"),
    *("jdk.attach/sun.tools.attach", "jdk.unsupported/sun.misc"),
)
_OPENED = (
    *("java.base/java.io", "java.base/java.lang", "java.base/java.lang.module", "java.base/java.lang.reflect"),
    *("java.base/java.net", "java.base/java.nio", "java.base/java.util", "java.base/java.util.concurrent"),
    *("java.base/java.util.concurrent.atomic", "java.base/jdk.internal.loader", "java.base/jdk.internal.math"),
    *("java.base/jdk.internal.misc", "java.base/jdk.internal.module", "java.base/jdk.internal.ref"),
    *("java.base/jdk.internal.reflect", "java.base/jdk.internal.util.jar", "java.base/sun.nio.ch"),
    *("jdk.compiler/com.sun.tools.javac.file", "jdk.management/com.sun.management.internal"),
    "jdk.management.agent/jdk.internal.agent",
)
"""Packages of Java that Cassandra uses and that Java 17 hides."""

_YAML = """\
cluster_name: duetime
num_tokens: 4
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
data_file_directories: [{folder}/data]
commitlog_directory: {folder}/commitlog
hints_directory: {folder}/hints
saved_caches_directory: {folder}/caches
cdc_raw_directory: {folder}/cdc
commitlog_sync: {sync}
{period}
commitlog_total_space: 512MiB
disk_failure_policy: stop
commit_failure_policy: stop
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{{seeds: "{seed}:{storage_port}"}}]
listen_address: {address}
rpc_address: {address}
storage_port: {storage_port}
native_transport_port: {port}
endpoint_snitch: SimpleSnitch
dynamic_snitch: false
concurrent_writes: 64
memtable_heap_space: 64MiB
memtable_offheap_space: 64MiB
file_cache_size: 64MiB
networking_cache_size: 16MiB
key_cache_size: 8MiB
auto_snapshot: false
paxos_variant: v2
tombstone_warn_threshold: 500
tombstone_failure_threshold: 1000
"""
_LOGGING = """\
<configuration>
  <appender name="file" class="ch.qos.logback.core.FileAppender">
    <file>{folder}/log</file>
    <encoder><pattern>%-5level %date{{ISO8601}} %logger{{20}} %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="file"/></root>
</configuration>
"""


class Network:
    """A network namespace per node, connected by a bridge to this one. Needs root."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise Missing("a network of its own needs root, and ip (package iproute2)")
        self._name = f"dt{os.getpid() % 100_000}"
        self._subnet = f"10.213.{os.getpid() % 250 + 1}"
        self._made: list[str] = []
        _ip(f"link add {self._name} type bridge")
        try:
            _ip(f"addr add {self._subnet}.254/24 dev {self._name}")
            _ip(f"link set {self._name} up")
        except BaseException:
            self.close()
            raise

    def address(self, number: int) -> str:
        return f"{self._subnet}.{number}"

    def add(self, number: int) -> list[str]:
        """Make the namespace of a node. Return what runs a command in it."""
        space = f"{self._name}n{number}"
        _ip(f"netns add {space}")
        self._made.append(space)
        _ip(f"link add {self._name}v{number} type veth peer name eth0 netns {space}")
        _ip(f"link set {self._name}v{number} master {self._name} up")
        inside = f"netns exec {space} ip"
        _ip(f"{inside} addr add {self.address(number)}/24 dev eth0")
        _ip(f"{inside} link set eth0 up")
        _ip(f"{inside} link set lo up")
        return ["ip", "netns", "exec", space]

    def cut(self, number: int, others: Iterable[int]) -> None:
        """Drop everything between this node and the others; all still reach their clients."""
        for other in others:
            for one, two in ((number, other), (other, number)):
                _ip(f"netns exec {self._name}n{one} ip route add blackhole {self.address(two)}/32")

    def mend(self, number: int, others: Iterable[int]) -> None:
        for other in others:
            for one, two in ((number, other), (other, number)):
                _ip(f"netns exec {self._name}n{one} ip route del blackhole {self.address(two)}/32")

    def close(self) -> None:
        for space in self._made:
            subprocess.run(["ip", "netns", "del", space], check=False)
        for link in subprocess.run(["ls", "/sys/class/net"], capture_output=True, text=True, check=True).stdout.split():
            if re.fullmatch(rf"{self._name}(v\d+)?", link):
                subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


class Node(ServerProcess):
    """One node, with its own address and data."""

    def __init__(
        self, folder: Path, address: str, seed: str, ports: tuple[int, int], sync: str, within: Sequence[str] = ()
    ) -> None:
        self.address = address
        self._folder = folder
        self._port, storage_port = ports
        self._within = list(within)
        self._jmx_port = free_port()
        folder.mkdir(parents=True)
        period = "commitlog_sync_period: 10000ms" if sync == "periodic" else ""
        settings = {"folder": folder, "address": address, "port": self._port, "storage_port": storage_port}
        (folder / "cassandra.yaml").write_text(_YAML.format(sync=sync, period=period, seed=seed, **settings))
        (folder / "logback.xml").write_text(_LOGGING.format(folder=folder))

    def start(self, *, replaces: bool = False, clock_ms: int = 0) -> None:
        """Start or restart the node and wait until it serves clients. ``replaces``: it has lost its data and gets it
        from the others. ``clock_ms``: how far its clock is off."""
        assert self.process is None, "is running already"
        options = ["-Xms512m", "-Xmx512m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-Xss512k"]
        options += ["-Djdk.attach.allowAttachSelf=true", "-Dio.netty.tryReflectionSetAccessible=true"]
        options += [
            f"-javaagent:{next(JARS.glob('jamm-*.jar'))}",
            f"-Dlogback.configurationFile={self._folder}/logback.xml",
        ]
        options += [
            f"-Dcassandra.config=file://{self._folder}/cassandra.yaml",
            f"-Dcassandra.storagedir={self._folder}",
        ]
        options += [f"-Dcassandra.jmx.local.port={self._jmx_port}", "-Dcassandra-foreground=yes"]
        options += ["-Dcassandra.skip_wait_for_gossip_to_settle=0", "-Dcassandra.ring_delay_ms=3000"]
        options += ["-Dcassandra.superuser_setup_delay_ms=0"]
        if replaces:
            options.append(f"-Dcassandra.replace_address_first_boot={self.address}")
        clock = {}
        if clock_ms:
            clock = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{clock_ms / 1000:+.3f}s", "DONT_FAKE_MONOTONIC": "1"}
        with open(self._folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [*self._java, *options, *self._classes, "org.apache.cassandra.service.CassandraDaemon"],
                cwd=self._folder,
                env=os.environ | clock,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            until(f"Cassandra on {self.address} is ready", self._is_ready, START_SECONDS_MAX)
        except BaseException:
            self.kill()
            raise

    @property
    def _java(self) -> list[str]:
        options = [f"--add-exports={package}=ALL-UNNAMED" for package in _EXPORTED]
        return [*self._within, "java", *options, *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED)]

    @property
    def _classes(self) -> list[str]:
        return ["-cp", f"{self._folder}:{JARS}/*"]

    def tool(self, *arguments: str) -> str:
        """Run ``nodetool`` on this node. Return its output."""
        options = ["-Xmx128m", "-Dcom.sun.jndi.rmiURLParsing=legacy", f"-Dcassandra.storagedir={self._folder}"]
        command = [*self._java, *options, *self._classes, "org.apache.cassandra.tools.NodeTool"]
        done = subprocess.run(
            [*command, "-h", "127.0.0.1", "-p", str(self._jmx_port), *arguments],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS_MAX,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wipe(self) -> None:
        """Lose all data."""
        assert self.process is None, "is running"
        for name in ("data", "commitlog", "hints", "caches", "cdc"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise NotStarted(f"Cassandra ended with {self.process.returncode}: {self.log}")
        return is_ready(self.address, self._port)

    @property
    def log(self) -> str:
        """The end of the node's output and of its log."""
        files = [self._folder / "output", self._folder / "log"]
        return "\n".join(file.read_text(errors="replace")[-4_000:] for file in files if file.exists())


class Cassandra:
    """A cluster. ``sync`` is how the commit log is synced: batch, group or periodic. With ``own_network``, its nodes
    can be cut off from each other."""

    def __init__(self, nodes: int = 1, *, sync: str = "batch", own_network: bool = False) -> None:
        self.check()
        self._network = Network() if own_network else None
        self.directory = Path(tempfile.mkdtemp(prefix="cassandra-"))
        self.port = free_port()
        self._ports = self.port, free_port()
        self._sync = sync
        self.nodes: list[Node] = []
        self._names = (f"test_{number}" for number in itertools.count(1))
        self._session: Session | None = None
        try:
            for _ in range(nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check() -> None:
        """Raise ``Missing`` if it can't run here."""
        if shutil.which("java") is None:
            raise Missing("Cassandra can't run: Java is not installed (17 or 11)")
        if not JARS.exists():
            raise Missing("Cassandra is not downloaded: make cassandra (needs Maven)")

    def start(self) -> None:
        """Start the nodes that do not run."""
        for node in self.nodes:
            if node.process is None:
                node.start()

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def _address(self, number: int) -> str:
        return f"127.0.0.{number}" if self._network is None else self._network.address(number)

    def add_node(self) -> Node:
        """Start another node, which joins the others."""
        number = len(self.nodes) + 1
        within = [] if self._network is None else self._network.add(number)
        folder = self.directory / f"node{number}"
        node = Node(folder, self._address(number), self._address(1), self._ports, self._sync, within)
        self.nodes.append(node)
        node.start()
        return node

    def cut(self, node: Node) -> None:
        """Cut a node off from the others, but not from the clients."""
        assert self._network is not None
        self._network.cut(*self._places(node))

    def mend(self, node: Node) -> None:
        assert self._network is not None
        self._network.mend(*self._places(node))

    def _places(self, node: Node) -> tuple[int, list[int]]:
        place = self.nodes.index(node)
        return place + 1, [number + 1 for number in range(len(self.nodes)) if number != place]

    def url(self, keyspace: str) -> str:
        return f"cassandra://{','.join(f'{node.address}:{self.port}' for node in self.nodes)}/{keyspace}"

    def run(self, statement: str, *arguments: Any) -> list[Any]:
        """Run a statement, with or without a running event loop."""
        if self._session is None:
            self._session = Session([(node.address, self.port) for node in self.nodes])
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._session.connect).result()
        return self._session.run(statement, arguments)

    def fresh(self) -> str:
        """The URL of a new, empty keyspace."""
        name = next(self._names)
        replication = f"{{'class': 'NetworkTopologyStrategy', 'replication_factor': {len(self.nodes)}}}"
        self.run(f"CREATE KEYSPACE {name} WITH replication = {replication}")
        return self.url(name)

    def give_back(self, url: str) -> None:
        self.run(f"DROP KEYSPACE {url.rpartition('/')[2]}")

    def remember(self, url: str) -> None:
        """Nothing to do: a store fills an empty database when it is opened."""

    def restore(self, url: str) -> bool:
        """Empty the database, which is much faster than a new one."""
        for table in TABLES:
            self.run(f"TRUNCATE {url.rpartition('/')[2]}.{table}")
        return True

    def close(self) -> None:
        """Stop all nodes and remove their data."""
        if self._session is not None:
            self._session.close()
        for node in self.nodes:
            node.kill()
        if self._network is not None:
            self._network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Cassandra:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
