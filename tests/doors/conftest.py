"""One service for all tests of the doors and a receiver for each module; what needs to be alone makes its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers import Duetime, Receiver


@pytest.fixture(scope="session")
def everyones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("service"), virtual_clock=True, DUETIME_RETENTION="forever") as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr
        assert service.terminate() == 0


@pytest.fixture(scope="module")
def service(everyones: Duetime) -> Duetime:
    """A service whose clock tests move, with a key, that may call loopback. Others have left timers in it."""
    everyones.disconnect()  # it closes connections that lie idle, as these did while modules without it ran
    return everyones


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.release()


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Duetime]]:
    """Makes services that this test has for itself, and ends them with it."""
    made: list[Duetime] = []

    def make(**options: object) -> Duetime:
        made.append(Duetime(tmp_path_factory.mktemp("alone"), start=False, **options))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield make
    for service in made:
        service.kill()
