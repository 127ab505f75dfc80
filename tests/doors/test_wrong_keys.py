"""Wrong keys: an address that sends many has to wait, and requests with the right key never wait."""

from __future__ import annotations

import logging
import re

import pytest

from duetime.doors import wrong_keys as module
from duetime.doors.wrong_keys import (
    ADDRESSES_MAX,
    FORGOTTEN_SECONDS,
    FREE,
    LOG_SECONDS,
    LOGGED_MAX,
    WAIT_SECONDS_MAX,
    WrongKeys,
)
from duetime.telemetry import Telemetry
from tests.clocks import ManualClock
from tests.doors.http_v1 import failure
from tests.doors.platform import refused
from tests.servers import KEY, Answer, Duetime, until, unused_address

RIGHT = [{"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}]


def with_key(service: Duetime, source: str, key: str, path: str = "/api/v1/timers") -> Answer:
    return service.request("GET", path, headers={"X-API-Key": key}, source=source)


def sign_in(service: Duetime, source: str, key: str) -> Answer:
    return service.request("POST", "/session", json={"apiKey": key}, headers={}, source=source)


def metric(service: Duetime) -> float:
    page = service.request("GET", "/metrics").body.decode()
    found = re.search(r"^duetime_wrong_keys_total ([0-9.e+]+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


class TestService:
    def test_many_wrong_keys_are_rejected_with_a_growing_wait(self, service: Duetime) -> None:
        source, before = unused_address(), metric(service)
        answers = [with_key(service, source, f"wrong-{n}") for n in range(FREE + 10)]
        assert [answer.status for answer in answers[:FREE]] == [401] * FREE
        waits = []
        for answer in answers[FREE:]:
            assert "right key" in failure(answer, 429, "TOO_MANY_WRONG_KEYS")["message"]
            waits.append(int(answer.headers["retry-after"]))
        assert waits == sorted(waits) and 1 <= waits[0] < waits[-1] <= WAIT_SECONDS_MAX
        refused(with_key(service, source, "wrong", "/timers"), 429, 4, "too many wrong API keys")
        assert with_key(service, source, "wrong", "/metrics").headers["retry-after"]
        assert metric(service) == before + FREE + 12

    def test_wrong_keys_of_sign_ins_count(self, service: Duetime) -> None:
        source = unused_address()
        statuses = [sign_in(service, source, f"wrong-{n}").status for n in range(FREE + 3)]
        assert statuses == [401] * FREE + [429] * 3
        assert with_key(service, source, "wrong").status == 429
        assert sign_in(service, source, KEY).status == 204

    def test_right_key_from_the_same_address_never_waits(self, service: Duetime) -> None:
        source = unused_address()
        for n in range(3 * FREE):
            with_key(service, source, f"wrong-{n}")
            for headers in RIGHT:
                assert service.request("GET", "/timers", headers=headers, source=source).status == 200

    def test_other_addresses_do_not_wait(self, service: Duetime) -> None:
        source = unused_address()
        for n in range(2 * FREE):
            with_key(service, source, f"wrong-{n}")
        assert with_key(service, unused_address(), "wrong").status == 401

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"X-API-Key": ""},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic x"},
            {"Cookie": "duetime_session=x"},
        ],
        ids=str,
    )
    def test_missing_key_is_not_a_wrong_key(self, service: Duetime, headers: dict[str, str]) -> None:
        source, before = unused_address(), metric(service)
        for _ in range(2 * FREE):
            assert service.request("GET", "/timers", headers=headers, source=source).status == 401
        assert metric(service) == before

    def test_log_has_the_address_and_not_the_key(self, service: Duetime) -> None:
        source, sent = unused_address(), 0

        def lines() -> list[str]:
            nonlocal sent
            sent += with_key(service, source, "a-key-of-another-service").status in (401, 429)
            return [line for line in service.stderr.splitlines() if f"from {source}:" in line]

        until("the address is logged", lines)  # repeated, because the number of messages per time is limited
        assert len(lines()) <= max(1, sent // 2)
        assert "a-key-of-another-service" not in service.stderr


class TestWrongKeys:
    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def wrong(self, clock: ManualClock) -> WrongKeys:
        return WrongKeys(clock, Telemetry())

    def waits(self, wrong: WrongKeys, address: str, times: int) -> list[int]:
        return [wrong.note(address) for _ in range(times)]

    def test_every_further_wrong_key_after_a_wait_leads_to_a_longer_wait(
        self, wrong: WrongKeys, clock: ManualClock
    ) -> None:
        assert self.waits(wrong, "a", FREE) == [0] * FREE
        last = 0
        for _ in range(4):
            wait = wrong.note("a")
            assert last < wait <= WAIT_SECONDS_MAX
            clock.advance(wait * 1000)
            assert wrong.note("a") == 0
            last = wait

    def test_wait_is_limited(self, wrong: WrongKeys) -> None:
        assert max(self.waits(wrong, "a", 5000)) == WAIT_SECONDS_MAX

    def test_address_is_forgotten_after_a_while(self, wrong: WrongKeys, clock: ManualClock) -> None:
        self.waits(wrong, "a", 3 * FREE)
        clock.advance(int(FORGOTTEN_SECONDS * 1000) + 1)
        assert self.waits(wrong, "a", FREE) == [0] * FREE

    def test_number_of_addresses_is_limited_and_the_busiest_one_is_kept(self, wrong: WrongKeys) -> None:
        for n in range(3 * ADDRESSES_MAX):
            wrong.note(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}")
            if n % 1000 == 0:
                wrong.note("192.0.2.1")
        assert len(wrong._addresses) == ADDRESSES_MAX
        assert wrong.note("192.0.2.1") > 0

    @pytest.mark.parametrize(
        ("one", "other", "same"),
        [
            ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
            ("2001:db8::1", "2001:db8:0:1::1", False),
            ("::ffff:192.0.2.1", "192.0.2.1", True),
            ("192.0.2.1", "192.0.2.2", False),
            ("fe80::1%eth0", "fe80::2%eth1", True),
            ("", "", True),
        ],
    )
    def test_ipv6_networks_count_as_one_address(self, wrong: WrongKeys, one: str, other: str, same: bool) -> None:
        assert (module.group_of(one) == module.group_of(other)) is same

    def test_number_of_logged_addresses_is_limited(
        self, wrong: WrongKeys, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            for n in range(10 * LOGGED_MAX):
                wrong.note(f"10.0.{n >> 8}.{n & 255}")
            assert len(caplog.records) == LOGGED_MAX
            clock.advance(int(LOG_SECONDS * 1000))
            wrong.note("10.0.0.255")
        assert len(caplog.records) == LOGGED_MAX + 1

    def test_log_messages_are_limited_and_count_the_suppressed_ones(
        self, wrong: WrongKeys, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            self.waits(wrong, "192.0.2.1", 100)
            clock.advance(int(LOG_SECONDS * 1000))
            wrong.note("192.0.2.1")
        assert [record.getMessage() for record in caplog.records] == [
            "wrong API key from 192.0.2.1: 1 since the last message, 1 in all",
            "wrong API key from 192.0.2.1: 100 since the last message, 101 in all",
        ]
