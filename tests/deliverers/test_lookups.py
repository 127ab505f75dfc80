"""DNS lookups share threads fairly: hanging names delay no others, and a shortage of threads fails no name."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest

from duetime.deliverers import http as http_module
from duetime.deliverers import lookups as module
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.deliverers.lookups import Lookups, parent_of
from duetime.deliverers.unsent import NotSent
from duetime.model import Definition, HttpTarget, OutcomeKind, Timer, Unsent
from duetime.urls import parse_url
from tests.clocks import all_at

Run = Callable[..., Any]
NoDescriptors = Callable[[], AbstractContextManager[None]]
INNOCENT = [f"hooks.innocent-{n}.example" for n in range(15)]


class Dns:
    """Names that begin with "hang" do not resolve before ``release``; names that begin with "slow" take 0.1 s."""

    def __init__(self) -> None:
        self.address = "1.1.1.1"
        self.asked: list[str] = []
        self.released = threading.Event()
        self.turns = threading.Semaphore(0)

    def getaddrinfo(self, host: bytes, *_: object, **__: object) -> list[Any]:
        name = host.decode()
        self.asked.append(name)
        if name.startswith("hang"):
            self.released.wait(60)
        elif name.startswith("slow"):
            time.sleep(0.1)
        elif name.startswith("turn"):
            self.turns.acquire(timeout=60)
        elif name.startswith("bug"):
            raise KeyError(name)
        elif name.startswith("gone"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, 0))]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    dns = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", dns.getaddrinfo)
    yield dns
    dns.released.set()
    dns.turns.release(1000)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the number of threads, and how many of them are for known parents and for optional lookups."""

    def threads(number: int, *, reserved: int = 0, optional: int | None = None) -> None:
        monkeypatch.setattr(module, "THREADS_MAX", number)
        monkeypatch.setattr(module, "RESERVED", reserved)
        monkeypatch.setattr(module, "OPTIONAL_MAX", number if optional is None else optional)

    return threads


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_failed_tests_do_not_count() -> None:
    _earlier.update(threading.enumerate())


def alive() -> int:
    return sum(thread.name == "duetime-dns" for thread in threading.enumerate() if thread not in _earlier)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a condition of threads, which tell nobody
            await asyncio.sleep(0.001)


def start(lookups: Lookups, *hosts: str, **options: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(lookups.find(host, **options)) for host in hosts]


async def end(lookups: Lookups, dns: Dns, *tasks: asyncio.Task[Any]) -> None:
    """Let everything finish, and check that nothing is left over."""
    dns.released.set()
    dns.turns.release(1000)
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not lookups._pending)
    assert (lookups._running, lookups._optional, lookups._queued) == (0, 0, 0)
    assert not lookups._parents
    assert not any(lookups._waiting.values())
    lookups.close()
    await until(lambda: not alive())


def deliverer_for(clock: Any, **policy: Any) -> HttpDeliverer:
    return HttpDeliverer(egress=Egress(clock, **policy), clock=clock, keys_of=lambda namespace: (), version="1")


def timer_for(url: str) -> Timer:
    definition = Definition(target=HttpTarget(url=url))
    return Timer("default", "t-1", 0, definition, *all_at(1), revision=9, firing=7, attempt=1)


def test_parent_is_the_last_two_labels_of_a_name() -> None:
    assert parent_of("a.b.example.com") == parent_of("example.com") == parent_of("c.example.com.") == "example.com"
    assert parent_of("localhost") == "localhost"


# Fairness.


def test_a_thousand_hanging_names_of_one_parent_delay_no_other(run: Run, clock: Any, dns: Dns) -> None:
    async def main() -> None:
        lookups = Lookups(clock)
        hanging = start(lookups, *(f"hang-{n}.bad.example" for n in range(1000)))
        await asyncio.sleep(0)
        assert lookups._running <= module.THREADS_MAX / module.PARENT_SHARE
        assert await asyncio.gather(*start(lookups, *INNOCENT)) == [["1.1.1.1"]] * 15
        assert not any(task.done() for task in hanging)
        await end(lookups, dns, *hanging)

    run(main())


