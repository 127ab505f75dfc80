"""Standard Webhooks signatures: how a receiver knows that a callback is ours and is fresh.

What is signed is ``<delivery id>.<seconds>.<body>``, by HMAC-SHA256, once per key: during a rotation the old and the
new key both sign, and a receiver with either of them is content.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from binascii import b2a_base64
from collections.abc import Sequence
from hmac import digest

KEY_BYTES = 32
PREFIX = "whsec_"


def sign(keys: Sequence[bytes], delivery_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of ``webhook-signature``: one ``v1,<base64>`` per key, the newest key's wherever the caller puts it."""
    message = b"%b.%d.%b" % (delivery_id.encode(), timestamp_s, body)
    return " ".join(["v1," + b2a_base64(digest(key, message, "sha256"), newline=False).decode("ascii") for key in keys])


def new_secret() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def to_text(key: bytes) -> str:
    """The key as receivers paste it."""
    return PREFIX + b64encode(key).decode("ascii")
