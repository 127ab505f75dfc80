"""Strict JSON and the field rules that every HTTP door shares.

Owns what may enter: bytes that are exactly one JSON value which any store and any receiver can hold, and fields that
keep the rules of the contract. Whatever comes in, the only exception that comes out is ``InvalidInput``, which names
the field (``body`` when it is the JSON itself) and gives a reason in words for people.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Never, TypeVar

import msgspec

from duetime.deliverers.broker import is_brokers_own
from duetime.deliverers.http import is_reserved
from duetime.errors import InvalidInput
from duetime.urls import parse_url

T = TypeVar("T")

DEPTH_MAX = 64
HEADERS_MAX = 64
HEADERS_BYTES_MAX = 16 * 1024
HEADER_NAME_CHARS_CACHED_MAX = 64
ID_CHARS_MAX = 255
NAMESPACE_CHARS_MAX = 64

BODY = "body"

# --- JSON ----------------------------------------------------------------------------------------------------------

_decode_anything = msgspec.json.Decoder().decode
_BLANKS = b" \t\r\n"
_BACKSLASH = 0x5C
# A run of backslashes is only an escape when its length is odd; the look-behind makes each run be read once.
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000").search
_INTEGER_MAX = int(sys.float_info.max)


def check_json(body: bytes, *, depth_max: int = DEPTH_MAX) -> None:
    """Refuse a body that is not one strict JSON value.

    msgspec refuses what the grammar does, NaN, lone surrogates and numbers beyond a 64-bit float. Depth, integers and
    duplicate keys are judged here, on what it decoded. An integer may have as many digits as a 64-bit float has a
    magnitude for (309): payloads are kept as bytes, so it stays exact, and a receiver that reads it loses digits at
    worst and never gets an infinity.
    """
    try:
        tree = _decode_anything(body)
    except RecursionError:
        raise InvalidInput(BODY, too_deep(depth_max)) from None
    except msgspec.ValidationError:
        raise InvalidInput(BODY, _NUMBER_TOO_LARGE) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidInput(BODY, _json_fault(body)) from None
    if _BACKSLASH in body and b"\\u0000" in body and _ESCAPED_NUL(body):
        raise InvalidInput(BODY, "must not hold the character \\u0000")
    keys = _count_keys(tree, depth_max)
    # Decoding dropped duplicate keys, so the bytes must show whether there were any. Without blanks each key ends in
    # `":`, so there are at least as many of these as keys, and at least as many keys as different ones; when both ends
    # of the chain are equal, no key came twice. A string that holds `":` itself breaks the equality without a
    # duplicate, and only then is the body read again, the slow way, which costs more than all of this.
    if keys and body.translate(None, _BLANKS).count(b'":') != keys:
        _refuse_duplicates(body.decode())


def _count_keys(tree: Any, depth_max: int) -> int:
    """How many keys the objects of the tree have, all levels together. It goes no deeper than ``depth_max``."""
    keys = depth = 0
    level = [tree]
    while True:
        nested = False
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is str:
                continue
            if kind is dict:
                nested = True
                keys += len(value)
                below += value.values()
            elif kind is list:
                nested = True
                below += value
            elif kind is int and not -_INTEGER_MAX <= value <= _INTEGER_MAX:
                raise InvalidInput(BODY, _NUMBER_TOO_LARGE)
        if not nested:
            return keys
        depth += 1
        if depth > depth_max:
            raise InvalidInput(BODY, too_deep(depth_max))
        level = below


_NUMBER_TOO_LARGE = "must not hold a number beyond ±1.8e308"


def too_deep(depth_max: int = DEPTH_MAX) -> str:
    return f"must not be nested deeper than {depth_max} levels"


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidInput(BODY, f"must not have the key {_quoted(key)} twice in one object")
        seen.add(key)


def _refuse_constant(name: str) -> Never:
    raise InvalidInput(BODY, f"is not valid JSON: {name} is not a JSON number")


# Numbers stay text in both: only the structure is of interest, and no digit costs anything.
_refuse_duplicates = json.JSONDecoder(
    object_pairs_hook=_object_without_duplicates, parse_int=str, parse_float=str
).decode
_read_leniently = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str).decode


def _json_fault(body: bytes) -> str:
    """Why msgspec refused the body, in words for people; the standard library tells the line and the column."""
    if not body.strip(_BLANKS):
        return "must not be empty"
    if body.startswith(b"\xef\xbb\xbf"):
        return "must not begin with a byte order mark"
    try:
        _read_leniently(body.decode())
    except UnicodeDecodeError as error:
        return f"is not valid UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg.removesuffix(' at')} at line {error.lineno} column {error.colno}"
    except InvalidInput as error:
        return error.reason
    except RecursionError:
        return "is not valid JSON"
    # What the library reads and msgspec does not, once the constants are out, are escapes of half a character.
    return "must not hold a lone surrogate"


def _quoted(text: str) -> str:
    """A client's text inside a message: on one line and no longer than a glance."""
    return json.dumps(text if len(text) <= 64 else text[:63] + "…", ensure_ascii=False)


