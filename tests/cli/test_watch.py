"""``duetime watch`` in a pipe and on a terminal; questions, progress and tables on a terminal."""

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
from pathlib import Path

import pytest

from duetime.client import Client
from tests.cli.conftest import COMMAND, Shell, interruptible, started
from tests.servers import PATIENCE_SECONDS, Receiver, Reply

URL = "http://127.0.0.1:9/never"


def fresh() -> str:
    return uuid.uuid4().hex


def test_watch_follows_one_timer_until_it_completes(shell: Shell, receiver: Receiver) -> None:
    id = fresh()
    slow = receiver.reply(f"/{id}", Reply(delay_seconds=2.5))  # so that watch polls more than once while it executes
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
    assert statuses.count("pending") <= 2 and statuses.count("executing") <= 1  # only changes are printed
    [timer] = shell.json_lines("watch", id)
    assert timer["status"] == "completed"


def test_watch_exits_with_1_if_the_timer_fails(shell: Shell, receiver: Receiver) -> None:
    id = fresh()
    shell.good("create", "--in", "0s", "--url", receiver.reply(f"/{id}", Reply(500)), "--id", id, "--retries", "0")
    ran = shell.run("watch", id)
    assert ran.returncode == 1 and "failed" in ran.stdout and not ran.stderr
    ran = shell.run("watch", id, "--json")
    assert ran.returncode == 1 and json.loads(ran.stdout)["status"] == "failed"
    assert "not found" in shell.bad(1, "watch", fresh())


def test_watch_follows_all_timers_until_ctrl_c(shell: Shell, receiver: Receiver) -> None:
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
    with started(shell, "watch", "--namespace", namespace, "--json") as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["id"] for _ in range(2)] == ["now", "later"]


class Terminal:
    """A command that runs on its own terminal."""

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


def test_watch_redraws_one_timer_in_place(shell: Shell, receiver: Receiver) -> None:
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


