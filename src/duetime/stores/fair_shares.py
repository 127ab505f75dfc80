"""Divides a limited number of places between lanes by their shares; what a lane does not need goes to the others."""

from __future__ import annotations

from collections.abc import Sequence


def deal(limit: int, wishes: Sequence[tuple[int, float]]) -> list[int]:
    """Divide ``limit`` between requests of (wanted, share), by weighted max-min fairness."""
    wanted = [want for want, _ in wishes]
    if sum(wanted) <= limit:
        return wanted
    given = [0] * len(wishes)
    open_ = [place for place, want in enumerate(wanted) if want]
    left = limit
    while left > 0 and open_:
        per_share = left / sum(wishes[place][1] for place in open_)
        modest = [place for place in open_ if wanted[place] <= per_share * wishes[place][1]]
        for place in modest:
            given[place] = wanted[place]
            left -= wanted[place]
        if not modest:
            # Every open request wants more than its share: round down, and distribute the remainder one by one.
            for place in open_:
                given[place] = int(per_share * wishes[place][1])
            left -= sum(given[place] for place in open_)
            for place in open_[: max(0, left)]:
                given[place] += 1
            break
        open_ = [place for place in open_ if not given[place]]
    return given
