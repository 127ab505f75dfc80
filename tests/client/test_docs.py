"""The page about the client is true: its examples run as written, and every method and error is in it."""

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

PAGE = (Path(__file__).parents[2] / "docs/client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_work_when_pasted(url: str, receiver: Receiver, tmp_path: Path) -> None:
    """One after the other, as a reader would paste them; only the ports are others."""
    assert len(EXAMPLES) == 6
    script = "\n".join(EXAMPLES).replace("http://localhost:8080", receiver.base) + "\nclient.close()\n"
    env = os.environ | {"TIMER_URL": url, "API_KEY": KEY}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert "pending" in ran.stdout and "[0, 1, 2]" in ran.stdout
    assert "TIMER_NOT_FOUND timer not found\ndelay\n" in ran.stdout


def test_the_example_of_the_module_works(service: Duetime, url: str) -> None:
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
    for name in set(methods) - {"run", "walk", "url"}:
        assert f"`{name}" in PAGE, name
        assert getattr(Client, name).__doc__ and getattr(AsyncClient, name).__doc__
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if issubclass(kind, DuetimeClientError):
            assert f"`{name}`" in PAGE and f"{name} " in (module.__doc__ or ""), name
