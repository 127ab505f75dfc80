"""``verify_webhook`` agrees with the official package on valid and invalid signatures and on real callbacks."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from standardwebhooks import Webhook

from duetime.client import Client, InvalidSignature, verify_webhook
from tests.servers import KEY, Receiver

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + "QUJD" * 8
BODY = '{"payload":{"ü":1}}'


def signed(secret: str = SECRET, *, age: timedelta = timedelta(0), body: str = BODY) -> dict[str, str]:
    at = datetime.now(UTC) - age
    return {
        "Webhook-Id": "msg_1",
        "webhook-timestamp": str(int(at.timestamp())),
        "WEBHOOK-SIGNATURE": Webhook(secret).sign("msg_1", at, body),
    }


def test_signatures_of_the_official_package_are_valid() -> None:
    assert verify_webhook(SECRET, signed(), BODY) == {"payload": {"ü": 1}}
    assert verify_webhook(SECRET, signed(), BODY.encode()) == {"payload": {"ü": 1}}
    assert verify_webhook([OTHER, SECRET], signed(), BODY)
    assert verify_webhook(SECRET.removeprefix("whsec_"), signed(), BODY)
    both = signed()
    both["WEBHOOK-SIGNATURE"] = f"{signed(OTHER)['WEBHOOK-SIGNATURE']} {both['WEBHOOK-SIGNATURE']}"
    assert verify_webhook(SECRET, both, BODY) and verify_webhook(OTHER, both, BODY)
    assert verify_webhook(SECRET, signed(body=""), b"") is None
    assert verify_webhook(SECRET, signed(age=timedelta(minutes=4, seconds=55)), BODY)
    assert verify_webhook(SECRET, signed(age=timedelta(hours=1)), BODY, tolerance=timedelta(hours=2))


@pytest.mark.parametrize(
    "change",
    [
        {"Webhook-Id": "msg_2"},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "-1"},
        {"WEBHOOK-SIGNATURE": ""},
        {"WEBHOOK-SIGNATURE": "v1,"},
        {"WEBHOOK-SIGNATURE": "v1,!!!"},
        {"WEBHOOK-SIGNATURE": signed(OTHER)["WEBHOOK-SIGNATURE"]},
        {"WEBHOOK-SIGNATURE": signed()["WEBHOOK-SIGNATURE"].replace("v1,", "v2,")},
    ],
)
def test_changed_headers_are_rejected(change: dict[str, str]) -> None:
    with pytest.raises(InvalidSignature):
        verify_webhook(SECRET, signed() | change, BODY)


def test_old_incomplete_and_changed_callbacks_are_rejected() -> None:
    for age in (timedelta(minutes=5, seconds=5), -timedelta(minutes=5, seconds=5)):
        with pytest.raises(InvalidSignature, match="differs from the current time"):
            verify_webhook(SECRET, signed(age=age), BODY)
    for name in signed():
        with pytest.raises(InvalidSignature, match=f"no {name.lower()} header"):
            verify_webhook(SECRET, {key: value for key, value in signed().items() if key != name}, BODY)
    with pytest.raises(InvalidSignature, match="not signed with this secret"):
        verify_webhook(SECRET, signed(), BODY + " ")
    later = signed()
    later["webhook-timestamp"] = str(int(later["webhook-timestamp"]) + 1)
    with pytest.raises(InvalidSignature, match="not signed with this secret"):
        verify_webhook(SECRET, later, BODY)
    with pytest.raises(InvalidSignature, match="not JSON"):
        verify_webhook(SECRET, signed(body="text"), "text")
    for nonsense in ("", "whsec_", "whsec_ü"):
        with pytest.raises(ValueError, match="add_secret"):
            verify_webhook(nonsense, signed(), BODY)


def test_real_callback_verifies_during_a_rotation(url: str, receiver: Receiver) -> None:
    name = uuid.uuid4().hex
    with Client(url, KEY) as client:
        client.create_namespace(name)
        old, new = client.add_secret(name).secret, client.add_secret(name).secret
        client.create(namespace=name, delay="0s", callback_url=receiver.url(f"/{name}"), payload=[7])
        [request] = receiver.wait(f"/{name}")
    for secret in (old, new):
        callback = verify_webhook(secret, request.headers, request.body)
        assert callback["payload"] == [7]
        assert Webhook(secret).verify(request.body, request.headers) == callback
