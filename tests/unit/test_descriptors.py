"""The limit on open files: its shares never exceed it, and a process raises its own limit."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as some

from duetime.descriptors import RESERVE_MIN, limit_for, report, shares

LIMITS = some.integers(64, 1_048_576)
WANTED = some.integers(16, 1_000_000)


@given(LIMITS, WANTED, WANTED)
def test_shares_and_reserve_fit_into_the_limit(limit: int, connections: int, deliveries: int) -> None:
    given = shares(limit, connections=connections, deliveries=deliveries)
    reserve = limit - given.inbound_max - given.outbound_max
    assert reserve >= min(RESERVE_MIN, limit // 2) and reserve >= limit // 8
    assert 16 <= given.inbound_max <= connections
    assert given.outbound_max >= 16


@given(LIMITS, WANTED, WANTED)
def test_neither_side_gets_less_than_half_unless_it_needs_less(limit: int, connections: int, deliveries: int) -> None:
    given = shares(limit, connections=connections, deliveries=deliveries)
    half = (given.inbound_max + given.outbound_max) // 2
    assert given.inbound_max >= min(connections, half)
    assert given.outbound_max >= min(deliveries, half)


@given(WANTED, WANTED)
def test_the_limit_in_the_warning_is_exactly_enough(connections: int, deliveries: int) -> None:
    def enough(limit: int) -> bool:
        given = shares(limit, connections=connections, deliveries=deliveries)
        return given.inbound_max == connections and given.outbound_max >= deliveries

    limit = limit_for(connections, deliveries)
    assert enough(limit) and (limit <= 2 * RESERVE_MIN or not enough(limit - 1))


@pytest.mark.parametrize(
    ("limit", "inbound_max", "outbound_max"),
    [(64, 16, 16), (256, 96, 96), (1024, 448, 448), (4096, 1792, 1792), (20_000, 10_000, 7_500)],
)
def test_shares_of_the_default_settings(limit: int, inbound_max: int, outbound_max: int) -> None:
    given = shares(limit, connections=10_000, deliveries=4096)
    assert (given.inbound_max, given.outbound_max) == (inbound_max, outbound_max)


def test_a_limit_that_is_too_low_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report(shares(1_048_576, connections=10_000, deliveries=4096))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    caplog.clear()
    report(shares(1024, connections=10_000, deliveries=4096))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "448 client connections" in caplog.text and "448 attempts" in caplog.text


@pytest.mark.parametrize(("soft", "hard", "raised"), [(100, 300, 300), (300, 300, 300)])
def test_the_soft_limit_is_raised_to_the_hard_limit(soft: int, hard: int, raised: int) -> None:
    code = "import resource; from duetime.descriptors import raise_limit; "
    code += "print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    limited = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    said = subprocess.check_output(["sh", "-c", limited, "sh", sys.executable, "-c", code], text=True, timeout=60)
    assert said.split() == [str(raised), str(raised), str(hard)]


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "set_to"),
    [(1024, -1, 1_048_576, 1_048_576), (-1, -1, 1_048_576, None), (2_000_000, -1, 2_000_000, None)],
)
def test_soft_limit_is_raised_to_a_fixed_value_if_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int, set_to: int | None
) -> None:
    from duetime import descriptors

    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    assert descriptors.raise_limit() == limit
    assert calls == ([] if set_to is None else [(set_to, hard)])


def test_limit_stays_if_the_system_refuses_a_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from duetime import descriptors

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, -1))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert descriptors.raise_limit() == 256
