"""For receivers: is this callback from the server that has our secret, and is it fresh? (Standard Webhooks.)"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from duetime.client.errors import InvalidSignature
from duetime.clock import Clock, SystemClock

TOLERANCE = timedelta(minutes=5)
PREFIX = "whsec_"


def verify_webhook(
    secret: str | Iterable[str],
    headers: Mapping[str, str],
    body: bytes | str,
    *,
    tolerance: timedelta = TOLERANCE,
    clock: Clock | None = None,
) -> Any:
    """The body of a callback as a Python value, once its signature and its time are good; else ``InvalidSignature``.

    ``secret`` is what ``add_secret`` gave (``whsec_…``), or several of these while one replaces the other. ``headers``
    are those of the request, in any case; ``body`` must be its bytes as they came. An attempt that is repeated carries
    the same ``webhook-id``: keep the ids that were handled and drop what comes again.
    """
    given = {name.lower(): value for name, value in headers.items()}
    try:
        id, timestamp, signatures = (given[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    except KeyError as missing:
        raise InvalidSignature(f"the callback has no header {missing.args[0]}") from None
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 15):
        raise InvalidSignature("webhook-timestamp is not a number of seconds")
    age = timedelta(milliseconds=(clock or SystemClock()).now() - int(timestamp) * 1000)
    if abs(age) > tolerance:
        raise InvalidSignature(
            f"webhook-timestamp is off by more than {tolerance}: the callback is old, or a clock wrong"
        )
    content = body.encode() if isinstance(body, str) else bytes(body)
    message = f"{id}.{timestamp}.".encode() + content
    good = False
    for each in [secret] if isinstance(secret, str) else secret:
        expected = hmac.digest(_key(each), message, hashlib.sha256)
        for signature in signatures.split(" "):
            version, _, text = signature.partition(",")
            # All are compared, each in constant time, so that the time taken says nothing about any of them.
            good |= hmac.compare_digest(expected, _decoded(text)) and version == "v1"
    if not good:
        raise InvalidSignature("no signature of the callback is by this secret")
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError:
        raise InvalidSignature("the callback is signed, and its body is not JSON") from None


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.strip().removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ValueError(f"a secret looks like {PREFIX}… and is what add_secret gave")
    return key


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
