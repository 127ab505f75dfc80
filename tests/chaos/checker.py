"""Compares what the receiver got with what clients were promised. Pure: a ledger goes in, violations come out.

- lost: acknowledged, not canceled, and never received, or not as often as the receiver's responses requested;
- early: received before its due time, by the one clock of this machine;
- after cancel: received although a cancel was acknowledged;
- moved: received for a time that an acknowledged update had replaced, or that no request ever named;
- ids: two requests of one firing with different delivery ids, or two firings with the same one;
- twice: received again without a fault in between that affected its attempt in flight;
- unasked: received for a timer that no client ever requested;
- answers: a response that no request should get, whatever the fault.

The service fails a timer that was in flight at three faults in a row, and reports it: that is promised, too. Such
timers are counted separately. Without three faults that explain it, such a timer counts as lost.

A request without a response may or may not have taken effect; both are correct. A delivery before a cancel or update
that was acknowledged later is correct only if a fault kept the receiver's response from being recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from duetime.lifecycle import LOST_MAX
from tests.chaos.ledger import Callback, Fault, Ledger, Promise, Said

KINDS = ("lost", "early", "after cancel", "moved", "ids", "twice", "unasked", "answers")
RECORD_NS = 1_000_000_000
"""How long after its response an attempt may still wait for its record, where only the time tells what was in
flight."""


@dataclass
class Verdict:
    acknowledged: int = 0
    canceled: int = 0
    updated: int = 0
    received: int = 0
    duplicates: int = 0
    given_up: int = 0
    found: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def violated(self, kind: str, what: object) -> None:
        self.found[kind] += 1
        self.violations.append(f"{kind}: {what}")


def judge(ledger: Ledger) -> Verdict:
    verdict = Verdict(received=len(ledger.callbacks))
    by_timer: dict[str, list[Callback]] = defaultdict(list)
    by_webhook_id: dict[str, list[Callback]] = defaultdict(list)
    for callback in sorted(ledger.callbacks, key=lambda callback: callback.received_ns):
        by_timer[callback.id].append(callback)
        by_webhook_id[callback.webhook_id].append(callback)
    for promise in ledger.promises.values():
        verdict.acknowledged += promise.acknowledged
        verdict.canceled += _canceled(promise)
        verdict.updated += sum(update.said is Said.YES for update in promise.updates)
        _judge_promise(verdict, promise, by_timer.get(promise.id, []), ledger)
    for odd in ledger.odd:
        verdict.violated("answers", odd)
    for id in by_timer.keys() - ledger.promises.keys():
        verdict.violated("unasked", by_timer[id][0])
    for webhook_id, callbacks in by_webhook_id.items():
        if len({(callback.id, callback.at_ms) for callback in callbacks}) > 1:
            verdict.violated("ids", f"{webhook_id} stands for more than one firing: {callbacks}")
        verdict.duplicates += len(callbacks) - 1
        for before, after in pairwise(callbacks):
            if not _excused(before, ledger.faults, before_ns=after.received_ns):
                verdict.violated("twice", f"{before} and then {after}")
    return verdict


def _canceled(promise: Promise) -> bool:
    return any(cancel.said is Said.YES for cancel in promise.cancels)


def _judge_promise(verdict: Verdict, promise: Promise, callbacks: list[Callback], ledger: Ledger) -> None:
    faults = ledger.faults
    firings = {callback.at_ms for callback in callbacks}
    owed = promise.acknowledged and all(cancel.said is Said.NO for cancel in promise.cancels)
    if owed and len(firings) < promise.firings:
        if promise.id in ledger.given_up and _hit_often(promise, faults):
            verdict.given_up += 1
        else:
            verdict.violated("lost", f"{promise}, of which came {callbacks}")
    for callback in callbacks:
        if callback.received_ns < callback.at_ms * 1_000_000:
            verdict.violated("early", f"by {callback.at_ms - callback.received_ns / 1e6:.3f} ms: {callback}")
    for cancel in promise.cancels:
        if cancel.said is Said.YES:
            for callback in callbacks:
                if callback.received_ns > cancel.asked_ns or not _excused(callback, faults, before_ns=cancel.asked_ns):
                    verdict.violated("after cancel", f"{callback}, {cancel}")
    _judge_times(verdict, promise, callbacks, faults)
    webhook_ids: dict[int, set[str]] = defaultdict(set)
    for callback in callbacks:
        webhook_ids[callback.at_ms].add(callback.webhook_id)
    for at_ms, ids in webhook_ids.items():
        if len(ids) > 1:
            verdict.violated("ids", f"{promise.id} at {at_ms} came as {sorted(ids)}")


def _hit_often(promise: Promise, faults: list[Fault]) -> bool:
    """Whether enough faults for giving up a timer may have affected it in flight."""
    hits = sum(
        fault.from_ns > promise.created.asked_ns if fault.in_flight is None else promise.id in fault.in_flight
        for fault in faults
    )
    return hits >= LOST_MAX


def _judge_times(verdict: Verdict, promise: Promise, callbacks: list[Callback], faults: list[Fault]) -> None:
    """Each callback must be for a time that a request named and that no acknowledged update had replaced."""
    assert promise.created.at_ms is not None
    named = {promise.created.at_ms}  # requested by a client and not replaced
    replaced: dict[int, int] = {}  # a time → when the client requested another one
    for update in promise.updates:
        assert update.at_ms is not None
        if update.said is Said.YES:
            replaced |= {at_ms: update.asked_ns for at_ms in named - {update.at_ms}}
            named = {update.at_ms}
        elif update.said is Said.NOTHING:
            named.add(update.at_ms)
    answered_ms = [callback.next_ms for callback in callbacks if callback.next_ms is not None]
    for callback in callbacks:
        if callback.at_ms in named or (answered_ms and callback.at_ms >= min(answered_ms)):
            continue  # the service may delay a time from a response a little, but never advance it
        asked_ns = replaced.get(callback.at_ms)
        if asked_ns is None or callback.received_ns > asked_ns or not _excused(callback, faults, before_ns=asked_ns):
            verdict.violated("moved", f"{callback} of {promise}")


def _excused(callback: Callback, faults: list[Fault], *, before_ns: int) -> bool:
    """Whether a fault that began before ``before_ns`` may have kept the response to this callback from being
    recorded."""
    for fault in faults:
        if fault.from_ns > before_ns:
            continue
        if fault.in_flight is None:
            if callback.received_ns <= fault.until_ns and callback.answered_ns + RECORD_NS >= fault.from_ns:
                return True
        elif callback.id in fault.in_flight:
            return True
    return False
