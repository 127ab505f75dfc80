"""Callback URLs with private addresses, in all spellings. A listener on loopback proves that none was called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doors.platform import refused
from tests.servers import KEY, Duetime, Receiver, Reply

PUBLIC_ONLY: dict[str, Any] = {"API_KEY": KEY, "HOST": "127.0.0.1"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    """A service as in production: it has a key, and private addresses are not allowed."""
    with Duetime(tmp_path_factory.mktemp("guarded"), virtual_clock=True, bare=True, **PUBLIC_ONLY) as service:
        yield service


@pytest.fixture(scope="module")
def listener() -> Iterator[Receiver]:
    """A receiver on loopback, for IPv4 and, where available, IPv6."""
    with Receiver() as fourth:
        try:
            sixth = Receiver("::1", fourth.port)
        except OSError:
            yield fourth
            return
        with sixth:
            yield fourth
            assert sixth.connections == 0


PRIVATE = [
    "127.0.0.1",
    "127.0.0.2",
    "127.255.255.254",
    "127.1",
    "127.0.1",
    "127.0.0.1.",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0X7F.1",
    "0177.0.0.1",
    "00000177.0.0.01",
    "017700000001",
    "127.0.0.0x1",
    "127.000.000.001",
    "0",
    "0.0.0.0",
    "0.0.0.1",
    "0x0",
    "4294967295",
    "255.255.255.255",
    "localhost",
    "LocalHost",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[0000::0001]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::FFFF:0:127.0.0.1]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fec0::1]",
    "[ff02::1]",
    "[100::1]",
    "10.0.0.1",
    "10.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "100.64.0.1",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "example.com@127.0.0.1",
    "127.0.0.1\\@example.com",
    "127.0.0.1#@example.com",
    "127.0.0.1?@example.com",
    "①②⑦.0.0.1",
    "127。0。0。1",
    "localhoſt",
]


LEADS_TO_LOOPBACK = ("127.", "0", "2130706433", "localhost", "LocalHost", "[::1]", "[0:0", "[0000", "[::]", "[::ffff:")


@pytest.mark.parametrize("host", PRIVATE)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_private_address_is_rejected_or_not_called(
    guarded: Duetime, listener: Receiver, scheme: str, host: str
) -> None:
    before = guarded.total()
    url = f"{scheme}://{host}:{listener.port}/inside"
    if "@example" in host:  # the port belongs before the decoy
        url = f"{scheme}://" + host.replace("127.0.0.1", f"127.0.0.1:{listener.port}") + "/inside"
    answer = guarded.request("POST", "/timers", json={"execute_at": guarded.ahead(10), "callback_url": url})
    if answer.status == 201:
        id = answer.body["data"]["id"]
        if not host.startswith(LEADS_TO_LOOPBACK):
            # Don't let it fire: with a broken guard, this test would call foreign machines.
            guarded.request("DELETE", f"/timers/{id}")
            pytest.fail(f"{url} was accepted")
        guarded.advance()
        timer = guarded.finished(id)
        assert timer["status"] == "failed" and timer["last_error"], timer
    else:
        refused(answer, 400, 2, "^callback_url ")
        assert guarded.total() == before
    assert listener.connections == 0


def test_localhost_and_link_local_addresses_are_rejected_at_creation(guarded: Duetime) -> None:
    body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": "http://localhost/"}
    refused(guarded.request("POST", "/timers", json=body), 400, 2, "^callback_url points to localhost, which")
    body["callback_url"] = "http://169.254.169.254/latest/meta-data/"
    refused(guarded.request("POST", "/timers", json=body), 400, 2, "^callback_url points to a link-local address")


@pytest.mark.parametrize("host", ["93.184.215.14", "1.1.1.1", "[2606:4700:4700::1111]", "172.32.0.1", "11.0.0.1"])
def test_public_address_is_accepted(guarded: Duetime, host: str) -> None:
    guarded.request("DELETE", f"/timers/{guarded.create(f'https://{host}/', seconds=10**8)}")


def test_update_to_a_private_address_is_rejected(guarded: Duetime, listener: Receiver) -> None:
    id = guarded.create("https://1.1.1.1/", seconds=10**8)
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
        answer = guarded.request("PUT", f"/timers/{id}", json={"callback_url": f"http://{host}:{listener.port}/"})
        refused(answer, 400, 2, "^callback_url points to ")
    assert guarded.get(id)["callback_url"] == "https://1.1.1.1/"
    guarded.request("DELETE", f"/timers/{id}")


def test_address_is_checked_again_at_each_attempt(tmp_path: Path, listener: Receiver) -> None:
    with Duetime(tmp_path, virtual_clock=True) as free:
        ids = [free.create(f"http://{host}:{listener.port}/", seconds=60) for host in ("127.0.0.1", "localhost")]
        assert free.terminate() == 0
    with Duetime(tmp_path, virtual_clock=True, bare=True, **PUBLIC_ONLY) as guarded:
        guarded.advance("1h")
        for id in ids:
            timer = guarded.finished(id)
            assert timer["status"] == "failed" and timer["executed_at"]
            literal = "127.0.0.1" in timer["callback_url"]
            shown = (
                "a loopback address (127.0.0.1)" if literal else "localhost, which resolves to an address that is not"
            )
            assert timer["last_error"].startswith(f"the callback URL points to {shown}")
            attempts = guarded.request("GET", f"/api/v1/timers/default/{id}/attempts").body["attempts"]
            assert attempts[0]["error"] == timer["last_error"]
        assert re.search(r"localhost resolves to (127\.0\.0\.1|::1)", guarded.stderr)
    assert listener.connections == 0


@pytest.mark.parametrize("path", ["/timers", "/api/v1/timers", "/api/v1/timers/batch"])
def test_error_does_not_reveal_the_address_of_a_name(guarded: Duetime, path: str) -> None:
    url = "http://localhost/"
    fields = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": url}
    if path != "/timers":
        fields = {"executeAt": "2999-01-01T00:00:00Z", "callbackUrl": url}
    answer = guarded.request("POST", path, json={"timers": [fields]} if path.endswith("batch") else fields)
    response = str(answer.body)
    assert (
        "resolves to an address that is not public; add its network to DUETIME_ALLOW_PRIVATE_TARGETS to allow it"
        in response
    )
    for word in ("127.", "::1", "loopback", "private address", "link-local", "reserved"):
        assert word not in response
    assert re.search(r"localhost resolves to (127\.0\.0\.1|::1), which is a loopback address", guarded.stderr)


def test_redirect_to_a_private_address_is_not_followed(tmp_path: Path, listener: Receiver) -> None:
    """127.0.0.1 is allowed and stands for a public receiver; localhost stands for a private one."""
    away = Reply(307, headers={"Location": f"http://localhost:{listener.port}/inside"})
    with Receiver() as outside, Duetime(tmp_path, virtual_clock=True) as service:
        assert service.fired(outside.reply("/", away))["status"] == "failed"
    assert listener.connections == 0


@pytest.mark.parametrize(
    ("setting", "opened", "closed"),
    [
        ("on", ["127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254"], []),
        ("off", [], ["127.0.0.1", "10.0.0.1"]),
        ("127.0.0.0/8", ["127.0.0.1", "127.0.0.2", "[::ffff:127.0.0.1]"], ["[::1]", "10.0.0.1"]),
        ("10.0.0.0/8,fd00::/8", ["10.1.2.3", "[fd00::1]"], ["127.0.0.1", "[fe80::1]", "192.168.0.1"]),
        (None, ["127.0.0.1", "[::1]", "localhost"], ["10.0.0.1", "169.254.169.254", "[fd00::1]"]),
    ],
)
def test_setting_allows_private_addresses(
    tmp_path: Path, setting: str | None, opened: list[str], closed: list[str]
) -> None:
    """Without the setting and without ``API_KEY``, only loopback is allowed."""
    chosen: dict[str, Any] = {} if setting is None else {"DUETIME_ALLOW_PRIVATE_TARGETS": setting}
    with Duetime(tmp_path, bare=True, **chosen) as service:
        for host in (*opened, *closed):
            body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": f"http://{host}/"}
            assert service.request("POST", "/timers", json=body).status == (201 if host in opened else 400), host