def test_a_thousand_hanging_names_of_a_thousand_parents_delay_no_other(run: Run, clock: Any, dns: Dns) -> None:
    async def main() -> None:
        lookups = Lookups(clock)
        hanging = start(lookups, *(f"hang.bad-{n}.example" for n in range(1000)))
        await asyncio.sleep(0)
        assert await asyncio.gather(*start(lookups, *INNOCENT)) == [["1.1.1.1"]] * 15
        assert not any(task.done() for task in hanging)
        await end(lookups, dns, *hanging)

    run(main())


def test_deliveries_arrive_while_a_thousand_lookups_hang(run: Run, Peer: Any, clock: Any, dns: Dns) -> None:
    dns.address = "127.0.0.1"

    async def script(line: Any) -> None:
        with suppress(ConnectionError):
            while True:
                await line.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def main() -> None:
        deliverer = deliverer_for(clock, allow_loopback=True)
        hosts = [f"hang.bad-{n % 500}.example" if n % 2 else f"hang-{n}.bad.example" for n in range(1000)]
        async with Peer(script, last_forever=True) as peer:
            hanging, innocent = (
                [
                    asyncio.create_task(deliverer.deliver(timer_for(f"http://{host}:{peer.port}/"), 30_000))
                    for host in on
                ]
                for on in (hosts, INNOCENT)
            )
            assert [outcome.status for outcome in await asyncio.gather(*innocent)] == [200] * 15
            assert not any(task.done() for task in hanging)
            await deliverer.close()
            outcomes = await asyncio.gather(*hanging)
        assert {(outcome.kind, outcome.cause) for outcome in outcomes} == {(OutcomeKind.UNSENT, Unsent.DRAIN)}

    run(main())


def test_parents_that_resolved_recently_have_reserved_threads(run: Run, clock: Any, dns: Dns, threads: Any) -> None:
    threads(16, reserved=2)

    async def main() -> None:
        lookups = Lookups(clock)
        await asyncio.gather(*start(lookups, *INNOCENT))
        clock.seconds += module.KNOWN_SECONDS - 1
        hanging = start(lookups, *(f"hang.bad-{n}.example" for n in range(20)), "fresh.example")
        await asyncio.sleep(0)
        assert lookups._running == 14
        assert await asyncio.gather(*start(lookups, *INNOCENT)) == [["1.1.1.1"]] * 15
        assert not any(task.done() for task in hanging)
        # A parent that becomes known while it waits starts at once.
        dns.asked.clear()
        waiting = start(lookups, "a.turn.example", "b.turn.example")
        await asyncio.sleep(0)
        assert dns.asked == []
        lookups._note_known(lookups._parents["turn.example"])
        lookups._start_waiting()
        assert await asyncio.gather(*waiting) == [["1.1.1.1"]] * 2
        await end(lookups, dns, *hanging)

    run(main())


