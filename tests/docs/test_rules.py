"""The Prometheus rules use existing metrics and fire when they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from duetime.model import OutcomeKind, Status
from duetime.overdue import OPERATOR_REASONS, Reason
from duetime.telemetry import Telemetry
from tests.skips import skip

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/prometheus"
UNPACKED = ROOT / ".servers/prometheus/usr/bin"
RULES = yaml.safe_load((FOLDER / "duetime.rules.yml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rule_uses_existing_metrics(rule: dict[str, Any]) -> None:
    telemetry = Telemetry()
    telemetry.attempted(OutcomeKind.ANSWERED, Status.COMPLETED)
    telemetry.overdue(dict.fromkeys(Reason, 0))
    page = telemetry.page(dict.fromkeys(Status, 0)).decode()
    metrics = re.findall(r"(?:duetime|timer)_[a-z_]+", rule["expr"])
    assert metrics and all(re.search(rf"^{metric}[{{ ]", page, re.MULTILINE) for metric in metrics)
    assert rule["labels"]["severity"] in ("critical", "warning") and set(rule["annotations"]) == {
        "summary",
        "description",
    }


def test_overdue_reasons_that_operators_must_fix_are_critical() -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "DuetimeOverdue"]
    named = re.search(r'reason=~"([a-z_|]+)"', rule["expr"])
    assert named and set(named[1].split("|")) == set(OPERATOR_REASONS) and rule["labels"]["severity"] == "critical"


def test_rules_pass_their_promtool_tests() -> None:
    promtool = shutil.which("promtool", path=f"{UNPACKED}{os.pathsep}{os.environ['PATH']}")
    if promtool is None:
        skip("promtool is not installed: make prometheus, or apt-get install prometheus")
    for command in (["check", "rules", "duetime.rules.yml"], ["test", "rules", "duetime.rules.test.yml"]):
        run = subprocess.run([promtool, *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
