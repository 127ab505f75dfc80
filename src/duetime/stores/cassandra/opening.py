"""What a cluster must have before Duetime uses it: replicas or a commit log that lose nothing that was acknowledged,
and clocks that agree. Raises ``SettingsError`` otherwise."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from duetime.errors import SettingsError, StoreUnavailable
from duetime.stores.cassandra.driver import Address, Session
from duetime.stores.cassandra.node_clocks import NOW, SKEW_MS_MAX

log = logging.getLogger(__name__)

REPLICAS_MIN = 3
_SYNC = "SELECT value FROM system_views.settings WHERE name = 'commitlog_sync'"


def check(session: Session, address: Address) -> None:
    """Check the cluster; blocks."""
    nodes = session.nodes()
    datacenters = sorted({node.datacenter for node in nodes})
    if address.datacenter is None and len(datacenters) > 1:
        raise SettingsError(f"DATABASE_URL: add ?dc=, one of the cluster's datacenters: {', '.join(datacenters)}")
    local = address.datacenter or datacenters[0]
    if local not in datacenters:
        raise SettingsError(f"DATABASE_URL: the cluster has no datacenter '{local}', only {', '.join(datacenters)}")
    replication = session.replication(address.keyspace)
    if replication is None:
        raise SettingsError(
            f"DATABASE_URL: the cluster has no keyspace '{address.keyspace}': CREATE KEYSPACE {address.keyspace} WITH "
            f"replication = {{'class': 'NetworkTopologyStrategy', '{local}': {REPLICAS_MIN}}}"
        )
    replicas = _replicas(replication, datacenters)
    if elsewhere := sorted(replicas.keys() - {local}):
        # Conditional writes agree within one datacenter: instances in two could both own a shard.
        raise SettingsError(
            f"DATABASE_URL: keyspace {address.keyspace} has replicas in other datacenters than {local}, which is not "
            f"supported: {', '.join(elsewhere)}"
        )
    for node in nodes:
        try:
            [(sync,)] = session.run_on(node, _SYNC)
        except StoreUnavailable as error:
            log.warning("can't check how a node syncs its commit log: %s", error)
            continue
        if sync == "periodic" and replicas[local] < REPLICAS_MIN:
            raise SettingsError(
                f"DATABASE_URL: node {node.address} acknowledges writes up to ten seconds before they are on disk, and "
                f"keyspace {address.keyspace} has {replicas[local]} replicas in {local}: use at least {REPLICAS_MIN}, "
                "or set commitlog_sync to batch or group"
            )
    offsets = {}
    for node in nodes:
        try:
            [(before,)] = session.run_on(nodes[0], NOW)
            [(now,)] = session.run_on(node, NOW)
            [(after,)] = session.run_on(nodes[0], NOW)
        except StoreUnavailable as error:
            log.warning("can't check a node's clock: %s", error)
            continue
        offsets[node.address] = max(0, now - after) + min(0, now - before)
    if offsets and max(offsets.values()) - min(offsets.values()) > SKEW_MS_MAX:
        apart = ", ".join(f"{address} {offset:+d} ms" for address, offset in offsets.items())
        raise SettingsError(
            f"DATABASE_URL: the clocks of the nodes differ by more than {SKEW_MS_MAX} ms, synchronize them: {apart}"
        )


def _replicas(replication: str, datacenters: Sequence[str]) -> Counter[str]:
    """The number of replicas of a keyspace by datacenter, from its replication as the schema spells it."""
    options = dict(part.replace("'", "").strip(" {}").split(": ") for part in replication.split(","))
    del options["class"]
    everywhere = options.pop("replication_factor", None)
    counts = options if everywhere is None else dict.fromkeys(datacenters, everywhere)
    return Counter({name: int(count.split("/")[0]) for name, count in counts.items() if count != "0"})
