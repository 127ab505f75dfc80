"""Recognizes MySQL's responses.

A packet is a length of three bytes, a number and the content. The numbers continue through the responses to all
statements of one request, and a commit is the first response that leaves no transaction open. So its number tells how
many statements there were, and with that the verb: ``stores/mysql/statements`` has a different number for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.answers import Answers

_PUT, _BEGIN, _RECORDS = 8, 6, (8, 9)
"""The number of statements from START TRANSACTION to COMMIT. A record that ends no timer looks like a begin, and after
a put there is nothing more."""
_IN_TRANSACTION, _MORE = 1, 8
_HEAD_BYTES, _OK_BYTES = 4, 7


def _commits(piece: bytes) -> Iterator[tuple[int, bool]]:
    """The number of each commit, and whether more data follows it."""
    place = 0
    while place + _HEAD_BYTES <= len(piece):
        end = place + _HEAD_BYTES + int.from_bytes(piece[place : place + 3], "little")
        content = piece[place + _HEAD_BYTES : end]
        # OK, no row was changed, and the server's status.
        if len(content) == _OK_BYTES and content.startswith(bytes(3)):
            status = int.from_bytes(content[3:5], "little")
            if not status & _IN_TRANSACTION:
                yield piece[place + 3], bool(status & _MORE)
        place = end


ANSWERS = Answers(
    is_put=lambda piece: (_PUT, False) in _commits(piece),
    is_begin=lambda piece: (_BEGIN, True) in _commits(piece),
    is_record=lambda piece: any((number, True) in _commits(piece) for number in _RECORDS),
)
