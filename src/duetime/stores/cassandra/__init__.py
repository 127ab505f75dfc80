"""The timer store in Apache Cassandra, for fleets without a single writer or a single machine that must not fail."""

from duetime.store import Abilities

ABILITIES = Abilities(orders=frozenset(), offset_max=0, counts_exactly=False, expires_history=True)