def test_watch_fits_the_terminal(shell: Shell) -> None:
    namespace = fresh()
    with Client(shell.env["TIMER_URL"], shell.env["API_KEY"]) as client:
        client.create_namespace(namespace)
        for n in range(12):
            client.create(delay="1h", callback_url=URL, namespace=namespace, id=f"{n:0>200}")
    for rows, columns in ((24, 60), (12, 260)):
        with Terminal(shell, "watch", "--namespace", namespace, rows=rows, columns=columns) as terminal:
            terminal.until(r"\x1b\[\d+F\x1b\[J[^\0]*no finished timers")
            os.kill(terminal.process.pid, signal.SIGINT)
            assert terminal.end() == 130
        assert "Traceback" not in terminal.text
        first, up, _ = re.split(r"\x1b\[(\d+)F", terminal.text, maxsplit=2)[:3]
        lines = re.sub(r"\x1b\[\d*[mJ]", "", first).split("\r\n")[:-1]
        assert f"{namespace}/{0:0>200}  " in first  # whole, if need be wrapped
        drawn = sum(max(1, -(-len(line) // columns)) for line in lines)
        assert drawn == int(up) < rows, "the next drawing begins where the first began"


@pytest.mark.parametrize("command", ["cancel", "replay"])
@pytest.mark.parametrize("answer", ["y", ""])
def test_bulk_commands_show_the_count_and_ask(shell: Shell, command: str, answer: str) -> None:
    id = fresh()
    with Client(shell.env["TIMER_URL"], shell.env["API_KEY"]) as client:
        client.batch({"delay": "1h", "callback_url": URL, "correlation_id": id} for _ in range(3))
        if command == "replay":
            assert client.cancel_all(correlation_id=id) == 3
    status = {"cancel": [], "replay": ["--status", "canceled"]}[command]
    before, after = {"cancel": ("pending", "canceled"), "replay": ("canceled", "replayed")}[command]
    with Terminal(shell, command, *status, "--correlation-id", id) as terminal:
        question = rf"{command.capitalize()} 3 {before} timers in all namespaces with correlation id {id}\? \[y/N\] "
        terminal.until(question)
        terminal.type(f"{answer}\n")
        assert terminal.end() == (0 if answer else 2)
    left = shell.good("count", "--correlation-id", id, "--status", before)
    if answer:
        assert f"{after} 3 of 3" in terminal.text and f"3 timers {after}" in terminal.text and left == "0\n"
    else:
        assert f"nothing was {after}" in terminal.text and left == "3\n"


@pytest.mark.parametrize("answer", ["y", "n"])
def test_delete_asks_first(shell: Shell, answer: str) -> None:
    id = fresh()
    shell.good("create", "--in", "1h", "--url", URL, "--id", id)
    with Terminal(shell, "delete", id) as terminal:
        terminal.until(rf"Delete default/{id} for good\? \[y/N\] ")
        terminal.type(f"{answer}\n")
        assert terminal.end() == (0 if answer == "y" else 2)
    assert shell.run("get", id).returncode == (1 if answer == "y" else 0)


def printed(terminal: Terminal) -> list[str]:
    """The lines of a command that succeeds, without colors."""
    with terminal:
        assert terminal.end() == 0
    return re.sub(r"\x1b\[\d*m", "", terminal.text).splitlines()


def test_ids_are_whole_on_narrow_terminals(shell: Shell) -> None:
    group, namespace = str(uuid.uuid4()), "n" * 64
    shell.good("namespaces", "create", namespace)
    url = f"http://127.0.0.1:9/{'long/' * 30}"
    create = ["create", "--in", "1h", "--url", url, "--correlation-id", group, "--json"]
    short, long = (json.loads(shell.good(*create, *more))["id"] for more in ([], ["--namespace", namespace]))
    assert len(short) == len(long) == 36
    listed = ["list", "--correlation-id", group]
    for columns, heads in (
        (80, "TIMER STATUS WHEN LAST ERROR"),
        (120, "TIMER STATUS WHEN ATTEMPTS TARGET LAST ERROR"),
        (150, "TIMER STATUS WHEN DUE ATTEMPTS TARGET LAST ERROR"),
    ):
        lines = printed(Terminal(shell, *listed, "--namespace", "default", columns=columns))
        assert " ".join(lines[0].split()) == heads and max(map(len, lines)) <= columns
        assert re.match(rf"default/{short}  pending  in (1h|59m)", lines[1]), lines
    lines = printed(Terminal(shell, *listed, columns=80))  # where the longer one wraps
    assert re.fullmatch(rf"{namespace}/{long}  pending  in (1h|59m \d+s)", lines[1]), lines
    assert re.fullmatch(rf"default/{short}  pending  in (1h|59m \d+s)", lines[2]), lines


def test_responses_are_shown_on_narrow_terminals(shell: Shell, receiver: Receiver) -> None:
    id = fresh()
    reply = Reply(200, body=b"order 7 is unknown " * 5)
    shell.good("create", "--in", "0s", "--url", receiver.reply(f"/{id}", reply), "--id", id, "--retries", "0")
    assert shell.run("watch", id).returncode == 1
    heads, line = printed(Terminal(shell, "attempts", id, columns=80))
    assert heads.split()[:2] == ["ATTEMPT", "WHEN"] and heads.split()[-2:] == ["ERROR", "RESPONSE"]
    assert "order 7 is unknow" in line and max(len(heads), len(line)) <= 80


def test_rows_fit_the_terminal(shell: Shell) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    url = f"http://127.0.0.1:9/{'long/' * 30}"
    shell.good("create", "--in", "1h", "--url", url, "--namespace", namespace, "--id", "a")
    lines = printed(Terminal(shell, "list", "--namespace", namespace, columns=130))
    assert len(lines) == 2 and max(map(len, lines)) <= 130 and lines[1].endswith("…") and f"{namespace}/a" in lines[1]
    assert url in shell.good("list", "--namespace", namespace)


def test_examples_of_the_docs_work_when_pasted(shell: Shell, receiver: Receiver) -> None:
    """All examples in one shell, unchanged except for the ports."""
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    examples = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 6
    script = "\n".join(examples).replace("http://localhost:8080", receiver.base).replace("/tmp/", f"{shell.directory}/")
    script = f'set -euo pipefail\nduetime() {{ {" ".join(COMMAND)} "$@"; }}\n{script}'
    ran = subprocess.run(
        ["bash", "-c", script], cwd=shell.directory, env=shell.env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and not re.search("duetime: (?!--)", ran.stderr), ran
    assert ran.stdout.endswith("completed\n") and "default/order-7  deleted" in ran.stdout
    assert re.search(r"shop/cart-1  completed", ran.stdout)
