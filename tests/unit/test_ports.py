"""Ports for tests: no two processes get the same one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports

SHARE = range(19990, 19994)  # below the range of other tests
CODE = """
import json, sys
from pathlib import Path
from tests import ports
ports._PORTS, ports._LOCKS = range(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3])
print(json.dumps([ports.free_port(), ports.free_port()]), flush=True)
input()
"""


def test_concurrent_processes_get_different_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_PORTS", SHARE)
    monkeypatch.setattr(ports, "_LOCKS", tmp_path)
    command = [sys.executable, "-c", CODE, str(SHARE.start), str(SHARE.stop), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = json.loads(other.stdout.readline())
        ours = [ports.free_port(), ports.free_port()]
        other.communicate(b"\n")
    assert sorted(theirs + ours) == list(SHARE)
