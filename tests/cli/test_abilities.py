"""The command line with a store of few abilities: errors name the flags, estimates are marked, operators get notes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duetime import cli, databases
from duetime.client import Client, Unsupported
from duetime.clock import Clock
from duetime.databases import Database
from duetime.store import ALL_ABILITIES, Abilities, Order, TimeSource
from tests.cli.conftest import Shell, started
from tests.few_abilities import FewAbilities, without
from tests.servers import KEY

URL = "http://127.0.0.1:9/never"
ESTIMATES = Abilities(counts_exactly=False, time_source=TimeSource.MACHINE)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Callable[[Abilities], Shell]]:
    """Starts a server whose store has these abilities and one timer; returns a shell for it."""
    services: list[FewAbilities] = []

    def make(abilities: Abilities) -> Shell:
        services.append(FewAbilities(tmp_path, abilities))
        shell = Shell(tmp_path, f"http://127.0.0.1:{services[-1].port}")
        shell.good("create", "--in", "1h", "--url", URL, "--id", "one")
        return shell

    yield make
    for service in services:
        service.kill()


@pytest.mark.parametrize(
    ("missing", "typed", "says"),
    [
        (Order.NEWEST, (), "--status: is required: this database can't list all timers"),
        (
            Order.NEWEST,
            ("--correlation-id", "c"),
            "--correlation-id: can't be used: this database can't list all timers",
        ),
        (
            Order.SOONEST,
            ("--after", "2030-01-01T00:00:00Z"),
            "--after: can't be used: this database can't list timers by",
        ),
        (
            Order.SOONEST,
            ("--before", "2030-01-01T00:00:00Z"),
            "--before: can't be used: this database can't list timers",
        ),
        (Order.DUE, ("--status", "pending"), "--status: can't be 'pending': this database can't list pending timers"),
        (Order.FINISHED, ("--status", "failed"), "--status: can't be 'failed': this database can't list completed"),
    ],
)
def test_error_for_an_unsupported_list_names_the_supported_lists(
    at: Callable[[Abilities], Shell], missing: Order, typed: tuple[str, ...], says: str
) -> None:
    line = at(without(missing)).bad(1, "list", *typed)
    assert line.startswith(says) and ". It can list: " in line, line


def test_estimate_has_a_tilde(at: Callable[[Abilities], Shell]) -> None:
    shell = at(ESTIMATES)
    assert shell.good("count") == "~1\n"
    assert shell.json("count", "--status", "pending") == {"timers": 1, "more": False, "estimated": True}


def test_exact_count_has_no_tilde(shell: Shell) -> None:
    shell.good("create", "--in", "1h", "--url", URL, "--correlation-id", "exact")
    assert shell.good("count", "--correlation-id", "exact") == "1\n"
    assert shell.json("count", "--correlation-id", "exact") == {"timers": 1, "more": False}


def test_cluster_mentions_machine_clocks(at: Callable[[Abilities], Shell]) -> None:
    shell = at(ESTIMATES)
    assert "clock of its own machine" in shell.good("cluster")
    assert shell.json("cluster")["abilities"]["timeSource"] == "machine"


def test_cluster_mentions_no_clocks_otherwise(shell: Shell) -> None:
    assert "machine" not in shell.good("cluster")


def test_watch_reports_what_it_leaves_out(at: Callable[[Abilities], Shell]) -> None:
    with started(at(without(Order.DEADLINE, Order.FINISHED)), "watch", "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["id"] == "one"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().count("not shown: ") == 3


def test_watch_fails_if_nothing_can_be_listed(at: Callable[[Abilities], Shell]) -> None:
    line = at(without(Order.DUE, Order.DEADLINE, Order.FINISHED)).bad(1, "watch")
    assert line.startswith("status can't be 'executing'")


def test_client_raises_unsupported(at: Callable[[Abilities], Shell]) -> None:
    shell = at(without(Order.SOONEST))
    with Client(shell.env["TIMER_URL"], KEY) as client:
        with pytest.raises(Unsupported) as error:
            client.page(execute_before="2030-01-01T00:00:00Z")
        assert error.value.code == "UNSUPPORTED" and error.value.details == {"field": "executeBefore"}
        assert client.count(status="pending").timers == 1
        cluster = client.cluster()
    assert cluster.abilities is not None and set(cluster.abilities.orders) == set(Order) - {Order.SOONEST}


class Store:
    """The part of a store that the doctor uses."""

    abilities = ALL_ABILITIES

    def __init__(self, url: str) -> None:
        pass

    async def examine(self, clock: Clock) -> tuple[str, int]:
        return "1", 0


@pytest.mark.parametrize(
    ("abilities", "says"),
    [
        (ALL_ABILITIES, {"clock": "the database's clock decides what is due"}),
        (Abilities(time_source=TimeSource.MACHINE), {"clock": "each instance uses the clock of its own machine"}),
        (Abilities(expires_history=True), {"history": "the database itself removes old finished timers"}),
        (ESTIMATES, {"counts": "are estimates"}),
    ],
)
def test_doctor_describes_the_database(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    abilities: Abilities,
    says: dict[str, str],
) -> None:
    database = Database(name="Other", schemes=("other",), store=f"{__name__}:Store", example="other://host/x")
    monkeypatch.setattr(databases, "DATABASES", (*databases.DATABASES, database))
    monkeypatch.setattr(Store, "abilities", abilities)
    monkeypatch.setenv("DATABASE_URL", "other://host/x")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    for check, text in says.items():
        assert any(found["check"] == check and found["message"].startswith(text) for found in findings), findings
    checks = {found["check"] for found in findings}
    assert ("history" in checks) == abilities.expires_history and ("counts" in checks) != abilities.counts_exactly
