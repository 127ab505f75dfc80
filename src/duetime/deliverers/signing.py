"""Standard Webhooks signatures, with which a receiver checks that a callback is authentic and recent.

The signed text is ``<delivery id>.<seconds>.<body>``, with HMAC-SHA256, once per key: during a rotation the old and the
new key both sign, so a receiver can verify with either.
"""

from __future__ import annotations

import hashlib
from binascii import b2a_base64
from collections.abc import Sequence
from functools import lru_cache

KEYS_CACHED_MAX = 1024

_BLOCK_BYTES = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


def sign(keys: Sequence[bytes], delivery_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of ``webhook-signature``: one ``v1,<base64>`` per key, in the order of the keys."""
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
    """The inner and outer hash of an HMAC, already fed with the key.

    Cached because a namespace signs all its callbacks with one key, and OpenSSL takes longer to set up an HMAC than to
    compute it.
    """
    if len(key) > _BLOCK_BYTES:
        key = hashlib.sha256(key).digest()
    key = key.ljust(_BLOCK_BYTES, b"\0")
    return hashlib.sha256(key.translate(_INNER)), hashlib.sha256(key.translate(_OUTER))