def test_known_parents_expire_and_are_bounded(run: Run, clock: Any, dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_MAX", 3)

    async def main() -> None:
        lookups = Lookups(clock)
        for name in ("a.example", "b.example", "a.example", "c.example", "gone.example", "d.example"):
            await lookups.find(name)
        assert list(lookups._known) == ["a.example", "c.example", "d.example"]
        assert lookups._is_known("a.example")
        clock.seconds += module.KNOWN_SECONDS
        assert not lookups._is_known("a.example")
        await end(lookups, dns)

    run(main())


@pytest.mark.parametrize("name", ["slow-{}.example.com", "slow.example-{}.com"], ids=["one parent", "many parents"])
def test_two_thousand_hosts_that_take_100_ms_all_resolve(run: Run, clock: Any, dns: Dns, name: str) -> None:
    async def main() -> None:
        lookups = Lookups(clock)
        assert await asyncio.gather(*start(lookups, *(name.format(n) for n in range(2000)))) == [["1.1.1.1"]] * 2000
        await end(lookups, dns)

    run(main())


def test_waiting_parents_take_turns(run: Run, clock: Any, dns: Dns, threads: Any) -> None:
    threads(1)

    async def main() -> None:
        lookups = Lookups(clock)
        hosts = ["turn-1.a.b", "turn-2.a.b", "turn-3.a.b", "turn-4.a.b", "turn-1.c.d", "turn-2.c.d", "turn-1.e.f"]
        tasks = start(lookups, *hosts)
        for _ in hosts:
            dns.turns.release()
        await asyncio.gather(*tasks)
        assert dns.asked == [
            "turn-1.a.b",  # Known from now on.
            "turn-2.a.b",
            "turn-1.c.d",
            "turn-3.a.b",
            "turn-1.e.f",
            "turn-2.c.d",
            "turn-4.a.b",
        ]
        await end(lookups, dns)

    run(main())


# Limits.


def test_an_attempt_whose_lookup_never_started_does_not_count(run: Run, clock: Any, dns: Dns, threads: Any) -> None:
    threads(1)

    async def main() -> None:
        deliverer = deliverer_for(clock)
        hanging = asyncio.create_task(deliverer.deliver(timer_for("http://hang.example/"), 30_000))
        await until(lambda: dns.asked)
        for _ in range(2):  # it is not cached
            outcome = await deliverer.deliver(timer_for("http://other.example/"), 50)
            assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.LOOKUPS)
        # A lookup that started and timed out is the destination's failure.
        outcome = await deliverer.deliver(timer_for("http://hang.example/"), 50)
        assert outcome.kind is OutcomeKind.TIMED_OUT
        hanging.cancel()
        await deliverer.close()

    run(main())
    assert dns.asked == ["hang.example"]


def test_an_attempt_with_too_little_time_left_after_the_queue_does_not_count(
    run: Run, clock: Any, dns: Dns, threads: Any
) -> None:
    threads(1)

    async def main() -> None:
        lookups = Lookups(clock)
        tasks = start(lookups, "turn.example", "hang.example", until=asyncio.get_running_loop().time() + 1)
        await until(lambda: dns.asked)
        dns.turns.release()
        assert await tasks[0] == ["1.1.1.1"]
        with pytest.raises(NotSent) as caught:
            await tasks[1]
        assert caught.value.cause is Unsent.LOOKUPS
        assert dns.asked == ["turn.example", "hang.example"]
        await end(lookups, dns)

    run(main())


