from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from duetime.deliverers import egress as module
from duetime.deliverers.egress import Egress, Refused, Unresolved
from duetime.deliverers.unsent import NotSent
from duetime.errors import SettingsError
from duetime.model import Unsent
from duetime.urls import parse_url


def addresses_of(*addresses: str) -> list[tuple[Any, ...]]:
    """The entries that getaddrinfo would return."""
    return [
        (
            socket.AF_INET6 if ":" in a else socket.AF_INET,
            socket.SOCK_STREAM,
            6,
            "",
            (a, 0, 0, 0) if ":" in a else (a, 0),
        )
        for a in addresses
    ]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and their addresses; other names do not resolve. Counts lookups under ``""``."""
    names: dict[str, list[str]] = {"": []}

    def lookup(host: bytes, port: object, **_: object) -> list[tuple[Any, ...]]:
        names[""].append(host.decode())
        if host.decode() not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return addresses_of(*names[host.decode()])

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return names


# Addresses.

CLOSED = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.5",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:1::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2620:4f:8000::1",
    "3fff::1",
    "4000::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]
OPEN = ["1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "223.255.255.255"]
OPEN += ["2606:4700:4700::1111", "2a00:1450:4001::1", "2001:200::1", "2001:4860:4860::8888"]


@pytest.mark.parametrize("address", CLOSED)
def test_by_default_all_private_addresses_are_blocked(address: str, clock: Any) -> None:
    assert not Egress(clock).allowed(address)


@pytest.mark.parametrize("address", OPEN)
def test_public_addresses_are_allowed(address: str, clock: Any) -> None:
    assert Egress(clock).allowed(address)
    assert Egress(clock, allow_loopback=True).allowed(address)
    assert Egress(clock, allow=["10.0.0.0/8"]).allowed(address)


def test_invalid_addresses_are_blocked_even_if_everything_is_allowed(clock: Any) -> None:
    for text in ("", "localhost", "127.1", "0x7f.1", "1.2.3.4/32", "[::1]", "2130706433"):
        assert not Egress(clock, allow_all=True).allowed(text)


def test_everything_can_be_allowed(clock: Any) -> None:
    egress = Egress(clock, allow_all=True)
    assert all(egress.allowed(address) for address in CLOSED)


def test_loopback_alone_can_be_allowed(clock: Any) -> None:
    egress = Egress(clock, allow_loopback=True)
    opened = [address for address in CLOSED if egress.allowed(address)]
    assert opened == ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1"]


def test_a_list_allows_exactly_its_networks_in_every_notation(clock: Any) -> None:
    egress = Egress(clock, allow=["10.0.0.0/8", " fd00:ec2::/32", "192.168.1.1"])
    opened = [address for address in CLOSED if egress.allowed(address)]
    assert opened == ["10.0.0.5", "192.168.1.1", "fd00:ec2::254"]
    assert egress.allowed("::ffff:10.1.2.3")
    assert not egress.allowed("::ffff:192.168.1.2")


def test_an_invalid_list_is_a_settings_error(clock: Any) -> None:
    with pytest.raises(SettingsError, match="DUETIME_ALLOW_PRIVATE_TARGETS"):
        Egress(clock, allow=["10.0.0.0/33"])


def test_a_refusal_names_the_setting(clock: Any) -> None:
    said = (
        r"^points to a private address \(10\.0\.0\.5\); add its network to DUETIME_ALLOW_PRIVATE_TARGETS to allow it$"
    )
    with pytest.raises(Refused, match=said):
        Egress(clock).check(parse_url("http://10.0.0.5/"))
    Egress(clock).check(parse_url("http://1.1.1.1/"))
    Egress(clock).check(parse_url("http://localhost/"))  # a name is checked at each attempt


# Names.


def test_literal_addresses_are_checked_without_a_lookup(
    run: Callable[..., Any], clock: Any, dns: dict[str, list[str]]
) -> None:
    async def main() -> None:
        egress = Egress(clock)
        assert await egress.resolve(parse_url("http://1.1.1.1/")) == ["1.1.1.1"]
        assert await egress.resolve(parse_url("http://[2606:4700::1]/")) == ["2606:4700::1"]
        for text in ("http://127.0.0.1/", "http://[::1]/", "http://[::ffff:7f00:1]/", "http://169.254.169.254/latest"):
            for _ in range(2):  # the second time it is cached
                with pytest.raises(Refused):
                    await egress.resolve(parse_url(text))
        await egress.close()

    run(main())
    assert dns[""] == []


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["169.254.169.254"],
        ["fe80::1%eth0"],
        ["1.1.1.1", "10.0.0.1"],
        ["10.0.0.1", "1.1.1.1"],
        ["1.1.1.1", "2606:4700::1", "::ffff:127.0.0.1"],
        [f"1.1.1.{n}" for n in range(1, 20)] + ["127.0.0.1"],
    ],
)
def test_one_blocked_address_blocks_the_name(
    addresses: list[str],
    run: Callable[..., Any],
    clock: Any,
    dns: dict[str, list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client gets the same message for any address; the log has the address."""
    dns["metadata.google.internal"] = addresses
    said = (
        "points to metadata.google.internal, which resolves to an address that is not public; "
        "add its network to DUETIME_ALLOW_PRIVATE_TARGETS to allow it"
    )

    async def main() -> None:
        egress = Egress(clock)
        for _ in range(2):
            with pytest.raises(Refused, match=f"^{re.escape(said)}$"):
                await egress.resolve(parse_url("http://metadata.google.internal/"))
            assert egress.known(parse_url("http://metadata.google.internal/")) is None
        await egress.close()

    run(main())
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    closed = next(address for address in addresses if not address.startswith(("1.1.1.", "2606:")))
    assert f"metadata.google.internal resolves to {closed}" in line


