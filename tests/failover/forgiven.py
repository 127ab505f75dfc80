"""Removes the promises from a ledger that a failover may undo. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.chaos.ledger import Asked, Ledger, Said


def forgive(ledger: Ledger, windows: Sequence[tuple[int, int]]) -> Ledger:
    """The same ledger, in which a response within one of these times promises nothing."""

    def forgiven(asked: Asked) -> Asked:
        undone = any(from_ns <= asked.answered_ns <= until_ns for from_ns, until_ns in windows)
        return replace(asked, said=Said.NOTHING) if undone else asked

    return replace(
        ledger,
        promises={
            id: replace(
                promise,
                created=forgiven(promise.created),
                updates=[forgiven(update) for update in promise.updates],
                cancels=[forgiven(cancel) for cancel in promise.cancels],
            )
            for id, promise in ledger.promises.items()
        },
    )