def test_the_timeout_begins_when_the_lookup_starts(
    run: Run, clock: Any, dns: Dns, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    monkeypatch.setattr(module, "LOOKUP_SECONDS_MAX", 1.0)

    async def main() -> None:
        lookups = Lookups(clock)
        tasks = start(lookups, "turn-1.example", "turn-2.example")
        for _ in tasks:
            await asyncio.sleep(0.6)
            dns.turns.release()
        assert await asyncio.gather(*tasks) == [["1.1.1.1"]] * 2
        assert await lookups.find("hang.example") == "hang.example was not resolved within 1s"
        with pytest.raises(NotSent):
            await lookups.find("other.example")
        await end(lookups, dns)

    run(main())


def test_a_full_queue_rejects_callers_and_no_parent_can_fill_it(
    run: Run, clock: Any, dns: Dns, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    monkeypatch.setattr(module, "QUEUE_MAX", 20)

    async def main() -> None:
        lookups = Lookups(clock)
        greedy = start(lookups, "hang.example", *(f"a-{n}.greedy.example" for n in range(30)))
        await asyncio.sleep(0)
        assert len(lookups._parents["greedy.example"].queue) == 7
        others = start(lookups, *(f"{n}.example" for n in range(30)))
        await asyncio.sleep(0)
        assert lookups._queued == 20
        await asyncio.sleep(0)
        assert sum(task.done() for task in greedy) == 23
        assert sum(task.done() for task in others) == 30 - 13
        await end(lookups, dns, *greedy, *others)
        errors = [task.exception() for task in (*greedy, *others)]
        assert {error.cause for error in errors if isinstance(error, NotSent)} == {Unsent.LOOKUPS}
        assert errors.count(None) == 1 + 20

    run(main())


def test_an_abandoned_lookup_leaves_the_queue(run: Run, clock: Any, dns: Dns, threads: Any) -> None:
    threads(1)

    async def main() -> None:
        lookups = Lookups(clock)
        hanging = start(lookups, "hang.example")
        waiting = start(lookups, "a.example", "a.example", "b.example")
        await asyncio.sleep(0)
        assert lookups._queued == 2
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0)
        assert list(lookups._pending) == ["hang.example", "a.example"]
        await end(lookups, dns, *hanging, *waiting)
        assert waiting[1].result() == ["1.1.1.1"]

    run(main())
    assert dns.asked == ["hang.example", "a.example"]


# Optional lookups, for creates.


def test_optional_lookups_use_few_threads_and_never_queue(run: Run, clock: Any, dns: Dns, threads: Any) -> None:
    threads(64, optional=8)

    async def main() -> None:
        lookups = Lookups(clock)
        optional = start(lookups, *(f"hang-{n}.example" for n in range(100)), optional=True)
        await asyncio.sleep(0)
        assert (lookups._running, lookups._queued) == (8, 0)
        await asyncio.sleep(0)
        assert sum(task.done() for task in optional) == 92
        assert await asyncio.gather(*start(lookups, *INNOCENT)) == [["1.1.1.1"]] * 15
        # A delivery shares the lookup that a create has started.
        joined = start(lookups, "hang-0.example")
        await asyncio.sleep(0)
        await end(lookups, dns, *optional, *joined)
        assert joined[0].result() == ["1.1.1.1"]

    run(main())
    assert dns.asked.count("hang-0.example") == 1


def test_a_busy_pool_does_not_delay_a_create(
    run: Run, clock: Any, dns: Dns, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    monkeypatch.setattr(http_module, "CHECK_SECONDS_MAX", 1000.0)
    monkeypatch.setattr(module, "LOOKUP_SECONDS_MAX", 1000.0)

    async def main() -> None:
        deliverer = deliverer_for(clock)
        tasks = [
            asyncio.create_task(deliverer.deliver(timer_for(f"http://{name}.example/"), 30_000))
            for name in ("hang", "queued")
        ]
        await until(lambda: dns.asked)
        for name in ("other", "queued"):
            await deliverer.check(HttpTarget(url=f"http://{name}.example/"))
        for task in tasks:
            task.cancel()
        await deliverer.close()

    run(main())
    assert dns.asked == ["hang.example"]


# Threads.


def test_idle_threads_end(run: Run, clock: Any, dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREAD_IDLE_SECONDS", 0.05)

    async def main() -> None:
        lookups = Lookups(clock)
        hanging = start(lookups, "hang.example")
        await asyncio.gather(*start(lookups, *(f"slow.{n}.example" for n in range(50))))
        await until(lambda: alive() == 1)
        dns.released.set()
        await until(lambda: not alive())
        assert await lookups.find("again.example") == ["1.1.1.1"]
        assert alive() == 1
        await end(lookups, dns, *hanging)

    run(main())


def test_threads_are_reused(run: Run, clock: Any, dns: Dns) -> None:
    async def main() -> None:
        lookups = Lookups(clock)
        for n in range(50):
            await lookups.find(f"{n}.example")
        assert alive() == 1
        await end(lookups, dns)

    run(main())


def test_only_lookup_threads_have_small_stacks(run: Run, clock: Any, dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    begin = threading.Thread.start

    def begin_and_note(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begin_and_note)
    before = threading.stack_size()

    async def main() -> None:
        lookups = Lookups(clock)
        await lookups.find("a.example")
        await end(lookups, dns)

    run(main())
    assert sizes == [module.STACK_BYTES]
    assert threading.stack_size() == before


def test_lookups_wait_for_existing_threads_if_none_can_be_started(
    run: Run, clock: Any, dns: Dns, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def begin_few(thread: threading.Thread) -> None:
        if alive() >= allowed:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begin_few)
    allowed = 0

    async def main() -> None:
        nonlocal allowed
        lookups = Lookups(clock)
        with pytest.raises(NotSent):
            await lookups.find("a.example", asyncio.get_running_loop().time() + 0.05)
        allowed = 2
        tasks = start(lookups, *(f"{n}.example" for n in range(20)))
        assert await asyncio.gather(*tasks) == [["1.1.1.1"]] * 20
        assert alive() <= 2
        await end(lookups, dns)

    run(main())


def test_closing_does_not_wait_for_hanging_lookups(run: Run, clock: Any, dns: Dns, threads: Any) -> None:
    threads(1)

    async def main() -> None:
        egress = Egress(clock)
        names = ("hang", "queued")
        tasks = [asyncio.create_task(egress.resolve(parse_url(f"http://{name}.example/"))) for name in names]
        await until(lambda: dns.asked)
        await egress.close()
        for task in tasks:
            with pytest.raises(NotSent) as caught:
                await task
            assert caught.value.cause is Unsent.DRAIN
        with pytest.raises(NotSent, match="shutting down"):
            await egress.resolve(parse_url("http://late.example/"))
        assert alive() == 1
        dns.released.set()
        await until(lambda: not alive())

    run(main())
    assert dns.asked == ["hang.example"]


def test_a_lookup_may_outlive_the_event_loop(run: Run, clock: Any, dns: Dns) -> None:
    async def main() -> None:
        lookups = Lookups(clock)
        (task,) = start(lookups, "hang.example")
        await until(lambda: dns.asked)
        lookups.close()
        with pytest.raises(NotSent):
            await task

    run(main())
    dns.released.set()
    for thread in threading.enumerate():
        if thread.name == "duetime-dns":
            thread.join(30)
    assert not alive()


# Other shortages.


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),  # how Python reports EAI_SYSTEM
        OSError(errno.ENFILE, "Too many open files in system"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.ENOBUFS, "No buffer space available"),
        socket.gaierror(socket.EAI_MEMORY, "Memory allocation failure"),
    ],
    ids=str,
)
def test_a_lookup_without_descriptors_or_memory_does_not_count(
    run: Run, clock: Any, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def lookup(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def main() -> None:
        deliverer = deliverer_for(clock)
        for _ in range(2):
            outcome = await deliverer.deliver(timer_for("http://short.example/"), 10_000)
            assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.DESCRIPTORS)
        await deliverer.close()

    run(main())


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_FAIL])
def test_any_lookup_error_counts_as_shortage_while_out_of_descriptors(
    run: Run,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
    no_descriptors: NoDescriptors,
    code: int,
) -> None:
    def lookup(*_: object, **__: object) -> Any:
        raise socket.gaierror(code, "who knows")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def main() -> None:
        deliverer = deliverer_for(clock)
        timer = timer_for("http://short.example/")
        with no_descriptors():
            outcome = await deliverer.deliver(timer, 10_000)
        assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.DESCRIPTORS)
        assert (await deliverer.deliver(timer, 10_000)).kind is OutcomeKind.UNREACHABLE
        await deliverer.close()

    run(main())


