"""The signing secrets of a namespace: creates, rotates and removes them so that receivers can switch without a gap.

The newest secret is the current one and does not expire. The secret that it replaced also signs for one more day.
"""

from __future__ import annotations

import secrets
from base64 import b64encode

import msgspec

from duetime.errors import SecretNotFound
from duetime.instants import Instant
from duetime.model import DAY_MS, Namespace, Secret

ROTATION_MS = DAY_MS
"""How long the previous secret still signs."""
SECRETS_MAX = 10
KEY_BYTES = 32
PREFIX = "whsec_"


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def to_text(key: bytes) -> str:
    """The key in the format that receivers configure."""
    return PREFIX + b64encode(key).decode("ascii")


def add(namespace: Namespace, secret: Secret, now: Instant) -> Namespace:
    """The namespace with a new current secret. Older secrets that expire already keep their expiry."""
    older = tuple(
        s if s.expires_at is not None else msgspec.structs.replace(s, expires_at=now + ROTATION_MS)
        for s in namespace.signing(now)
    )
    return msgspec.structs.replace(namespace, secrets=(secret, *older)[:SECRETS_MAX])


def remove(namespace: Namespace, id: str, now: Instant) -> Namespace:
    """The namespace without this secret. The newest secret that still signs becomes the current one."""
    if all(secret.id != id for secret in namespace.secrets):
        raise SecretNotFound(namespace.name, id)
    kept = [secret for secret in namespace.signing(now) if secret.id != id]
    if kept:
        kept[0] = msgspec.structs.replace(kept[0], expires_at=None)
    return msgspec.structs.replace(namespace, secrets=tuple(kept))