@pytest.mark.parametrize("errno", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_a_name_that_is_known_without_an_address_looks_like_an_unknown_one(
    errno: int, run: Callable[..., Any], clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(errno, f"what the resolver says about {errno}")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def main() -> None:
        egress = Egress(clock)
        with pytest.raises(Unresolved, match=r"^db\.internal was not resolved: Name or service not known$"):
            await egress.resolve(parse_url("http://db.internal/"))
        await egress.close()

    run(main())


def test_addresses_keep_their_order_without_duplicates_up_to_a_limit(
    run: Callable[..., Any], clock: Any, dns: dict[str, list[str]]
) -> None:
    dns["example.com"] = ["2606:4700::1", "1.1.1.1", "2606:4700::1"]
    dns["many.example"] = [f"1.1.1.{n}" for n in range(1, 100)]

    async def main() -> None:
        egress = Egress(clock)
        assert await egress.resolve(parse_url("http://example.com/")) == ["2606:4700::1", "1.1.1.1"]
        assert len(await egress.resolve(parse_url("http://many.example/"))) == module.ADDRESSES_MAX
        await egress.close()

    run(main())


def test_a_name_is_resolved_again_when_its_result_expires(
    run: Callable[..., Any], clock: Any, dns: dict[str, list[str]]
) -> None:
    url = parse_url("http://rebind.example/")

    async def main() -> None:
        egress = Egress(clock)
        dns["rebind.example"] = ["1.1.1.1"]
        assert await egress.resolve(url) == ["1.1.1.1"]
        dns["rebind.example"] = ["127.0.0.1"]
        clock.seconds += module.RESULT_SECONDS - 0.1
        assert egress.known(url) == ["1.1.1.1"]
        assert await egress.resolve(url) == ["1.1.1.1"]  # the connection goes to this one, not to the new one
        clock.seconds += 0.2
        assert egress.known(url) is None
        with pytest.raises(Refused):
            await egress.resolve(url)
        dns["rebind.example"] = ["1.0.0.1"]
        clock.seconds += module.RESULT_SECONDS
        assert await egress.resolve(url) == ["1.0.0.1"]
        await egress.close()

    run(main())
    assert dns[""] == ["rebind.example"] * 3


def test_a_name_without_an_address_is_not_an_internal_error(
    run: Callable[..., Any], clock: Any, dns: dict[str, list[str]]
) -> None:
    dns["empty.example"] = []

    async def main() -> None:
        egress = Egress(clock)
        for _ in range(2):
            with pytest.raises(Unresolved, match=r"gone\.example was not resolved: Name or service not known"):
                await egress.resolve(parse_url("http://gone.example/"))
        with pytest.raises(Unresolved, match="no address"):
            await egress.resolve(parse_url("http://empty.example/"))
        await egress.close()

    run(main())
    assert dns[""] == ["gone.example", "empty.example"]


def test_callers_share_a_lookup_which_survives_one_that_gives_up(
    run: Callable[..., Any], clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    lookups = []

    def lookup(host: bytes, *_: object, **__: object) -> list[tuple[Any, ...]]:
        lookups.append(host)
        go_on.wait(10)
        return addresses_of("1.1.1.1")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def main() -> None:
        egress = Egress(clock)
        url = parse_url("http://slow.example/")
        callers = [asyncio.create_task(egress.resolve(url)) for _ in range(10)]
        await asyncio.sleep(0)
        callers[0].cancel()
        await asyncio.sleep(0)
        go_on.set()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [["1.1.1.1"]] * 9
        await egress.close()

    run(main())
    assert lookups == [b"slow.example"]


def test_a_shortage_is_never_cached(run: Callable[..., Any], clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError(errno.EMFILE, "Too many open files"), addresses_of("1.1.1.1")]

    def lookup(*_: object, **__: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def main() -> None:
        egress = Egress(clock)
        url = parse_url("http://short.example/")
        with pytest.raises(NotSent) as caught:
            await egress.resolve(url)
        assert caught.value.cause is Unsent.DESCRIPTORS
        assert await egress.resolve(url) == ["1.1.1.1"]
        await egress.close()

    run(main())


def test_the_cache_is_bounded(
    run: Callable[..., Any], clock: Any, dns: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESULTS_MAX", 3)

    async def main() -> None:
        egress = Egress(clock)
        for n in range(10):
            await egress.resolve(parse_url(f"http://1.1.1.{n}/"))
        assert len(egress._results) == 3
        assert egress.known(parse_url("http://1.1.1.9/")) == ["1.1.1.9"]
        await egress.close()

    run(main())