# --- from JSON to a struct -----------------------------------------------------------------------------------------


def decode(body: bytes, type_: type[T], decoder: msgspec.json.Decoder[T]) -> T:
    """The body as a ``type_``. The type is named beside its decoder so that the type checker holds the two together."""
    check_json(body)
    return _decoded(body, decoder)


def _decoded(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    if not body.startswith(b"{") and not body.lstrip(_BLANKS).startswith(b"{"):
        raise InvalidInput(BODY, "must be a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None


_WHERE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL).fullmatch
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL).fullmatch
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL).fullmatch
_WRONG_TYPE = re.compile(r"Expected `(.*)`, got `(.*)`").fullmatch
_OUT_OF_BOUNDS = re.compile(r"Expected `(.*)` (of length )?(<=|>=|<|>) (.*)").fullmatch
_WRONG_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL).fullmatch

_WANTED = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "object": "an object",
    "array": "an array",
}
_GIVEN = _WANTED | {"int": "a number", "bool": "a boolean"}
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_LENGTHS = {"str": "characters", "array": "items", "object": "entries"}


def _explained(message: str) -> InvalidInput:
    """msgspec's words for machines as ours for people: ``Expected `str`, got `int` - at `$.a.b``` names ``a.b``."""
    where = _WHERE(message)
    assert where is not None  # the pattern takes any text
    what, path = where["what"], (where["path"] or "").removeprefix(".")
    if missing := _MISSING(what):
        return InvalidInput(_join(path, missing[1]), "is required")
    if unknown := _UNKNOWN(what):
        return InvalidInput(_join(path, unknown[1][:64]), "is not a known field")
    reason = _reason(what)
    if where["key"]:
        reason = f"has a key that {reason}"
    elif path.endswith("[...]"):  # a value under a key of the client's choice, which msgspec does not name
        reason = f"has a value that {reason}"
    return InvalidInput(path.replace("[...]", "") or BODY, reason)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}".replace("[...]", "") if path else field


def _reason(what: str) -> str:
    if wrong := _WRONG_TYPE(what):
        wanted = " or ".join(_WANTED.get(name, name) for name in wrong[1].split(" | "))
        given = _GIVEN.get(wrong[2], wrong[2])
        if wanted == _WANTED["int"] and wrong[2] == "float":
            given = "a fraction"
        return f"must be {wanted}, not {given}"
    if bounds := _OUT_OF_BOUNDS(what):
        kind, length, sign, limit = bounds.groups()
        if length:
            return f"must have {_BOUNDS[sign]} {limit} {_LENGTHS.get(kind, 'bytes')}"
        return f"must be {_BOUNDS[sign]} {limit}"
    if value := _WRONG_VALUE(what):
        return f"must not be {value[1][:64]}"
    if "out of range" in what:
        return "is out of range"
    return f"is not valid: {what}"


# --- fields --------------------------------------------------------------------------------------------------------

