"""Timer data stays text: a hundred XSS payloads in every field, and the content security policy as second defence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.servers import Duetime, Received, Receiver, Reply, until
from tests.web.browser import Watched

_CODE = "window.hit=1;alert(1)"
_TAGS = [
    "<script>{}</script>",
    "<SCRIPT >{}</SCRIPT>",
    "<img src=x onerror={}>",
    "<svg onload={}>",
    "<svg><script>{}</script></svg>",
    "<body onload={}>",
    "<iframe srcdoc='<script>{}</script>'></iframe>",
    "<iframe src=javascript:{}></iframe>",
    "<details open ontoggle={}>",
    "<input autofocus onfocus={}>",
    "<video><source onerror={}></video>",
    "<math><mtext><img src=x onerror={}></mtext></math>",
    "<a href=javascript:{}>x</a>",
    "<form action=javascript:{}><button>x</button></form>",
    "<object data=javascript:{}></object>",
    "<embed src=javascript:{}>",
    "<link rel=stylesheet href=javascript:{}>",
    "<style>@import 'javascript:{}';</style>",
    "<template><script>{}</script></template>",
    "<x style=animation-name:changed onanimationstart={}>",
]
_AROUND = ["{}", '">{}', "'>{}<!--", "</textarea></pre></td>{}", "${{}}{}{{{{7*7}}}}"]
PAYLOADS = [around.replace("{}", "\x00").replace("{{", "{").replace("}}", "}").replace("\x00", tag.replace("{}", _CODE))
            for tag in _TAGS for around in _AROUND]  # fmt: skip

CLEAN = """() => ({
  hit: window.hit ?? null,
  scripts: document.querySelectorAll("script").length,
  foreign: document.querySelectorAll(
    "main :is(script, img, svg, iframe, object, embed, link, style, video, math, form[action], template)").length,
  handlers: [...document.querySelectorAll("*")].flatMap((node) => [...node.attributes])
    .filter(({ name, value }) => name.startsWith("on") || /^\\s*javascript:/i.test(value)).length,
})"""
NOTHING = {"hit": None, "scripts": 4, "foreign": 0, "handlers": 0}
# Resolves when the page has begun to show the route: before, the page of the previous route is still there.
GO = """(hash) => new Promise((resolve) => {
  addEventListener("hashchange", resolve, { once: true });
  location.hash = hash;
})"""


@pytest.fixture
def hostile() -> Iterator[Receiver]:
    """A receiver that responds with a hostile status line and body."""

    def answer(request: Received) -> Reply:
        text = PAYLOADS[int(request.headers["x-number"])].encode()
        return Reply(raw=b"HTTP/1.1 500 %b\r\nContent-Length: %d\r\n\r\n%b" % (text, len(text), text))

    with Receiver() as receiver:
        receiver.decide(answer)
        yield receiver


def test_xss_payloads_in_every_field_stay_text(
    open_page: Callable[..., Watched], service: Duetime, hostile: Receiver
) -> None:
    assert len(PAYLOADS) == len(set(PAYLOADS)) == 100
    service.request("POST", "/api/v1/namespaces", json={"name": "hostile"})

    timers: list[dict[str, Any]] = [
        {
            "namespace": "hostile",
            "id": payload,
            "delay": "0s",
            "callbackUrl": hostile.url(f"/h?{payload.replace(' ', '/').replace(chr(92), '')}"),
            "correlationId": payload,
            "payload": {payload: [payload]},
            "metadata": payload,
            "callbackHeaders": {"X-Number": str(n), "X-Text": payload},
            "retryPolicy": {"maxRetries": 0},
        }
        for n, payload in enumerate(PAYLOADS)
    ]
    results = service.request("POST", "/api/v1/timers/batch", json={"timers": timers}).body["results"]
    assert {result["status"] for result in results} == {200}, [r for r in results if r["status"] != 200][:3]
    failed = "/api/v1/timers/count?namespace=hostile&status=failed"
    until("all have fired", lambda: service.request("GET", failed).body["timers"] == 100)

    watched = open_page("#/timers?namespace=hostile")
    page = watched.page
    assert page.evaluate(CLEAN) == NOTHING
    seen = page.locator("table.timers tbody a").all_inner_texts()
    page.get_by_role("button", name="Next").click()
    page.get_by_text("Page 2").wait_for()
    seen += page.locator("table.timers tbody a").all_inner_texts()
    assert {" ".join(text.split()) for text in seen} == {" ".join(text.split()) for text in PAYLOADS}
    assert page.evaluate(CLEAN) == NOTHING
    for n, payload in enumerate(PAYLOADS):
        page.evaluate("(hash) => { location.hash = hash }", f"#/timers/hostile/{quote(payload, safe='')}")
        page.wait_for_function(
            "(text) => document.querySelector('main:not([aria-busy]) h1')?.textContent === text", arg=payload
        )
        assert page.evaluate("document.querySelector('.timeline').textContent").count(payload[:40]) >= 1  # in the body
        assert page.evaluate(CLEAN) == NOTHING, payload
        if n % 20 == 0:
            page.get_by_role("button", name="Delete").click()
            page.keyboard.press("Escape")
            for text in (payload, quote(payload, safe="")):  # from the URL
                for place in (f"#/timers?namespace={text}", f"#/timers?id={text}", f"#/namespaces/{text}", f"#/{text}"):
                    page.evaluate(GO, place)
                    page.wait_for_selector("main:not([aria-busy])")
                    assert page.evaluate(CLEAN) == NOTHING, place
    page.evaluate("location.hash = '#/'")
    page.wait_for_selector(".tile")
    assert page.evaluate(CLEAN) == NOTHING
    watched.check()


def test_every_route_sends_a_content_security_policy(service: Duetime) -> None:
    page = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    assert service.request("GET", "/").headers["content-security-policy"] == page
    paths = [
        "/ui/app.js",
        "/ui/style.css",
        "/ui/nothing",
        "/session",
        "/docs",
        "/health",
        "/livez",
        "/readyz",
        "/metrics",
    ]
    paths += [
        "/timers",
        "/timers/x",
        "/api/v1/timers",
        "/api/v1/timers/a/b",
        "/api/v1/overview",
        "/api/v1/openapi.json",
    ]
    paths += ["/nowhere", "/api/v1/nowhere", "/ui/../secret"]
    for path in paths:
        for method in ("GET", "POST", "DELETE"):
            headers = service.request(method, path).headers
            assert headers["content-security-policy"].startswith("default-src 'none'"), path
            assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer", path


def test_page_has_no_inline_script_and_loads_nothing_from_other_hosts(open_page: Callable[..., Watched]) -> None:
    watched = open_page()
    asked: list[str] = []
    watched.page.on("request", lambda request: asked.append(request.url))
    watched.go("")
    assert asked and all(url.startswith(watched.base) for url in asked)
    inline = "document.querySelectorAll('script:not([src]), style').length"
    assert watched.page.evaluate(inline) == 0
