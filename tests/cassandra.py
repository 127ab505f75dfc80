"""Real Cassandra for tests: nodes on loopback addresses that can be paused, killed and restarted on the same data.

``make cassandra`` fetches the program. A cluster of three nodes has the addresses 127.0.0.1 to 127.0.0.3 and the same
ports on each. The nodes stop with the process that started them.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from duetime.stores.cassandra.driver import Session, is_ready
from duetime.stores.cassandra.schema import TABLES
from tests.ports import free_port
from tests.postgres import Missing
from tests.server_process import ServerProcess, die_with_parent
from tests.servers import NotStarted, until

JARS = Path(__file__).parents[1] / ".servers/cassandra/lib"
START_SECONDS_MAX = 180.0
STOP_SECONDS_MAX = 30.0

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
    parameters: [{{seeds: "127.0.0.1:{storage_port}"}}]
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


class Node(ServerProcess):
    """One node, with its own address and data."""

    def __init__(self, folder: Path, address: str, ports: tuple[int, int], sync: str) -> None:
        self.address = address
        self._folder = folder
        self._port, storage_port = ports
        folder.mkdir(parents=True)
        period = "commitlog_sync_period: 10000ms" if sync == "periodic" else ""
        settings = {"folder": folder, "address": address, "port": self._port, "storage_port": storage_port}
        (folder / "cassandra.yaml").write_text(_YAML.format(sync=sync, period=period, **settings))
        (folder / "logback.xml").write_text(_LOGGING.format(folder=folder))

    def start(self) -> None:
        """Start or restart the node and wait until it serves clients."""
        assert self.process is None, "is running already"
        options = [f"--add-exports={package}=ALL-UNNAMED" for package in _EXPORTED]
        options += [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
        options += ["-Xms512m", "-Xmx512m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-Xss512k"]
        options += ["-Djdk.attach.allowAttachSelf=true", "-Dio.netty.tryReflectionSetAccessible=true"]
        options += [
            f"-javaagent:{next(JARS.glob('jamm-*.jar'))}",
            f"-Dlogback.configurationFile={self._folder}/logback.xml",
        ]
        options += [
            f"-Dcassandra.config=file://{self._folder}/cassandra.yaml",
            f"-Dcassandra.storagedir={self._folder}",
        ]
        options += [f"-Dcassandra.jmx.local.port={free_port()}", "-Dcassandra-foreground=yes"]
        options += ["-Dcassandra.skip_wait_for_gossip_to_settle=0", "-Dcassandra.ring_delay_ms=3000"]
        options += ["-Dcassandra.superuser_setup_delay_ms=0"]
        main = ["-cp", f"{self._folder}:{JARS}/*", "org.apache.cassandra.service.CassandraDaemon"]
        with open(self._folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                ["java", *options, *main],
                cwd=self._folder,
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
    """A cluster of one or three nodes. ``sync`` is how the commit log is synced: batch, group or periodic."""

    def __init__(self, nodes: int = 1, *, sync: str = "batch") -> None:
        if shutil.which("java") is None:
            raise Missing("Cassandra can't run: Java is not installed (17 or 11)")
        if not JARS.exists():
            raise Missing("Cassandra is not downloaded: make cassandra (needs Maven)")
        self.directory = Path(tempfile.mkdtemp(prefix="cassandra-"))
        self.port = free_port()
        ports = self.port, free_port()
        self.nodes = [
            Node(self.directory / f"node{number}", f"127.0.0.{number}", ports, sync) for number in range(1, nodes + 1)
        ]
        self._names = (f"test_{number}" for number in itertools.count(1))
        self._session: Session | None = None
        try:
            for node in self.nodes:
                node.start()
        except BaseException:
            self.close()
            raise

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
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Cassandra:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
