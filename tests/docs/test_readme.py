"""The examples of the README work when pasted, each with the same receiver.

``tests/web/test_readme.py`` tests the example that uses the web page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

from bench import bars, report
from bench.results import load
from duetime.client import Client
from tests.docs import pasting, readme
from tests.servers import Duetime, until

TEXT = (pasting.ROOT / "README.md").read_text()
DRIVERS = sysconfig.get_path("purelib")


def test_installation_builds_wheels_and_starts_the_service(tmp_path: Path) -> None:
    """Runs in a copy of the sources, without a package index: drivers and setuptools come from this environment."""
    for folder in ("src", "sdks/python/src"):
        shutil.copytree(
            pasting.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for file in ("pyproject.toml", "README.md", "sdks/python/pyproject.toml", "sdks/python/README.md"):
        shutil.copy(pasting.ROOT / file, tmp_path / file)
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    log = tmp_path / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", readme.INSTALL],
            cwd=tmp_path,
            env=os.environ | pip | {"PATH": pasting.path(tmp_path), "PYTHONPATH": DRIVERS, "PORT": "0"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:

        def listening() -> bool:
            assert process.poll() is None, log.read_text()
            return "is listening on http://" in log.read_text()

        until("the service is listening", listening, pasting.SECONDS_MAX)
        assert (tmp_path / "duetime.key").exists() and len(list((tmp_path / "dist").glob("*.whl"))) == 2
        assert list((tmp_path / "duetime-env").glob("lib/*/site-packages/duetime/cli.py"))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_curl_command_line_and_client_fire_timers_at_the_same_receiver(tmp_path: Path) -> None:
    with Duetime(tmp_path, bare=True) as service, readme.receiver(tmp_path) as receiver:
        url = f"http://localhost:{service.port}"
        for way in readme.WAYS:
            text = way.replace("http://localhost:3000", url).replace(readme.PORT, str(receiver.port))
            ran = pasting.paste(text, tmp_path, TIMER_URL=url)
            assert ran.returncode == 0 and "pending" in ran.stdout, ran.stdout + ran.stderr
        bodies = receiver.called(len(readme.WAYS))
        # Timers that are due within a second of each other can be delivered in any order.
        assert {body["payload"]["from"] for body in bodies} == {"curl", "the command line", "Python"}
        example = re.search(r"called back: (\{.*)", TEXT)
        assert example and list(json.loads(example[1])) == list(bodies[0])
        with Client(url, key=service.key) as client:
            until("all are completed", lambda: client.count(status="completed").timers == len(readme.WAYS))


def test_commands_exist(tmp_path: Path) -> None:
    commands = set(re.findall(r"(?:^|`| )(duetime [a-z]+)", TEXT, re.MULTILINE))
    assert {"duetime serve", "duetime create", "duetime doctor"} <= commands
    for command in commands:
        assert pasting.paste(f"{command} --help", tmp_path).returncode == 0, command


def test_ratios_agree_with_the_benchmark() -> None:
    judged = {bar.what: bar for bar in bars.judge(load(report.FIGURES))}
    for row, bar in (
        ("creates, one by one", "creates one by one, {}: the fastest peer"),
        ("creates, in batches of 500", "creates in batches, {}"),
        ("deliveries of 5,000 timers due at one instant", "5,000 at one instant, {}"),
    ):
        both = [judged[bar.format(store)] for store in ("SQLite", "PostgreSQL")]
        [peer] = {one.measured.rpartition(" of ")[2] for one in both}
        assert f"| {row} | {both[0].ratio:.1f} × | {both[1].ratio:.1f} × | {peer} |" in TEXT