_METHODS = frozenset({"POST", "PUT", "PATCH"})
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+").fullmatch
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*").fullmatch
_SUBJECT = re.compile(rf"(?=.{{1,{ID_CHARS_MAX}}}\Z)[!-)+-\-/-=?-~]+(\.[!-)+-\-/-=?-~]+)*").fullmatch
_ID = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{ID_CHARS_MAX}}}").fullmatch
_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{NAMESPACE_CHARS_MAX}}}").fullmatch
_UUID = re.compile(r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}").fullmatch


def check_url(text: str, field: str) -> str:
    parse_url(text, field)
    return text


def check_method(text: str, field: str) -> str:
    """Methods are case-sensitive in HTTP, so ``post`` is not one."""
    if text not in _METHODS:
        raise InvalidInput(field, "must be POST, PUT or PATCH")
    return text


def check_headers(mapping: Mapping[str, str], field: str) -> dict[str, str]:
    """The headers as they were given, when a callback may carry them."""
    if len(mapping) > HEADERS_MAX:
        raise InvalidInput(field, f"must have at most {HEADERS_MAX} headers")
    seen: set[str] = set()
    size = 0
    for name, value in mapping.items():
        size += len(name) + len(value) + 4  # ": " and the line's end
        if size > HEADERS_BYTES_MAX:
            raise InvalidInput(field, f"must be at most {HEADERS_BYTES_MAX} bytes together")
        folded = (_known_name if len(name) <= HEADER_NAME_CHARS_CACHED_MAX else _header_name)(name, field)
        if folded in seen:
            raise InvalidInput(field, f"must not have {_quoted(name)} twice")
        if not _HEADER_VALUE(value):
            raise InvalidInput(field, f"has a value for {_quoted(name)} with characters that a header cannot carry")
        seen.add(folded)
    return dict(mapping)


def _header_name(name: str, field: str) -> str:
    """The name in lower case, when a callback may carry it."""
    if not _TOKEN(name):
        raise InvalidInput(field, f"has {_quoted(name)}, which is not a header name")
    if is_reserved(name):
        raise InvalidInput(field, f"must not set {_quoted(name)}")
    return name.lower()


_known_name = lru_cache(maxsize=1_024)(_header_name)  # the same few names come with most timers


def check_subject(text: str, field: str) -> str:
    """A subject that one message can be published to. Which ones are Duetime's own, the deliverer knows."""
    if not _SUBJECT(text):
        raise InvalidInput(field, f"must be 1 to {ID_CHARS_MAX} characters, in tokens parted by dots, without * or >")
    if is_brokers_own(text):
        raise InvalidInput(field, "must not be one of the broker's own subjects")
    return text


def check_id(text: str, field: str) -> str:
    if not _ID(text):
        raise InvalidInput(field, f"must be 1 to {ID_CHARS_MAX} characters without control characters")
    return text


def check_namespace(text: str, field: str) -> str:
    if not _NAMESPACE(text):
        raise InvalidInput(field, f"must be 1 to {NAMESPACE_CHARS_MAX} of A-Z a-z 0-9 . _ -")
    return text


def check_uuid(text: str, field: str) -> str:
    """The UUID in lower case, from its hyphenated form only."""
    if not _UUID(text):
        raise InvalidInput(field, "must be a UUID like 123e4567-e89b-42d3-a456-426614174000")
    return text.lower()


# --- query parameters ----------------------------------------------------------------------------------------------


def choice(query: dict[str, str], name: str, kinds: Any, default: Any) -> Any:
    return kinds(one_of(query, name, tuple(kind.value for kind in kinds), default)) if name in query else default


def one_of(query: dict[str, str], name: str, words: tuple[str, ...], default: str) -> str:
    given = query.get(name, default)
    if given not in words:
        raise InvalidInput(name, f"must be one of {', '.join(words)}")
    return given


def whole(query: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
        raise InvalidInput(name, f"must be a whole number from {low} to {high}")
    return int(text)
