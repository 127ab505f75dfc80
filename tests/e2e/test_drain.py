"""Shutdown: SIGTERM and SIGINT finish and record attempts in flight, and fire nothing twice."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Duetime, Receiver, Reply, until

pytestmark = pytest.mark.alone

IN_FLIGHT = 50


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_service_stops_at_once(tmp_path: Path, number: int) -> None:
    with Duetime(tmp_path) as service:
        service.signal(number)
        assert service.wait() == 0
        assert "Traceback" not in service.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_deliveries_in_flight_are_finished_and_recorded(tmp_path: Path, number: int) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True) as service:
        slow = receiver.reply("/slow", Reply(hang=True))
        ids = [service.create(slow) for _ in range(IN_FLIGHT)]
        later = service.create(receiver.url("/later"), seconds=3600)
        service.advance()
        receiver.wait("/slow", IN_FLIGHT)
        service.signal(number)
        # Not ready any more but still running: it waits for the delivery in flight.
        until("the drain begins", lambda: service.request("GET", "/readyz").status == 503)
        body = service.request("GET", "/readyz").body
        assert body == {"status": "not ready", "reason": "it is starting or stopping", "overdue": {}}
        assert service.request("GET", "/livez").status == 200
        assert service.process is not None and service.process.poll() is None
        receiver.release()
        assert service.wait() == 0
        assert "all outcomes are recorded" in service.stderr and "Traceback" not in service.stderr

        service.start()
        assert service.total("completed") == IN_FLIGHT and service.total("executing") == 0
        assert {service.get(id)["status"] for id in ids} == {"completed"}
        service.advance("1d")
        service.finished(later)
        assert len(receiver.at("/slow")) == IN_FLIGHT and len(receiver.at("/later")) == 1


def test_nothing_new_is_begun_while_draining(tmp_path: Path) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True) as service:
        first = service.create(receiver.reply("/first", Reply(hang=True)))
        second = service.create(receiver.url("/second"), seconds=22)
        service.advance()
        receiver.wait("/first")
        service.signal(signal.SIGTERM)
        until("the drain begins", lambda: service.request("GET", "/readyz").status == 503)
        made = service.create("http://127.0.0.1:9/", seconds=3600)  # clients are still served
        service.advance("13s")  # less than the drain timeout, and enough for the second timer to fall due
        assert service.get(second)["status"] == "pending"
        receiver.release()
        assert service.wait() == 0
        assert not receiver.at("/second")
        service.start()
        assert service.get(first)["status"] == "completed" and service.get(made)["status"] == "pending"
        service.advance("25s")
        assert service.finished(second)["status"] == "completed"
        assert len(receiver.at("/first")) == len(receiver.at("/second")) == 1


def test_queued_timers_are_put_back_without_using_up_a_retry(tmp_path: Path) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, DUETIME_MAX_PER_DESTINATION="1") as service:
        slow = receiver.reply("/queue", Reply(hang=True), Reply(200))
        ids = [service.create(slow) for _ in range(2)]
        service.advance()
        receiver.wait("/queue")
        service.signal(signal.SIGTERM)
        until("the drain begins", lambda: service.request("GET", "/readyz").status == 503)
        receiver.release()
        assert service.wait() == 0
        assert len(receiver.at("/queue")) == 1  # the queued timer was not sent during the drain
        service.start()
        service.advance()
        assert {service.finished(id)["status"] for id in ids} == {"completed"}
        requests = receiver.at("/queue")
        assert len({request.headers["duetime-timer"] for request in requests}) == len(requests) == 2
        assert {request.headers["duetime-attempt"] for request in requests} == {"1"}


def test_a_hanging_receiver_does_not_delay_shutdown_forever(tmp_path: Path) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, DUETIME_DRAIN_TIMEOUT="1s") as service:
        id = service.create(receiver.reply("/hang", Reply(hang=True), Reply(200)))
        service.advance()
        [first] = receiver.wait("/hang")
        assert service.terminate() == 0
        assert "1 timers had no recorded outcome" in service.stderr and "Traceback" not in service.stderr
        service.start()
        timer = service.finished(id)  # its outcome was lost, so it fires again, with the same delivery id
        again = receiver.at("/hang")[-1]
        assert timer["status"] == "completed" and len(receiver.at("/hang")) == 2
        assert again.headers["webhook-id"] == first.headers["webhook-id"]
        assert again.headers["duetime-attempt"] == "2"


def test_the_log_does_not_report_all_recorded_after_a_timeout(tmp_path: Path) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, DUETIME_DRAIN_TIMEOUT="0s") as service:
        service.create(receiver.reply("/hang", Reply(hang=True)))
        service.advance()
        receiver.wait("/hang")
        assert service.terminate() == 0
        assert "all outcomes are recorded" not in service.stderr


def test_a_second_signal_changes_nothing(tmp_path: Path) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True) as service:
        id = service.create(receiver.reply("/twice", Reply(hang=True)))
        service.advance()
        receiver.wait("/twice")
        for _ in range(2):
            service.signal(signal.SIGTERM)
            until("the drain begins", lambda: service.request("GET", "/readyz").status == 503)
        receiver.release()
        assert service.wait() == 0
        service.start()
        assert service.get(id)["status"] == "completed"


def test_an_open_client_connection_does_not_delay_shutdown(tmp_path: Path) -> None:
    with Duetime(tmp_path) as service, socket.create_connection(("127.0.0.1", service.port), timeout=30) as idle:
        idle.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert service.terminate() == 0


def freeze(service: Duetime, receiver: Receiver) -> None:
    """Stop the process for longer than its lease, and let the receiver respond meanwhile."""
    service.signal(signal.SIGSTOP)
    time.sleep(1.2)
    receiver.release()
    time.sleep(0.1)
    service.signal(signal.SIGCONT)


def test_a_frozen_process_continues(tmp_path: Path) -> None:
    """A process that was suspended for longer than its lease (a closed laptop, a paused machine) resumes and fires what
    is due."""
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, DUETIME_LEASE_TTL="1s") as service:
        begun = service.create(receiver.reply("/begun", Reply(hang=True)))
        later = service.create(receiver.url("/later"), seconds=60)
        service.advance()
        receiver.wait("/begun")
        freeze(service, receiver)
        assert service.finished(begun)["status"] == "completed"
        service.advance("1m")
        assert service.finished(later)["status"] == "completed"
        assert len(receiver.at("/begun")) == len(receiver.at("/later")) == 1


def test_a_frozen_process_loses_no_begun_timer(tmp_path: Path) -> None:
    """Begun, and queued for its destination when the lease ran out: it must be fired even without a restart."""
    env: dict[str, Any] = {"DUETIME_LEASE_TTL": "1s", "DUETIME_MAX_PER_DESTINATION": "1"}
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, **env) as service:
        receiver.reply("/begun", Reply(hang=True), Reply(200))
        ids = [service.create(receiver.url("/begun")) for _ in range(2)]
        service.advance()
        receiver.wait("/begun")
        freeze(service, receiver)
        until("the first is recorded", lambda: service.total("completed") >= 1)
        if service.total("completed") == 2:
            pytest.skip("the lease was renewed before the second attempt was looked at")
        service.advance("40s")  # past the deadline of the attempt, in case that matters
        until("both are done", lambda: service.total("completed") == 2)
        assert {service.get(id)["status"] for id in ids} == {"completed"}
