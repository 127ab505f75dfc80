"""The receiver, in its own process, so that its timestamps are not delayed by the clients.

It writes a line for each request before it responds. Mostly it responds at once, sometimes slowly, so that attempts are
always in flight. The response to the first firing of a timer with the payload ``again`` reschedules it. The process
ends when its standard input is closed, and so with its parent.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.ledger import Callback
from tests.servers import PATIENCE_SECONDS, Received, Receiver, Reply, printed

DELAYS_SECONDS = (0.0, 0.0, 0.0, 0.0, 0.02, 0.1, 0.4)
AGAIN_SECONDS = (1.2, 2.5)
AGAIN = "again"


class ReceiverProcess:
    def __init__(self, directory: Path, seed: int) -> None:
        self._path = directory / "received.jsonl"
        self._path.touch()
        self._read_to = 0
        self._callbacks: list[Callback] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(self._path), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}/"

    def callbacks(self) -> list[Callback]:
        """The requests so far."""
        with open(self._path, "rb") as file:
            file.seek(self._read_to)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._callbacks += [Callback(*json.loads(line)) for line in whole.splitlines()]
        return self._callbacks

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.stdout.close()


def main(path: str, seed: int) -> None:
    draw = random.Random(seed)
    again: dict[str, str] = {}  # timer → the delivery id of its first firing

    with open(path, "a", buffering=1) as file, Receiver() as receiver:

        def decide(request: Received) -> Reply:
            body = json.loads(request.body)
            id, webhook_id = body["id"], request.headers["webhook-id"]
            reply = Reply(delay_seconds=draw.choice(DELAYS_SECONDS))
            next_ms = None
            if body["payload"] == AGAIN and again.setdefault(id, webhook_id) == webhook_id:
                next_ms = int((time.time() + draw.uniform(*AGAIN_SECONDS)) * 1000)
                named = printed(datetime.fromtimestamp(next_ms / 1000, UTC))
                reply.body = json.dumps({"ok": False, "nextExecuteAt": named}).encode()
            at_ms = round(datetime.fromisoformat(body["executeAt"]).timestamp() * 1000)
            answered_ns = request.at_ns + int(reply.delay_seconds * 1e9)
            attempt = int(request.headers["duetime-attempt"])
            line = [id, at_ms, webhook_id, attempt, request.at_ns, answered_ns, next_ms]
            file.write(json.dumps(line) + "\n")
            return reply

        receiver.decide(decide)
        print(receiver.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
