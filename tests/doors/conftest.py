"""One service for all tests of the APIs and one receiver per module; some tests start services of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doors.described import check_answer
from tests.servers import Answer, Duetime, Receiver


@pytest.fixture(scope="session", autouse=True)
def answers_keep_the_document() -> Iterator[None]:
    """Checks every response in these tests against the OpenAPI document."""
    send = Duetime.request

    def checked(service: Duetime, method: str, path: str, **more: Any) -> Answer:
        answer = send(service, method, path, **more)
        check_answer(method, path, answer)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Duetime, "request", checked)
        yield


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("service"), virtual_clock=True, DUETIME_RETENTION="forever") as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr
        assert service.terminate() == 0


@pytest.fixture(scope="module")
def service(shared_service: Duetime) -> Duetime:
    """The shared service: it has a virtual clock and an API key, may call loopback, and holds timers of other tests."""
    # Other modules may have run since the last request, and the service closes idle connections.
    shared_service.disconnect()
    return shared_service


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.release()


@pytest.fixture
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Duetime]]:
    """Starts services for one test only, and kills them when it ends."""
    made: list[Duetime] = []

    def make(**options: object) -> Duetime:
        made.append(Duetime(tmp_path_factory.mktemp("alone"), start=False, **options))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield make
    for service in made:
        service.kill()
