"""One upgrade and one rollback under light load."""

from __future__ import annotations

import pytest

from tests.postgres import Postgres
from tests.skips import skip
from tests.upgrade.program import NoHistory
from tests.upgrade.run import Options, run

pytestmark = pytest.mark.alone


def test_an_upgrade_and_a_rollback_lose_and_repeat_no_timer(postgres15: Postgres) -> None:
    try:
        load = run(Options(rate=25.0, phase_seconds=0.5), postgres15)
    except NoHistory as missing:
        skip(missing)
    assert not load.violations()
    assert sum(timer.canceled_at is not None for timer in load.timers.values()) > 5
    assert all(any(t.namespace == name for t in load.timers.values()) for name in load.secrets)
