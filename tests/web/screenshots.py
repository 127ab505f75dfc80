"""Takes the screenshots in ``docs/images``: a service with the timers of a shop, after some minutes of traffic.

``make screenshots`` runs it. Callbacks go to a receiver on loopback. Host names under ``.example`` do not resolve, so
timers for them fail, as intended.
"""

from __future__ import annotations

import math
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from tests.servers import Duetime, Receiver, Reply
from tests.web.browser import chromium, signed_in

IMAGES = Path(__file__).parents[2] / "docs/images"
WORK_SECONDS = 150
DESKTOP, PHONE = (1280, 800), (390, 800)
OVERVIEW_HEIGHT = 1_150
TIMER = "#/timers/billing/payment-retry-1042"
WHILE_WORKING = {
    ("desktop", "light"): {"overview": "#/"},
    ("desktop", "dark"): {"overview": "#/", "timer": TIMER},
    ("phone", "light"): {"overview": "#/", "timer": TIMER},
    ("phone", "dark"): {"overview": "#/", "create": "#/create"},
}
# The list of timers, once the traffic has stopped.
AFTERWARDS = {("desktop", "light"): {"timers": "#/timers"}}

SHOP = "https://shop.acme.example/hooks"


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, Duetime(Path(place)) as service, Receiver() as receiver:
        print(f"working for {WORK_SECONDS} s …")
        fill(service, receiver)
        done = threading.Event()
        worker = threading.Thread(target=work, args=(service, receiver, done))
        worker.start()
        try:
            time.sleep(WORK_SECONDS)
            with chromium() as browser:
                shoot(browser, service, WHILE_WORKING)
                done.set()
                worker.join()
                time.sleep(3)
                shoot(browser, service, AFTERWARDS)
        finally:
            done.set()
            worker.join()
    for image in sorted(IMAGES.glob("*.png")):
        print(f"{image.relative_to(Path.cwd())}: {image.stat().st_size // 1024} KiB")


def fill(service: Duetime, receiver: Receiver) -> None:
    """Create pending timers, and some that fail."""
    chance = random.Random(7)
    for name, retention in (("billing", "30d"), ("carts", "7d"), ("reminders", None)):
        assert ask(service, "POST", "/namespaces", {"name": name, "retention": retention})["name"] == name
    kinds = [
        ("billing", "payment-retry", "payments"),
        ("carts", "cart-expires", "carts"),
        ("reminders", "visit", "mail"),
    ]
    timers = []
    for n in range(900):
        namespace, kind, path = kinds[min(2, int(chance.expovariate(1)))]
        hours = abs(chance.gauss(0, 5)) + chance.random() ** 3
        timers.append(
            {
                "namespace": namespace,
                "id": f"{kind}-{4_000 + n}",
                "delay": f"{600 + int(hours * 3_600)}s",
                "callbackUrl": f"{SHOP}/{path}",
                "correlationId": f"order-{1_000 + n // 2}",
                "payload": {"order": 1_000 + n // 2},
            }
        )
    ask(service, "POST", "/timers/batch", {"timers": timers})
    broken = {
        "https://crm.acme.example/sync": 9,
        "https://sms.acme.example/send": 4,
        receiver.reply("/stock", Reply(503)): 3,
    }
    for url, count in broken.items():
        for n in range(count):
            ask(
                service,
                "POST",
                "/timers",
                {
                    "namespace": "reminders",
                    "id": f"sync-{url[8:11]}-{70 + n}",
                    "delay": "0s",
                    "callbackUrl": url,
                    "correlationId": f"order-{900 + n}",
                    "retryPolicy": {"maxRetries": 0},
                },
            )
    shown = {
        "namespace": "billing",
        "id": "payment-retry-1042",
        "delay": f"{WORK_SECONDS - 12}s",
        "callbackUrl": receiver.reply("/payments", Reply(503, b'{"error": "try again"}'), Reply()),
        "correlationId": "order-1042",
        "callbackHeaders": {"X-Tenant": "acme"},
        "payload": {"order": 1042, "amount": {"value": "49.90", "currency": "EUR"}, "attempt": "second card"},
        "metadata": {"team": "payments"},
        "retryPolicy": {"maxRetries": 5, "initialInterval": "3s", "jitter": False},
    }
    ask(service, "POST", "/timers", shown)


def work(service: Duetime, receiver: Receiver, done: threading.Event) -> None:
    """Create timers that fire soon, at a rate that goes up and down."""
    chance = random.Random(11)
    refused = receiver.reply("/hooks/sync", Reply(422))
    began, n = time.monotonic(), 0
    while not done.wait(1):
        passed = time.monotonic() - began
        rate = 14 + 9 * math.sin(passed / 17) + chance.uniform(-3, 3)
        timers = []
        for _ in range(max(1, int(rate))):
            n += 1
            # Most fire soon, some later, a few fail.
            kind = chance.choices(["expires", "reminder", "sync"], [74, 20, 6])[0]
            delay = f"{chance.randint(900, 7_200)}s" if kind == "reminder" else f"{chance.randint(500, 1_800)}ms"
            urls = {"expires": receiver.url("/hooks/orders"), "reminder": f"{SHOP}/mail", "sync": refused}
            timers.append(
                {
                    "namespace": chance.choice(["billing", "carts", "reminders"]),
                    "id": f"order-{20_000 + n}-{kind}",
                    "delay": delay,
                    "callbackUrl": urls[kind],
                    "correlationId": f"order-{20_000 + n}",
                    "payload": {"order": 20_000 + n},
                    "retryPolicy": {"maxRetries": 0},
                }
            )
        ask(service, "POST", "/timers/batch", {"timers": timers})


def shoot(browser: Browser, service: Duetime, shown: dict[tuple[str, str], dict[str, str]]) -> None:
    base = f"http://127.0.0.1:{service.port}"
    assert service.key is not None
    for (device, scheme), pages in shown.items():
        width, height = DESKTOP if device == "desktop" else PHONE
        context = signed_in(
            browser,
            base,
            service.key,
            viewport={"width": width, "height": height},
            device_scale_factor=1 if device == "desktop" else 1.5,
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        page = context.new_page()
        for name, hash in pages.items():
            tall = OVERVIEW_HEIGHT if (name, device) == ("overview", "desktop") else height
            page.set_viewport_size({"width": width, "height": tall})
            page.goto("about:blank")
            page.goto(f"{base}/{hash}")
            page.wait_for_selector("main:not([aria-busy]) h1")
            prepare(page, name)
            page.wait_for_timeout(600)
            page.screenshot(path=IMAGES / f"{name}-{device}-{scheme}.png")
        context.close()


def prepare(page: Page, name: str) -> None:
    if name == "create":
        page.get_by_label("When").fill("tomorrow 9:00")
        page.get_by_label("Callback URL").fill(f"{SHOP}/payments")
        page.get_by_label("Payload").fill('{\n  "order": 1042,\n  "amount": {"value": "49.90", "currency": "EUR"}\n}')
        page.evaluate("document.activeElement.blur()")


def ask(service: Duetime, method: str, path: str, body: Any) -> Any:
    answer = service.request(method, f"/api/v1{path}", json=body)
    assert answer.status in (200, 201), answer
    return answer.body


if __name__ == "__main__":
    main()
