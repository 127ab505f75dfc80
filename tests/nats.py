"""Real NATS for tests: ``Nats``, a server with JetStream on loopback that can be stopped, killed and restarted on the
same port and data; and ``Broker``, a synchronous client."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import nats
from nats.js.api import ConsumerConfig, StreamConfig

from tests.ports import free_port
from tests.server_process import ServerProcess
from tests.servers import PATIENCE_SECONDS, NotStarted, until

_PROGRAM = Path(sys.executable).parent / "nats-server"
_CONFIG = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{data}", sync_interval: always }}
"""


class Nats(ServerProcess):
    """One server with its own data. Acked messages are on disk."""

    def __init__(self) -> None:
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="nats-"))
        config = _CONFIG.format(port=self.port, data=self.directory / "data")
        (self.directory / "nats.conf").write_text(config)
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert self.process is None, "is running already"
        with open(self.directory / "log", "wb") as log:
            self.process = subprocess.Popen(
                [_PROGRAM, "-c", self.directory / "nats.conf"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            until("NATS is ready", self._is_ready)
        except BaseException:
            self.kill()
            raise

    def _is_ready(self) -> bool:
        assert self.process is not None
        log = (self.directory / "log").read_text(errors="replace")
        if self.process.poll() is not None:
            raise NotStarted(f"nats-server ended with {self.process.returncode}: {log}")
        return "Server is ready" in log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Broker:
    """A client with its own event loop and thread."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-broker", daemon=True)
        self._thread.start()
        self.client = self.run(nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_quiet))
        self.js = self.client.jetstream()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    def publish(self, subject: str, data: bytes, **headers: str) -> None:
        """Publish a message and wait for the ack of a stream."""
        self.run(self.js.publish(subject, data, headers=headers or None))

    def messages(self, stream: str, subject: str = ">") -> list[Any]:
        """All messages of a stream, oldest first, acked or not."""

        async def read() -> list[Any]:
            last = (await self.js.stream_info(stream)).state.last_seq
            found = []
            for number in range(1, last + 1):
                try:
                    message = await self.js.get_msg(stream, number)
                except nats.js.errors.NotFoundError:
                    continue
                if subject == ">" or message.subject == subject:
                    found.append(message)
            return found

        found: list[Any] = self.run(read())
        return found

    def make_stream(self, **config: Any) -> None:
        self.run(self.js.add_stream(StreamConfig(**config)))

    def make_consumer(self, stream: str, **config: Any) -> None:
        self.run(self.client.jsm().add_consumer(stream, ConsumerConfig(**config)))

    def consumer(self, stream: str, name: str) -> ConsumerConfig:
        config: ConsumerConfig = self.run(self.js.consumer_info(stream, name)).config
        return config

    def waiting(self, stream: str, name: str = "duetime") -> int:
        """The number of messages of a stream that a consumer has not acked yet."""
        info = self.run(self.js.consumer_info(stream, name))
        return int(info.num_pending + info.num_ack_pending)

    def close(self) -> None:
        self.run(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _quiet(_error: Exception) -> None:
    """Ignore errors: tests stop the server on purpose."""
