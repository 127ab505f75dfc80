"""``duetime stats`` and ``duetime destinations``, and the examples in every ``--help``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from duetime.cli import _parser
from duetime.commands.completion import _nodes
from tests.cli.conftest import COMMAND, Shell
from tests.servers import Duetime, Receiver, Reply, until

URL = "http://127.0.0.1:9/never"


@pytest.fixture
def own(tmp_path: Path) -> Shell:
    """A shell for a server that the test starts."""
    return Shell(tmp_path, "")


def test_stats_and_destinations_summarize_the_service(own: Shell, receiver: Receiver) -> None:
    with Duetime(own.directory / "server") as service:
        own.env["TIMER_URL"] = f"http://127.0.0.1:{service.port}"
        assert own.run("destinations").stderr == "no failed timers\n"
        text = own.good("stats")
        assert re.search(r"^failures +none$", text, re.MULTILINE), text
    with Duetime(own.directory / "other") as service:
        own.env["TIMER_URL"] = f"http://127.0.0.1:{service.port}"
        own.good("create", "--in", "30m", "--url", URL)
        url = receiver.reply("/stats", Reply(status=500, body=b"out of stock"))
        own.good("create", "--in", "0s", "--url", url, "--retries", "0")
        until("the timer has failed", lambda: own.good("count", "--status", "failed") == "1\n")
        own.good("namespaces", "create", "held")
        own.good("namespaces", "pause", "held")
        own.good("create", "--in", "0s", "--url", url, "--namespace", "held")
        until("the timer is overdue", lambda: "1 in paused namespaces" in own.good("stats"))
        until("the lateness is known", lambda: "p50 " in own.good("stats"))
        text = own.good("stats")
        for line in (
            r"pending +2",
            r"failed +1",
            r"due soon +0 in the next minute, 1 in the next hour, 1 in the next 24 hours",
            r"overdue +1 in paused namespaces",
            r"attempts +[\d.]+ per second now, [\d.]+ on average over the last \d+ seconds",
            r"lateness +p50 [\d.]+ ms, p99 [\d.]+ ms \(measured .*\)",
            rf"failures +of the latest 1 failed timers: 1 at {re.escape(receiver.base)}",
            r"instances +1",
        ):
            assert re.search(rf"^{line}$", text, re.MULTILINE), (line, text)
        overview = own.json("stats")
        assert overview["statuses"]["failed"] == 1 and overview["overdueReasons"] == {"paused": 1}
        ran = own.run("destinations")
        assert re.search(rf"^{re.escape(receiver.base)} +1 +\d.* ago +.*500", ran.stdout, re.MULTILINE), ran
        assert ran.stderr == "counted in the latest 1 failed timer\n"
        assert own.json("destinations")["destinations"][0]["timers"] == 1


def test_examples_of_every_help_work_when_pasted(own: Shell) -> None:
    texts = {" ".join(node.path): node for node in _nodes(_parser(), ())}
    commands = [path for path in texts if path and " " not in path and path != "serve"]
    (own.directory / "duetime").mkdir()
    with Duetime(own.directory / "server") as service:
        url = f"http://127.0.0.1:{service.port}"
        own.env |= {"TIMER_URL": url, "HOME": str(own.directory), "XDG_CONFIG_HOME": str(own.directory)}
        (own.directory / "duetime/config.toml").write_text(f'[prod]\nserver = "{url}"\n')
        own.good("namespaces", "create", "shop", "--retention", "90d")
        for command in commands:
            examples = own.good(command, "--help").partition("examples:\n")[2]
            lines = re.findall(r"^  ((?:duetime|source) .*?)(?: {3,}.*)?$", examples, re.MULTILINE)
            assert 1 <= len(lines) <= 2, command
            for line in lines:
                for timer in ("order-7", "shop/cart-1"):
                    # An example may use a timer that was created before; a replay needs a finished one.
                    namespace, _, id = timer.rpartition("/")
                    own.run("delete", timer, "--yes")
                    if command != "create":
                        due = "0s" if command == "watch" else "10m"
                        where = ["--namespace", namespace] if namespace else []
                        own.good("create", "--in", due, "--url", URL, "--id", id, "--retries", "0", *where)
                    if command == "replay":
                        own.good("cancel", timer)
                if line.startswith("duetime watch"):
                    continue  # ends with Ctrl-C, or with a receiver: see test_watch.py
                line = line.replace("http://localhost:3000", url).replace("~/.config/fish/completions", ".")
                if command == "delete" and "--yes" not in line:
                    line += " --yes"  # there is no terminal to ask on
                script = f'set -e\nduetime() {{ {" ".join(COMMAND)} "$@"; }}\n{line}'
                ran = subprocess.run(
                    ["bash", "-c", script], cwd=own.directory, env=own.env, capture_output=True, text=True, check=False
                )
                assert ran.returncode == 0, (line, ran)
