"""The Prometheus rules: they speak of metrics that there are, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from duetime.engine.watchdog import OURS, Reason
from duetime.model import OutcomeKind, Status
from duetime.telemetry import Telemetry

FOLDER = Path(__file__).resolve().parents[2] / "deploy/prometheus"
RULES = yaml.safe_load((FOLDER / "duetime.rules.yml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_rule_is_about_a_metric_that_there_is(rule: dict) -> None:
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


def test_a_reason_that_operators_have_to_mend_is_critical() -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "DuetimeOverdue"]
    named = re.search(r'reason=~"([a-z_|]+)"', rule["expr"])
    assert named and set(named[1].split("|")) == set(OURS) and rule["labels"]["severity"] == "critical"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_the_rules_fire_when_they_should() -> None:
    for command in (["check", "rules", "duetime.rules.yml"], ["test", "rules", "duetime.rules.test.yml"]):
        run = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
