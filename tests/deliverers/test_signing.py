from __future__ import annotations

from base64 import b64decode
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from duetime.deliverers.signing import sign
from duetime.secret_rotation import new_key, to_text

ID = "b39da2b4-bd6e-8c69-9e27-4ea6c5a0f7b8"


@settings(deadline=None)
@given(key=st.binary(min_size=1, max_size=80), body=st.text(st.characters(exclude_categories=["Cs"])))
def test_signatures_agree_with_the_official_package(key: bytes, body: str) -> None:
    at = datetime(2026, 1, 31, 9, tzinfo=UTC)
    official = Webhook(to_text(key)).sign(ID, at, body)
    assert sign([key], ID, int(at.timestamp()), body.encode()) == official


def test_only_receivers_with_either_key_accept_the_signature() -> None:
    old, new = new_key(), new_key()
    now_s = int(datetime.now(UTC).timestamp())
    signature = sign([new, old], ID, now_s, b'{"a":1}')
    headers = {"webhook-id": ID, "webhook-timestamp": str(now_s), "webhook-signature": signature}
    for key in (old, new):
        assert Webhook(to_text(key)).verify(b'{"a":1}', headers) == {"a": 1}
    with pytest.raises(WebhookVerificationError):
        Webhook(to_text(new_key())).verify(b'{"a":1}', headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(to_text(old)).verify(b'{"a":2}', headers)


def test_secrets_are_long_and_random_and_round_trip() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(24 <= len(key) <= 64 for key in keys)
    key = keys.pop()
    assert to_text(key).startswith("whsec_")
    assert b64decode(to_text(key).removeprefix("whsec_")) == key
