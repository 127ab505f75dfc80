"""Reads the destination of a timer from the first characters of its stored definition.

The JSON functions of the databases would also parse the payload, and they reject some valid ones: PostgreSQL fails on
``\\u0000``, SQLite on deep nesting. One such payload must not make a statement over all lanes fail. A definition always
starts with its target, and the target with its type and URL.
"""

from __future__ import annotations

import re

from duetime.urls import origin_of

HEAD_CHARS = 512
"""How many characters of a definition to read: several times as many as scheme, host and port of a valid URL have."""
HTTP = r'^\{"target":\{"type":"http","url":"'
"""The start of an HTTP timer's definition, as a regular expression for Python and PostgreSQL."""

_URL = re.compile(HTTP + r'([^"]*)')


def destination_in(definition: str) -> str:
    """``model.destination_of`` the target of a definition, given at least its first ``HEAD_CHARS`` characters."""
    http = _URL.match(definition)
    return "nats" if http is None else origin_of(http[1])
