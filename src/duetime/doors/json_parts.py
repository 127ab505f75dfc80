"""Splits a JSON object with a long array into the array's items, without decoding them.

Decoding many megabytes at once would hold the interpreter lock for seconds and take many times their memory. So this
module finds where each item ends, in strides, and the caller decodes the items one by one. Everything around the items
is checked here.
"""

from __future__ import annotations

import re

import msgspec

from duetime.doors.wire import BODY, check_json, too_deep
from duetime.errors import InvalidInput

STRIDE_BYTES = 64 * 1024
AROUND_BYTES_MAX = 64 * 1024
LEVELS_MAX = 1_000

_BLANKS = b" \t\r\n"
_QUOTE = ord('"')
# Possessive quantifiers only for single characters: CPython 3.11.2 has a bug with groups.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*'  # of a string
_PLAIN = rb'[^][{}"]++|"' + _REST + rb'"'
_INNERMOST = rb"[\[{](?:" + _PLAIN + rb")*[\]}]"
_past_blanks = re.compile(rb"[ \t\r\n]*").match
_in_string = re.compile(_REST, re.DOTALL).match
_between = re.compile(rb'(?:[^][{}",]++|"' + _REST + rb'")+', re.DOTALL).match
_tokens = re.compile(rb"(?:" + _PLAIN + rb"|" + _INNERMOST + rb")+|([\[{])|([\]}])|(\")", re.DOTALL).finditer
_OPENS, _CLOSES = 1, 2
_key_of_array = re.compile(rb'[ \t\r\n]*("' + _REST + rb'")[ \t\r\n]*:[ \t\r\n]*\[', re.DOTALL).match

_skim = msgspec.json.Decoder(msgspec.Raw).decode
_decode_name = msgspec.json.Decoder(str).decode


def parts_of(body: bytes, key: str, *, parts_max: int, part_bytes_max: int) -> tuple[bytes, list[bytes]]:
    """The body with the array under ``key`` emptied, and the items of that array. Each item is one syntactically valid
    JSON value, or larger than ``part_bytes_max`` and not checked."""
    opened = closed = _opened(body, key)
    parts: list[bytes] = []
    while True:
        start, closed = closed, _end(body, closed)
        part = body[start:closed].strip(_BLANKS)
        more = body[closed : closed + 1] == b","
        if part or parts or more:
            if len(part) <= part_bytes_max and not _is_value(part):
                line, column = body.count(b"\n", 0, start) + 1, start - body.rfind(b"\n", 0, start)
                raise InvalidInput(BODY, f"is not valid JSON: a value is missing at line {line} column {column}")
            parts.append(part)
        if not more:
            break
        if len(parts) == parts_max:
            raise InvalidInput(key, f"must have at most {parts_max} items")
        closed += 1
    around = (body[:opened] + body[closed:]).strip(_BLANKS)
    if len(around) > AROUND_BYTES_MAX:
        raise InvalidInput(BODY, f"must have at most {AROUND_BYTES_MAX} bytes besides {key}")
    check_json(around)
    return around, parts


def _is_value(part: bytes) -> bool:
    try:
        _skim(part)
    except RecursionError:
        pass  # The caller, who decodes it, reports that it is nested too deeply.
    except msgspec.DecodeError:
        return False
    return True


def _opened(body: bytes, key: str) -> int:
    """The position after the bracket that opens the array under ``key``; the end of the body if there is none."""
    at = 0
    while (found := _past_blanks(body, at, at + STRIDE_BYTES)) and found.end() > at:
        at = found.end()
    if body[at : at + 1] != b"{":
        raise InvalidInput(BODY, "must be a JSON object")
    while body[at : at + 1] in (b"{", b","):
        found = _key_of_array(body, at + 1, at + STRIDE_BYTES)
        if found is not None and _is_name(found[1], key):
            return found.end()
        at = _end(body, at + 1)
    return len(body)


def _is_name(text: bytes, key: str) -> bool:
    try:
        return _decode_name(text) == key
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _end(body: bytes, at: int) -> int:
    """The position of the comma or bracket that ends the value at ``at``; the end of the body if there is none."""
    while at < len(body):
        stop = min(at + STRIDE_BYTES, len(body))
        if found := _between(body, at, stop):
            at = found.end()
        if at == stop:
            continue
        if body[at] in b"[{":
            at = _end_of_group(body, at + 1)
        elif body[at] == _QUOTE:  # a string that ends beyond this stride
            at = _end_of_string(body, at + 1)
        else:
            return at
    return at


def _end_of_group(body: bytes, at: int) -> int:
    """The position after the bracket that closes the one before ``at``; the end of the body if there is none."""
    level = 1
    while at < len(body):
        for token in _tokens(body, at, at + STRIDE_BYTES):
            at = token.end()
            kind = token.lastindex
            if kind is None:
                continue
            if kind == _OPENS:
                level += 1
                if level > LEVELS_MAX:
                    raise InvalidInput(BODY, too_deep())
            elif kind == _CLOSES:
                level -= 1
                if level == 0:
                    return at
            else:  # a string that ends beyond this stride
                at = _end_of_string(body, at)
                break
    return at


def _end_of_string(body: bytes, at: int) -> int:
    """The position after the quote that ends the string; the end of the body if there is none."""
    while (found := _in_string(body, at, at + STRIDE_BYTES)) and found.end() > at:
        at = found.end()
    return at + 1 if body[at : at + 1] == b'"' else len(body)
