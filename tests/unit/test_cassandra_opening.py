"""Which Cassandra clusters and URLs are accepted."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from duetime.errors import SettingsError, StoreUnavailable
from duetime.stores.cassandra.driver import address_of
from duetime.stores.cassandra.opening import check

URL = "cassandra://one,two,three/timers"


class Node(NamedTuple):
    address: str
    datacenter: str = "here"
    sync: str = "batch"
    offset_ms: int = 0
    up: bool = True


class Session:
    """What ``check`` asks a cluster for."""

    def __init__(self, replication: str | None, *nodes: Node) -> None:
        self._replication = replication
        self._nodes = nodes

    def nodes(self) -> list[Any]:
        return list(self._nodes)

    def replication(self, keyspace: str) -> str | None:
        assert keyspace == "timers"
        return self._replication and f"{{'class': {self._replication}}}"

    def run_on(self, node: Node, statement: str) -> list[Any]:
        if not node.up:
            raise StoreUnavailable("down")
        return [(node.sync if "commitlog_sync" in statement else 1_000_000 + node.offset_ms,)]


def rejection(session: Session, url: str = URL) -> str:
    try:
        check(session, address_of(url))  # type: ignore[arg-type]
    except SettingsError as error:
        return str(error)
    return ""


HERE = "'NetworkTopologyStrategy', 'here': '3'"
ONE = "'SimpleStrategy', 'replication_factor': '1'"
NODES = Node("1"), Node("2"), Node("3")


def test_replicas_or_a_synced_commit_log_are_required() -> None:
    periodic = [node._replace(sync="periodic") for node in NODES]
    assert not rejection(Session(HERE, *periodic))
    assert not rejection(Session(ONE, *NODES))
    message = rejection(Session(ONE, NODES[0], periodic[1]))
    assert "node 2 acknowledges writes" in message and "keyspace timers has 1 replicas in here" in message


def test_missing_keyspace_is_rejected_with_the_statement_that_creates_it() -> None:
    assert "'NetworkTopologyStrategy', 'here': 3}" in rejection(Session(None, *NODES))


def test_datacenter_must_be_named_and_exist() -> None:
    two = Node("1"), Node("2", "there")
    assert "add ?dc=, one of the cluster's datacenters: here, there" in rejection(Session(HERE, *two))
    assert not rejection(Session(HERE, *two), URL + "?dc=here")
    assert "no datacenter 'mars', only here, there" in rejection(Session(HERE, *two), URL + "?dc=mars")


@pytest.mark.parametrize("replication", [f"{HERE}, 'there': '3'", "'SimpleStrategy', 'replication_factor': '3'"])
def test_replicas_in_two_datacenters_are_rejected(replication: str) -> None:
    session = Session(replication, Node("1"), Node("2", "there"))
    assert "replicas in other datacenters than here" in rejection(session, URL + "?dc=here")


def test_clocks_that_differ_are_rejected() -> None:
    assert not rejection(Session(HERE, Node("1"), Node("2", offset_ms=300), Node("3", offset_ms=-200)))
    message = rejection(Session(HERE, Node("1"), Node("2", offset_ms=300), Node("3", offset_ms=-201)))
    assert "differ by more than 500 ms" in message and "2 +300 ms, 3 -201 ms" in message


def test_nodes_that_are_down_are_not_checked() -> None:
    assert not rejection(Session(ONE, NODES[0], Node("2", sync="periodic", offset_ms=9_000, up=False)))


def test_url_names_hosts_keyspace_and_options() -> None:
    address = address_of("cassandra://me:a%2Fb@one,two:9043,[::1]:9044/timers?dc=here&tls=true")
    assert address.hosts == [("one", 9042), ("two", 9043), ("::1", 9044)]
    assert (address.keyspace, address.datacenter, address.user, address.password) == ("timers", "here", "me", "a/b")
    assert address.tls is not None and address_of(URL).tls is None


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("cassandra://one", "expected cassandra://host1,host2/keyspace"),
        ("cassandra://one/a;b", "expected cassandra://host1,host2/keyspace"),
        ("cassandra://one:x/a", "wrong host or port: "),
        ("cassandra://one/a?rf=3", "unknown option 'rf'"),
        ("cassandra://one/a?tls=yes", "tls must be true or false"),
        ("cassandra://one/a?ca=/nowhere", "can't read the certificates in /nowhere"),
    ],
)
def test_wrong_urls_are_rejected(url: str, reason: str) -> None:
    with pytest.raises(SettingsError) as rejected:
        address_of(url)
    assert str(rejected.value).startswith("DATABASE_URL: ") and reason in str(rejected.value)
