"""The type checker rejects instants in the place of other instants: it runs once on correct and on swapped calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from duetime import instants

ROOT = Path(__file__).parent.parent.parent

CALLS = """
from collections.abc import Mapping
from duetime import lifecycle, secret_rotation
from duetime.instants import CreatedAt, DeadlineAt, ExecuteAt, ExecutedAt, FireAt, Instant, StartedAt
from duetime.model import Attempt, Definition, Namespace, Outcome, OutcomeKind, RetryPolicy, Secret, Status, Timer
from duetime.retry import retry_at
from duetime.service import NewTimer, Service
from duetime.store import Overdue, Renewal, Store

def right_and_wrong(
    d: Definition, timer: Timer, outcome: Outcome, policy: RetryPolicy, name: Namespace, secret: Secret, store: Store,
    timers: Service, now: Instant, before: Instant, ms: int, execute: ExecuteAt, fire: FireAt, created: CreatedAt,
    started: StartedAt, executed: ExecutedAt, deadline: DeadlineAt, held: Mapping[int, int],
) -> None:
    Timer("n", "a", 0, d, execute, fire, created, now, 1, 2)
    Timer("n", "a", 0, d, fire, execute, created, now, 1, 2)  # refused
    Timer("n", "a", 0, d, created, fire, execute, now, 1, 2)  # refused
    Timer("n", "a", 0, d, now, fire, created, execute, 1, 2)  # refused
    Timer("n", "a", 0, d, execute, created, fire, now, 1, 2)  # refused
    Timer("n", "a", 0, d, execute, now, created, fire, 1, 2)  # refused
    Timer("n", "a", 0, d, execute, fire, now, created, 1, 2)  # refused
    Timer("n", "a", 0, d, execute, fire, created, 1, now, 2)  # refused
    head = "n", "a", 0, d, execute, fire, created, now, 1, 2, "", None, Status.PENDING, 0, 0, 0, None
    Timer(*head, started, executed, deadline)
    Timer(*head, executed, started, deadline)  # refused
    Timer(*head, deadline, executed, started)  # refused
    Timer(*head, started, deadline, executed)  # refused
    Attempt(1, now, ms, OutcomeKind.ANSWERED)
    Attempt(1, ms, now, OutcomeKind.ANSWERED)  # refused
    name.signing(now)
    name.signing(ms)  # refused

    lifecycle.begin(timer, now=now, version=1)
    lifecycle.begin(timer, now=1, version=now)  # refused
    lifecycle.begin(timer, now, deadline)  # refused
    lifecycle.settle(timer, outcome, sent_at=before, now=now, uniform=max)
    lifecycle.settle(timer, outcome, before, now, uniform=max)  # refused
    lifecycle.defer(timer, fire_at=fire, now=now)
    lifecycle.defer(timer, fire, now)  # refused
    lifecycle.amend(timer, now=now, execute_at=execute)
    lifecycle.amend(timer, now, execute)  # refused
    lifecycle.command(timer, execute_at=execute, stamp="", now=now)
    lifecycle.command(timer, execute, "", now)  # refused
    secret_rotation.add(name, secret, now)
    secret_rotation.add(name, secret, ms)  # refused
    retry_at(policy, failures=1, started_at=started, now=now, retry_after_ms=ms, uniform=max)
    retry_at(policy, failures=1, started_at=started, now=ms, retry_after_ms=now, uniform=max)  # refused
    retry_at(policy, 1, now, started, ms, max)  # refused

    NewTimer(namespace="n", execute_at=execute, definition=d)
    NewTimer(namespace="n", execute_at=ms, definition=d)  # refused
    timers.forecast([before, now])
    timers.forecast([ms, now])  # refused

    store.lanes(before, after=1)
    store.lanes(1, after=before)  # refused
    store.overdue([1], before, 5)
    store.overdue([1], 5, before)  # refused
    store.forecast([before, now], 5)
    store.end_session(b"", now, forget_before=before)
    store.end_session(b"", now, before)  # refused
    Overdue("n", "h", False, before, 5)
    Overdue("n", "h", False, 5, before)  # refused
    Renewal(now=now, held={}, instances=frozenset(), free=frozenset(), free_at=before)
    Renewal(before, {}, frozenset(), frozenset(), now)  # refused

    later: FireAt = fire + ms
    earlier: FireAt = fire - ms
    lasted: int = now - before
    wrong: Instant = now - before  # refused
    just: Instant = fire
    kind: FireAt = now  # refused
    other: FireAt = execute  # refused
    plain: Instant = ms  # refused
"""


def test_type_checker_rejects_swapped_instants(tmp_path: Path) -> None:
    calls = tmp_path / "calls.py"
    calls.write_text(CALLS)
    checker = [sys.executable, "-m", "mypy", "--disable-error-code=unused-coroutine", str(calls)]
    output = subprocess.run(checker, cwd=ROOT, text=True, capture_output=True).stdout
    found = {int(line) for line in re.findall(r"calls\.py:(\d+): error", output)}
    lines = CALLS.splitlines()
    refused = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert found == refused, output + "".join(f"\n{number}: {lines[number - 1]}" for number in sorted(found ^ refused))


def test_instant_is_an_int_at_run_time() -> None:
    kinds = [instants.Instant, instants.ExecuteAt, instants.FireAt, instants.CreatedAt]
    assert {*kinds, instants.StartedAt, instants.ExecutedAt, instants.DeadlineAt} == {int}
