"""Which secrets a namespace keeps when one is added or deleted, so that receivers can change over without a gap.

The newest secret is the current one and does not expire. The one that it replaced signs, too, for a day.
"""

from __future__ import annotations

import msgspec

from duetime.errors import SecretNotFound
from duetime.model import DAY_MS, Namespace, Secret

ROTATION_MS = DAY_MS
"""How long the secret before the newest one still signs."""
SECRETS_MAX = 10


def add(namespace: Namespace, secret: Secret, now: int) -> Namespace:
    """The namespace with a new current secret. An older one that has its end already keeps it."""
    older = tuple(
        s if s.expires_at is not None else msgspec.structs.replace(s, expires_at=now + ROTATION_MS)
        for s in namespace.signing(now)
    )
    return msgspec.structs.replace(namespace, secrets=(secret, *older)[:SECRETS_MAX])


def remove(namespace: Namespace, id: str, now: int) -> Namespace:
    """The namespace without a secret. The newest of those that still sign becomes the current one."""
    if all(secret.id != id for secret in namespace.secrets):
        raise SecretNotFound
    kept = [secret for secret in namespace.signing(now) if secret.id != id]
    if kept:
        kept[0] = msgspec.structs.replace(kept[0], expires_at=None)
    return msgspec.structs.replace(namespace, secrets=tuple(kept))
