"""The methods, headers and subjects that a timer's target may use. For URLs see ``urls``."""

from __future__ import annotations

METHODS = frozenset({"POST", "PUT", "PATCH"})
# These frame the message, control the connection or authenticate the sender. With a second copy, a client could forge a
# signature, or the receiver would have to guess which of the two is right.
_RESERVED_HEADERS = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "proxy-connection", "te"),
        *("trailer", "upgrade", "expect", "webhook-id", "webhook-timestamp", "webhook-signature", "traceparent"),
    }
)
_RESERVED_PREFIXES = ("duetime-", "nats-")  # "nats-" headers control how the broker handles a message
_BROKERS_OWN = frozenset({"_INBOX", "_R_", "_GR_"})


def is_reserved(header: str) -> bool:
    """Whether a timer may not set this header of its callback."""
    folded = header.lower()
    return folded in _RESERVED_HEADERS or folded.startswith(_RESERVED_PREFIXES)


def is_brokers_own(subject: str) -> bool:
    """Whether a subject controls the broker (``$JS.API…``) or receives replies (``_INBOX…``)."""
    return subject.startswith("$") or subject.partition(".")[0] in _BROKERS_OWN
