"""``duetime watch`` into a pipe and on a terminal, to its end and to Ctrl-C."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from duetime.client import Client
from tests.cli.conftest import COMMAND, Shell, interruptible
from tests.servers import PATIENCE_SECONDS, Receiver, Reply

URL = "http://127.0.0.1:9/never"


def fresh() -> str:
    return uuid.uuid4().hex


@contextlib.contextmanager
def started(shell: Shell, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command whose lines can be read while it runs."""
    with interruptible():
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=shell.directory,
            env=shell.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_one_timer_to_its_end(shell: Shell, receiver: Receiver) -> None:
    id = fresh()
    slow = receiver.reply(f"/{id}", Reply(delay_seconds=2.5))  # so that it is seen more than once while it executes
    shell.good("create", "--in", "1h", "--url", slow, "--id", id)
    with started(shell, "watch", id) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        shell.good("update", id, "--in", "0s")
        lines += process.stdout.readlines()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert re.match(rf"default/{id}  pending  due ", lines[0])
    assert re.match(rf"default/{id}  completed  ", lines[-1])
    statuses = [line.split()[1] for line in lines]
    assert statuses.count("pending") <= 2 and statuses.count("executing") <= 1  # what did not change is not told again
    assert shell.json("watch", id)["status"] == "completed"


def test_one_timer_that_fails(shell: Shell, receiver: Receiver) -> None:
    id = fresh()
    shell.good("create", "--in", "0s", "--url", receiver.reply(f"/{id}", Reply(500)), "--id", id, "--retries", "0")
    ran = shell.run("watch", id)
    assert ran.returncode == 1 and "failed" in ran.stdout and not ran.stderr
    ran = shell.run("watch", id, "--json")
    assert ran.returncode == 1 and json.loads(ran.stdout)["status"] == "failed"
    assert "there is no timer" in shell.bad(1, "watch", fresh())


def test_everything_line_by_line_until_ctrl_c(shell: Shell, receiver: Receiver) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    shell.good("create", "--in", "1h", "--url", URL, "--namespace", namespace, "--id", "later")
    with started(shell, "watch", "--namespace", namespace) as process:
        assert process.stdout is not None and process.stderr is not None
        assert re.match(rf"{namespace}/later  pending  due in (1h|59m)", process.stdout.readline())
        shell.good("create", "--in", "0s", "--url", receiver.url("/x"), "--namespace", namespace, "--id", "now")
        line = process.stdout.readline()
        while "completed" not in line:
            assert f"{namespace}/now" in line
            line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 130
        assert process.stderr.read() == ""
    standing = shell.json("watch", "--namespace", namespace)
    assert [timer["id"] for timer in standing["due"]] == ["later"]
    assert [timer["id"] for timer in standing["finished"]] == ["now"]


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, shell: Shell, *arguments: str, rows: int = 24, columns: int = 100, **env: str) -> None:
        self.text = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        with interruptible():
            self.process = subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=shell.directory,
                env=shell.env | {"TERM": "xterm"} | env,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        os.close(theirs)

    def until(self, pattern: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text
            if select.select([self._ours], [], [], 1)[0]:
                self.text += self._decode(os.read(self._ours, 65536))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        code = self.process.wait(PATIENCE_SECONDS)
        with contextlib.suppress(OSError):  # Linux says EIO once the other side is closed
            while piece := os.read(self._ours, 65536):
                self.text += self._decode(piece)
        os.close(self._ours)
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_one_timer_is_drawn_in_place(shell: Shell, receiver: Receiver) -> None:
    id = fresh()
    shell.good("create", "--in", "1h", "--url", receiver.url(f"/{id}"), "--id", id)
    with Terminal(shell, "watch", id) as terminal:
        terminal.until("pending")
        shell.good("update", id, "--in", "0s")
        assert terminal.end() == 0
    assert "\x1b[1F\x1b[J" in terminal.text and "\x1b[32mcompleted\x1b[0m" in terminal.text
    with Terminal(shell, "get", id, NO_COLOR="1") as plain:
        assert plain.end() == 0
    assert "\x1b" not in plain.text and "completed" in plain.text


def test_everything_is_drawn_within_the_terminal(shell: Shell) -> None:
    namespace = fresh()
    with Client(shell.env["TIMER_URL"], shell.env["API_KEY"]) as client:
        client.create_namespace(namespace)
        for n in range(12):
            client.create(delay="1h", callback_url=URL, namespace=namespace, id=f"{n:0>200}")
    with Terminal(shell, "watch", "--namespace", namespace, rows=12, columns=60) as terminal:
        terminal.until(r"\x1b\[\d+F\x1b\[J[^\0]*nothing just finished")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.end() == 130
    assert "Traceback" not in terminal.text
    first = re.split(r"\x1b\[\d*F", terminal.text)[0]
    lines = re.sub(r"\x1b\[\d*[mJ]", "", first).split("\r\n")
    assert len(lines) <= 12 and max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("answer", "code", "says"), [("y\n", 0, "0 timers replayed"), ("\n", 2, "nothing was replayed")]
)
def test_a_replay_of_many_asks_first(shell: Shell, answer: str, code: int, says: str) -> None:
    with Terminal(shell, "replay", "--status", "failed", "--correlation-id", fresh()) as terminal:
        terminal.until(r"Fire up to 100 failed timers .*\? \[y/N\] ")
        terminal.type(answer)
        assert terminal.end() == code
    assert says in terminal.text


def test_the_examples_of_the_page_work_when_pasted(shell: Shell, receiver: Receiver) -> None:
    """All of them in one shell, as written but for the ports."""
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    examples = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 5
    script = "\n".join(examples).replace("http://localhost:8080", receiver.base).replace("/tmp/", f"{shell.directory}/")
    script = f'set -euo pipefail\nduetime() {{ {" ".join(COMMAND)} "$@"; }}\n{script}'
    ran = subprocess.run(
        ["bash", "-c", script], cwd=shell.directory, env=shell.env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and "duetime:" not in ran.stderr, ran
    assert ran.stdout.endswith("completed\n") and "default/order-7  removed" in ran.stdout
    assert re.search(r"shop/cart-1  completed", ran.stdout)
