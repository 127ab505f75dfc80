"""Standard Webhooks signatures: how a receiver knows that a callback is ours and is fresh.

What is signed is ``<delivery id>.<seconds>.<body>``, by HMAC-SHA256, once per key: during a rotation the old and the
new key both sign, and a receiver with either of them is content.
"""

from __future__ import annotations

import hashlib
import secrets
from base64 import b64encode
from binascii import b2a_base64
from collections.abc import Sequence
from functools import lru_cache

KEY_BYTES = 32
KEYS_CACHED_MAX = 1024
PREFIX = "whsec_"

_BLOCK_BYTES = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


def sign(keys: Sequence[bytes], delivery_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of ``webhook-signature``: one ``v1,<base64>`` per key, the newest key's wherever the caller puts it."""
    message = b"%b.%d.%b" % (delivery_id.encode(), timestamp_s, body)
    signatures = []
    for key in keys:
        inner, outer = _begun(key)
        inner = inner.copy()
        inner.update(message)
        outer = outer.copy()
        outer.update(inner.digest())
        signatures.append("v1," + b2a_base64(outer.digest(), newline=False).decode("ascii"))
    return " ".join(signatures)


@lru_cache(maxsize=KEYS_CACHED_MAX)
def _begun(key: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """Both hashes of an HMAC with the key already in them.

    A namespace signs all its callbacks with one key, and OpenSSL takes longer to set an HMAC up than to compute it.
    """
    if len(key) > _BLOCK_BYTES:
        key = hashlib.sha256(key).digest()
    key = key.ljust(_BLOCK_BYTES, b"\0")
    return hashlib.sha256(key.translate(_INNER)), hashlib.sha256(key.translate(_OUTER))


def new_secret() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def to_text(key: bytes) -> str:
    """The key as receivers paste it."""
    return PREFIX + b64encode(key).decode("ascii")
