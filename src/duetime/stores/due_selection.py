"""Selects the due timers to begin, for stores that first read the due timers and then begin the selected ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duetime.instants import Instant
from duetime.store import BEGIN_BYTES_MAX, Portion
from duetime.stores.byte_budget import fitting
from duetime.stores.fair_shares import deal


class Candidate(NamedTuple):
    """A due timer with only the fields that selecting needs. Candidates sort by age, oldest first."""

    fire_at: Instant
    mark: Any  # the store's own order of creation
    uuid: bytes
    revision: int
    shard: int
    lane: int
    size: int
    namespace: str
    status: str  # pending; executing, if its attempt was lost; or a status unknown to this program


def choose(
    due: Sequence[Candidate], limit: int, lane_max: int | None, lane_limits: Mapping[int, int]
) -> tuple[list[Candidate], bool]:
    """Select up to ``limit`` of the oldest timers within the limit of each lane and the byte limit. Return them, and
    whether timers are left that are within the limit of their lane."""
    taken: Counter[int] = Counter()
    chosen: list[Candidate] = []
    more = False
    for each in due:
        if lane_max is not None and taken[each.lane] >= lane_limits.get(each.lane, lane_max):
            continue
        if len(chosen) == limit:
            more = True
            break
        taken[each.lane] += 1
        chosen.append(each)
    within = fitting([each.size for each in chosen], BEGIN_BYTES_MAX)
    return chosen[:within], more or within < len(chosen)


def choose_in_lanes(
    in_lanes: Sequence[Sequence[Candidate]], limit: int, portions: Sequence[Portion]
) -> tuple[list[Candidate], list[int]]:
    """Select the share of each lane, by number and by bytes. Return the timers, and how many are from each lane."""
    wishes = [(min(portion.most, len(each)), portion.share) for portion, each in zip(portions, in_lanes, strict=True)]
    counts = deal(limit, wishes)
    turns = sorted(
        ((place + 1) / portion.share, each.fire_at, lane, each.size)
        for lane, (count, found, portion) in enumerate(zip(counts, in_lanes, portions, strict=True))
        for place, each in enumerate(found[:count])
    )
    within = fitting([size for *_, size in turns], BEGIN_BYTES_MAX)
    if within < len(turns):
        taken = Counter(lane for _, _, lane, _ in turns[:within])
        counts = [taken[lane] for lane in range(len(counts))]
    chosen = [each for found, count in zip(in_lanes, counts, strict=True) for each in found[:count]]
    return sorted(chosen), counts
