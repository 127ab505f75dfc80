"""For receivers: verifies that a callback was signed with the secret and is recent (Standard Webhooks)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from duetime.client.clock import Clock, SystemClock
from duetime.client.errors import InvalidSignature

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
    """The body of a callback as a Python value; raises ``InvalidSignature`` unless its signature and time are valid.

    ``secret`` is the result of ``add_secret`` (``whsec_…``), or several secrets while one replaces the other.
    ``headers`` are those of the request, in upper or lower case; ``body`` is the unchanged body. A retry carries the
    same ``webhook-id``: store the ids that were handled and ignore repeated ones.
    """
    given = {name.lower(): value for name, value in headers.items()}
    try:
        id, timestamp, signatures = (given[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    except KeyError as missing:
        raise InvalidSignature(f"the callback has no {missing.args[0]} header") from None
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 15):
        raise InvalidSignature("webhook-timestamp is not a number of seconds")
    age = timedelta(milliseconds=(clock or SystemClock()).now() - int(timestamp) * 1000)
    if abs(age) > tolerance:
        raise InvalidSignature(
            f"webhook-timestamp differs from the current time by more than {tolerance}: "
            "the callback is old, or a clock is wrong"
        )
    content = body.encode() if isinstance(body, str) else bytes(body)
    message = f"{id}.{timestamp}.".encode() + content
    good = False
    for each in [secret] if isinstance(secret, str) else secret:
        expected = hmac.digest(_key(each), message, hashlib.sha256)
        for signature in signatures.split(" "):
            version, _, text = signature.partition(",")
            # Compares all signatures, each in constant time, so that the time taken reveals nothing.
            good |= hmac.compare_digest(expected, _decoded(text)) and version == "v1"
    if not good:
        raise InvalidSignature("the callback was not signed with this secret")
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError:
        raise InvalidSignature("the signature is valid, but the body is not JSON") from None


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.strip().removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ValueError(f"a signing secret looks like {PREFIX}…, as add_secret returns it")
    return key


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
