"""One Chromium, one service and one receiver for all tests of the page.

They stop after the tests of this folder, not at the end of the session: while Playwright runs an event loop in this
thread, no other test can run one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.servers import PATIENCE_SECONDS, Duetime, Receiver
from tests.skips import skip
from tests.web.browser import DESKTOP, Missing, Watched, chromium, signed_in, watch

Create = Callable[..., dict[str, Any]]

expect.set_options(timeout=PATIENCE_SECONDS * 1000)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    try:
        with chromium() as browser:
            yield browser
    except Missing as missing:
        skip(missing)


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def create(service: Duetime, receiver: Receiver) -> Create:
    """Creates a timer through the API. By default it is due in an hour and the receiver responds with {"ok": true}."""

    def create(**fields: Any) -> dict[str, Any]:
        asked = {"delay": "1h", "callbackUrl": receiver.url("/hook"), **fields}
        answer = service.request("POST", "/api/v1/timers", json=asked)
        assert answer.status == 200, answer
        made: dict[str, Any] = answer.body
        return made

    return create


@pytest.fixture
def open_page(browser: Browser, service: Duetime) -> Iterator[Callable[..., Watched]]:
    """Opens a page that is signed in. The test fails if the browser reported an error."""
    opened: list[Watched] = []
    base = f"http://127.0.0.1:{service.port}"

    def open_page(hash: str = "", *, size: tuple[int, int] = DESKTOP, **options: Any) -> Watched:
        viewport = {"width": size[0], "height": size[1]}
        assert service.key is not None
        context = signed_in(browser, base, service.key, viewport=viewport, **options)
        watched = watch(context.new_page(), base)
        opened.append(watched)
        watched.page.goto(f"{base}/{hash}")
        watched.settled()
        return watched

    yield open_page
    for watched in opened:
        watched.check()
        watched.close()
