"""Due timers of paused namespaces are parked, so that looks do not pass over them again and again.

A look that meets a due timer of a paused namespace writes the namespace into its column ``parked``. That takes it out
of the index by which looks find what is due, and into ``timers_parked``, by namespace. Once the namespace goes on,
looks begin what is parked in it from there. Nobody but the stores knows: a parked timer is a pending one like all
others, and whatever is done to it ends its being parked.
"""

from __future__ import annotations

PARK_MAX = 5_000
"""How many due timers a look reads beyond what it was asked for once it has met one of a paused namespace, and so how
many it parks: more would keep the others waiting."""

RESUMED_MAX = 16
"""From how many namespaces that go on a look takes what is parked: those with the oldest, if it is more of them."""

PARKED_IN = """
    parked_in (name) AS (
        SELECT min(parked) FROM timers WHERE parked > ''
        UNION ALL SELECT (SELECT min(parked) FROM timers WHERE parked > name AND parked > '')
        FROM parked_in WHERE name IS NOT NULL
    )
"""
"""A recursive CTE: the namespaces in which timers are parked, and a null. It reads one entry of the index for each."""

PARKED = "parked > '' AND parked ="
"""Before a namespace, the condition of what is parked in it, worded so that the index is seen to fit."""
