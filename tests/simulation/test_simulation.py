"""Many seeded histories. To replay a failed one: ``DUETIME_SEED=123 make test``."""

from __future__ import annotations

import os

import pytest

from tests.simulation.history import History

SEEDS = [int(os.environ["DUETIME_SEED"])] if "DUETIME_SEED" in os.environ else range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_guarantees_hold_under_faults(seed: int) -> None:
    history = History(seed)
    history.run()
    assert history.faults.looks_by_lane, "it was too quiet to need lanes"


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_every_timer_is_delivered_exactly_once(seed: int) -> None:
    History(seed, level=0.0).run()