@pytest.mark.parametrize("when", ["before", "after"])
def test_descriptors_may_run_out_or_come_back_during_a_lookup(
    run: Run, clock: Any, monkeypatch: pytest.MonkeyPatch, no_descriptors: NoDescriptors, when: str
) -> None:
    shortage = no_descriptors()

    def lookup(*_: object, **__: object) -> Any:
        if when == "before":
            shortage.__exit__(None, None, None)
        else:
            shortage.__enter__()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def main() -> None:
        lookups = Lookups(clock)
        if when == "before":
            shortage.__enter__()
        with pytest.raises(NotSent) as caught:
            await lookups.find("short.example")
        if when == "after":
            shortage.__exit__(None, None, None)
        assert caught.value.cause is Unsent.DESCRIPTORS
        lookups.close()

    run(main())


def test_real_lookup_without_descriptors_is_not_sent(run: Run, clock: Any, no_descriptors: NoDescriptors) -> None:
    async def main() -> None:
        lookups = Lookups(clock)
        with no_descriptors(), pytest.raises(NotSent) as caught:
            await lookups.find("localhost")
        assert caught.value.cause is Unsent.DESCRIPTORS
        assert isinstance(await lookups.find("localhost"), list)
        lookups.close()

    run(main())


def test_an_internal_error_in_a_lookup_does_not_count(
    run: Run, clock: Any, dns: Dns, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        deliverer = deliverer_for(clock)
        outcome = await deliverer.deliver(timer_for("http://bug.example/"), 10_000)
        assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.INTERNAL)
        await deliverer.close()

    run(main())
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]
