"""A service and a receiver for the tests of the clients, and a fixture that runs a test with each of both clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duetime.client import AsyncClient, Client
from tests.servers import KEY, Duetime, Receiver


class Blocking:
    """An ``AsyncClient`` with blocking methods, so that one test can cover both clients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **options: Any) -> Any:
            async def done() -> Any:
                result = getattr(self.client, name)(*args, **options)
                return await result if inspect.isawaitable(result) else iter([each async for each in result])

            return self._runner.run(done())

        return method

    def together(self, name: str, arguments: list[dict[str, Any]]) -> list[Any]:
        async def done() -> list[Any]:
            return list(await asyncio.gather(*(getattr(self.client, name)(**each) for each in arguments)))

        return self._runner.run(done())

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("service")) as service:
        service.disconnect()  # the server may close an idle connection before a test uses it
        yield service
        assert "Traceback" not in service.stderr, service.stderr


@pytest.fixture(scope="session")
def url(service: Duetime) -> str:
    return f"http://127.0.0.1:{service.port}"


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.release()


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Client]]:
    """Creates clients and closes them."""
    made: list[Any] = []

    def build(*args: Any, **options: Any) -> Client:
        made.append(request.param(*args, **options))
        client: Client = made[-1]
        return client

    yield build
    for client in made:
        client.close()


@pytest.fixture
def client(make: Callable[..., Client], url: str) -> Client:
    """A client of the service. ``Client`` stands for both classes in annotations."""
    return make(url, KEY)
