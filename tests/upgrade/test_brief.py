"""One upgrade and one rollback under a little load."""

from __future__ import annotations

import os

import pytest

from tests.postgres import Postgres
from tests.upgrade.program import NoHistory
from tests.upgrade.run import Options, run


def test_an_upgrade_and_a_rollback_lose_nothing_and_repeat_nothing(postgres15: Postgres) -> None:
    try:
        load = run(Options(rate=25.0, phase_seconds=0.5), postgres15)
    except NoHistory as missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(missing))
    assert not load.violations()
    assert sum(timer.canceled_at is not None for timer in load.timers.values()) > 5
    assert all(any(t.namespace == name for t in load.timers.values()) for name in load.secrets)
