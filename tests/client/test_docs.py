"""The documents about the client: their examples run as written, and they name every method and exception."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from duetime import client as module
from duetime.client import AsyncClient, Client, DuetimeClientError
from tests.servers import KEY, Duetime, Receiver

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/client.md").read_text()
README = (ROOT / "sdks/python/README.md").read_text()

# Replaces FastAPI, which is not installed here.
FASTAPI = """
class FastAPI:
    def post(self, path):
        return lambda function: function

class HTTPException(Exception):
    pass

class Request:
    def __init__(self, headers, body):
        self.headers, self._body = headers, body

    async def body(self):
        return self._body
"""
CALLED = """
from datetime import UTC, datetime

from standardwebhooks import Webhook

body = b'{"namespace": "shop", "id": "order-7", "payload": 1}'
now = datetime.now(UTC)
headers = {"webhook-id": "1", "webhook-timestamp": str(int(now.timestamp()))}
headers["webhook-signature"] = Webhook(secret).sign("1", now, body.decode())
for _ in range(2):
    print(asyncio.run(hook(Request(headers, body))))
try:
    asyncio.run(hook(Request(headers, body + b" ")))
except HTTPException as error:
    print("status", error.args[0])
client.close()
"""


def ran(document: str, directory: Path, url: str, receiver: Receiver, *more: str) -> str:
    """Run the examples one after the other, with other addresses and another key; returns their output."""
    script = "\n".join([*re.findall(r"```python\n(.*?)```", document, re.DOTALL), *more])
    for shown, real in (
        ("http://localhost:8080", receiver.base),
        ("http://localhost:3000", url),
        ("YOUR-API-KEY", KEY),
    ):
        script = script.replace(shown, real)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=directory,
        env=os.environ | {"TIMER_URL": url, "API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_examples_of_the_page_work(url: str, receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text(FASTAPI)
    output = ran(PAGE, tmp_path, url, receiver, CALLED)
    assert "pending" in output and "['order-0', 'order-1', 'order-2']" in output and "\n1 canceled\n" in output
    assert "TIMER_NOT_FOUND timer 'no-such-timer' not found in namespace 'default'\ndelay\n" in output
    assert output.endswith("fired: shop order-7 1\n{'ok': True}\n{'ok': True}\nstatus 401\n")


def test_examples_of_the_readme_work(url: str, receiver: Receiver, tmp_path: Path) -> None:
    used = "print(receive.__name__, verify_webhook is not None)"
    assert ran(README, tmp_path, url, receiver, used).endswith("receive True\n")


def test_readme_does_not_install_a_package_that_is_not_published() -> None:
    """Somebody else could publish one of this name."""
    assert "pip install ./sdks/python" in README and "pip install duetime" not in README + PAGE


def test_example_of_the_module_works(service: Duetime, url: str) -> None:
    [example] = re.findall(r"(?ms)^    from datetime.*?(?=^``Client``)", module.__doc__ or "")
    example = textwrap.dedent(example)
    names: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIMER_URL", url)
        patch.setenv("API_KEY", KEY)
        exec(example.replace("https://example.com", "http://127.0.0.1:9"), names)
    assert isinstance(names["timer"], module.Timer)


def test_every_method_and_error_is_documented() -> None:
    methods = [name for name, _ in inspect.getmembers(Client) if not name.startswith("_")]
    for name in set(methods) - {"run", "run_all", "walk", "url"}:
        assert f"`{name}" in PAGE, name
        assert getattr(Client, name).__doc__ and getattr(AsyncClient, name).__doc__
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if issubclass(kind, DuetimeClientError):
            assert f"`{name}`" in PAGE and f"{name} " in (module.__doc__ or ""), name
