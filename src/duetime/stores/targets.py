"""The destination of a timer, read from the first characters of its stored definition.

The JSON functions of the databases would parse the payload, too, and refuse some that clients may send: PostgreSQL
fails on ``\\u0000``, SQLite on deep nesting. One such payload must not stop a statement about all lanes. A definition
always starts with its target, and the target with its type and URL.
"""

from __future__ import annotations

import re

from duetime.urls import origin_of

HEAD_CHARS = 512
"""How much of a definition to read: the scheme, host and port of a valid URL fit in several times."""
HTTP = r'^\{"target":\{"type":"http","url":"'
"""How the definition of an HTTP timer starts, as a regular expression for Python and for PostgreSQL."""

_URL = re.compile(HTTP + r'([^"]*)')


def destination_in(definition: str) -> str:
    """``model.destination_of`` the target of this definition, of which the first ``HEAD_CHARS`` are enough."""
    http = _URL.match(definition)
    return "nats" if http is None else origin_of(http[1])
