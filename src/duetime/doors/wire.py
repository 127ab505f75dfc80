"""Strict JSON and the rules for fields, shared by all APIs.

Accepts only bodies that are exactly one JSON value that every store and receiver can represent, and only valid fields.
For any input, the only error is ``InvalidInput``, with the name of the field (``body`` for the JSON itself) and a
reason for users.
"""

from __future__ import annotations

import json
import re
import sys
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Never, TypeVar

import msgspec
from msgspec import inspect

from duetime.errors import InvalidInput, UnknownName
from duetime.targets import is_brokers_own, is_reserved
from duetime.urls import parse_url

T = TypeVar("T")

DEPTH_MAX = 64
HEADERS_MAX = 64
HEADERS_BYTES_MAX = 16 * 1024
HEADER_NAME_CHARS_CACHED_MAX = 64
ID_CHARS_MAX = 255
NAMESPACE_CHARS_MAX = 64
NAME_CHARS_MAX = 64
PATH_CHARS_MAX = 128

BODY = "body"

# --- JSON ----------------------------------------------------------------------------------------------------------

_decode_anything = msgspec.json.Decoder().decode
_BLANKS = b" \t\r\n"
_BACKSLASH = 0x5C
# A run of backslashes escapes the next character only if its length is odd. The look-behind reads each run only once.
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000").search
_INTEGER_MAX = int(sys.float_info.max)


def check_json(body: bytes, *, depth_max: int = DEPTH_MAX) -> None:
    """Raise if a body is not exactly one strict JSON value.

    msgspec rejects invalid syntax, NaN, lone surrogates and floats beyond 64 bits. Depth, integers and duplicate keys
    are checked here, on the decoded value. An integer may be as large as the largest 64-bit float (309 digits):
    payloads are kept as bytes, so it stays exact, and a receiver may lose digits but never gets an infinity.
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
        raise InvalidInput(BODY, "must not contain the character \\u0000")
    keys = _count_keys(tree, depth_max)
    # Decoding drops duplicate keys, so look for them in the bytes. Without white space each key ends in `":`, so these
    # are at least as many as there are keys; if they are as many as the decoded keys, no key is a duplicate. A string
    # that contains `":` breaks the equality without a duplicate; only then parse the body again, slowly.
    if keys and body.translate(None, _BLANKS).count(b'":') != keys:
        _refuse_duplicates(body.decode())


def _count_keys(tree: Any, depth_max: int) -> int:
    """The number of keys in all objects of the tree; raises if it is deeper than ``depth_max``."""
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


_NUMBER_TOO_LARGE = "must not contain a number beyond ±1.8e308"


def too_deep(depth_max: int = DEPTH_MAX) -> str:
    return f"must not be nested deeper than {depth_max} levels"


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidInput(BODY, f"must not contain the key {_quoted(key)} twice in one object")
        seen.add(key)


def _refuse_constant(name: str) -> Never:
    raise InvalidInput(BODY, f"is not valid JSON: {name} is not a JSON number")


# Both keep numbers as text, because only the structure matters, and parsing long numbers is slow.
_refuse_duplicates = json.JSONDecoder(
    object_pairs_hook=_object_without_duplicates, parse_int=str, parse_float=str
).decode
_read_leniently = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str).decode


def _json_fault(body: bytes) -> str:
    """Why msgspec rejected the body, for users; the standard library knows the line and the column."""
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
    # What the library accepts and msgspec does not, apart from the constants, are escapes of half a character.
    return "must not contain a lone surrogate (an escape of half a character)"


def _quoted(text: str) -> str:
    """A client's text for a message: quoted, on one line, and shortened."""
    return json.dumps(text if len(text) <= NAME_CHARS_MAX else text[: NAME_CHARS_MAX - 1] + "…", ensure_ascii=False)


# --- from JSON to a struct -----------------------------------------------------------------------------------------


def decode(body: bytes, type_: type[T], decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the body as a ``type_``; naming the type as well lets the type checker compare it with the decoder's."""
    check_json(body)
    if not body.startswith(b"{") and not body.lstrip(_BLANKS).startswith(b"{"):
        raise InvalidInput(BODY, "must be a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error), type_, body) from None


_WHERE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL).fullmatch
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL).fullmatch
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL).fullmatch
_WRONG_TYPE = re.compile(r"Expected `([^`]*)`(?:, got `(.*)`)?").fullmatch
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


def _explained(message: str, type_: Any, body: bytes) -> InvalidInput:
    """A message of msgspec, such as ``Expected `str`, got `int` - at `$.a.b```, as ours: ``a.b must be a string``."""
    where = _WHERE(message)
    assert where is not None  # the pattern takes any text
    what, path = where["what"], (where["path"] or "").removeprefix(".")
    if missing := _MISSING(what):
        return InvalidInput(_join(path, missing[1]), "is required")
    if unknown := _UNKNOWN(what):
        return _unknown_field(unknown[1], type_, path, body)
    if value := _WRONG_VALUE(what):
        reason = f"must be {_choices(type_, path[:PATH_CHARS_MAX])}, not {_quoted(literal_eval(value[1]))}"
    else:
        reason = _reason(what)
        if reason.startswith("must be a string") and (example := _example(type_, path[:PATH_CHARS_MAX])):
            reason = reason.replace("a string", f"a string like {_quoted(example)}", 1)
    if where["key"]:
        reason = f"has an invalid key: it {reason}"
    elif path.endswith("[...]"):  # a value of a dict, whose key msgspec does not name
        reason = f"has an invalid value: it {reason}"
    return InvalidInput(path.replace("[...]", "") or BODY, reason)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}".replace("[...]", "") if path else field


def _reason(what: str) -> str:
    if wrong := _WRONG_TYPE(what):
        wanted = " or ".join(_WANTED.get(name, name) for name in wrong[1].split(" | "))
        if wrong[2] is None:
            return f"must be {wanted}"
        given = _GIVEN.get(wrong[2], wrong[2])
        if wanted == _WANTED["int"] and wrong[2] == "float":
            given = "a fraction"
        return f"must be {wanted}, not {given}"
    if bounds := _OUT_OF_BOUNDS(what):
        kind, length, sign, limit = bounds.groups()
        if length and (sign, limit) == (">=", "1"):
            return "must not be empty"
        if length:
            return f"must have {_BOUNDS[sign]} {limit} {_LENGTHS.get(kind, 'bytes')}"
        return f"must be {_BOUNDS[sign]} {limit}"
    if "out of range" in what:
        return "is out of range: it must fit in 64 bits"
    return "is not valid"


# --- unknown names -------------------------------------------------------------------------------------------------

SUFFIX_CHARS_MIN = 3
SIMILARITY_MIN = 0.65
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{NAME_CHARS_MAX}}}").fullmatch
_MEANT = {
    "body": ("payload", "callbackpayload"),
    "callbackpayload": ("payload",),
    "callbacksubject": ("topic",),
    "callbacktopic": ("callbacksubject",),
    "groupid": ("namespace",),
    "id": ("idempotencykey",),
    "idempotencykey": ("id",),
    "key": ("id",),
    "subject": ("topic",),
    "timerid": ("id",),
    "topic": ("callbacksubject",),
}
"""Names of the other API and older names, with the fields that they mean where these exist; see ``_letters``."""


def unknown_name(name: str, known: Sequence[str], kind: str, path: str = "", nested: Sequence[str] = ()) -> UnknownName:
    """The error for a field or query parameter that the operation does not know, with the nearest name of the ``known``
    and ``nested`` ones, or else all known ones."""
    known = _without_aliases(known)
    near = _nearest(name, known, tuple(nested)) if len(name) <= NAME_CHARS_MAX else None
    if near:
        advice = f"; did you mean {_join(path, near)}?"
    elif known:
        advice = f"; known: {', '.join(known)}"
    else:
        advice = "" if path else f"; this operation takes no {kind}s"
    shown = name if _PLAIN_NAME(name) else _quoted(name)
    return UnknownName(_join(path, shown), f"is not a known {kind}{advice}")


def _unknown_field(name: str, type_: Any, path: str, body: bytes) -> UnknownName:
    """The error for an unknown field of the object at this path of the body."""
    place = type_, path[:PATH_CHARS_MAX]
    tag = _tag_at(*place, body)
    known, nested = _names_at(*place, tag)
    return unknown_name(name, known, "field" if tag is None else f"field for type {tag}", path, nested)


def _tag_at(type_: Any, path: str, body: bytes) -> str | None:
    """Which type of a union the object at this path of the body has; None if only one is possible."""
    structs = _structs_at(type_, path)
    if len(structs) < 2:
        return None
    value = _decode_anything(body)
    for name in (*path.split("."), structs[0].tag_field):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


@lru_cache(maxsize=1_024)  # A batch may have the same mistake in each of its timers.
def _nearest(name: str, known: tuple[str, ...], nested: tuple[str, ...]) -> str | None:
    """The name that is probably meant: one of the other API, one with the same ending, a nested or a similar one."""
    by_letters = {_letters(one): one for one in known}
    inner = {_letters(one.rpartition(".")[2]): one for one in nested}
    letters = _letters(name)
    spellings = (letters, *_MEANT.get(letters, ()))
    for spelling in spellings:
        if spelling in by_letters:
            return by_letters[spelling]
    ends = [
        one
        for one in by_letters
        if min(len(one), len(letters)) >= SUFFIX_CHARS_MIN and (one.endswith(letters) or letters.endswith(one))
    ]
    if ends:
        return by_letters[min(ends, key=lambda one: abs(len(one) - len(letters)))]
    for spelling in spellings:
        if spelling in inner:
            return inner[spelling]
    aliases = {alias: by_letters[one] for alias, meant in _MEANT.items() for one in meant if one in by_letters}
    all_names = aliases | inner | by_letters
    similar = get_close_matches(letters, all_names, 1, SIMILARITY_MIN)
    return all_names[similar[0]] if similar else None


def _without_aliases(known: Sequence[str]) -> tuple[str, ...]:
    """These names without those that are older names of others."""
    letters = {_letters(one) for one in known}
    return tuple(one for one in known if letters.isdisjoint(_MEANT.get(_letters(one), ())))


def _letters(name: str) -> str:
    """The same text for callback_url and callbackUrl."""
    return name.replace("_", "").lower()


@lru_cache(maxsize=64)
def _names_at(type_: Any, path: str, tag: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that the object at this path of a ``type_`` may have, and the fields of the objects in it."""
    structs = [struct for struct in _structs_at(type_, path) if tag in (None, struct.tag)]
    known = (name for struct in structs for name in _field_names(struct))
    nested = (
        f"{field.encode_name}.{name}"
        for struct in structs
        for field in struct.fields
        for inner in _structs([field.type])
        for name in _field_names(inner)
    )
    return tuple(dict.fromkeys(known)), tuple(dict.fromkeys(nested))


def _field_names(struct: inspect.StructType) -> Iterator[str]:
    if struct.tag_field is not None:
        yield struct.tag_field
    yield from (field.encode_name for field in struct.fields)


@lru_cache(maxsize=64)
def _choices(type_: Any, path: str) -> str:
    """The values allowed at this path of a ``type_``: of a literal or an enum, or the tags of a union."""
    parent, _, name = path.rpartition(".")
    found: list[Any] = [one.tag for one in _structs_at(type_, parent) if one.tag_field == name]
    for kind in _flat(_kinds_at(type_, path)):
        if isinstance(kind, inspect.LiteralType):
            found += kind.values
        elif isinstance(kind, inspect.EnumType):
            found += [one.value for one in kind.cls]
    return f"one of {', '.join(map(str, found))}" if found else "one of the documented values"


@lru_cache(maxsize=64)
def _example(type_: Any, path: str) -> str | None:
    """An example of the string at this path of a ``type_``."""
    for kind in _kinds_at(type_, path):
        for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
            if isinstance(one, inspect.Metadata) and (examples := (one.extra_json_schema or {}).get("examples")):
                return str(examples[0])
    return None


def _kinds_at(type_: Any, path: str) -> list[inspect.Type]:
    kinds = [inspect.type_info(type_)]
    for name in path.split(".") if path else ():
        kinds = [field.type for struct in _structs(kinds) for field in struct.fields if field.encode_name == name]
    return kinds


@lru_cache(maxsize=64)
def _structs_at(type_: Any, path: str) -> tuple[inspect.StructType, ...]:
    return tuple(_structs(_kinds_at(type_, path)))


def _structs(kinds: Sequence[inspect.Type]) -> Iterator[inspect.StructType]:
    return (kind for kind in _flat(kinds) if isinstance(kind, inspect.StructType))


def _flat(kinds: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    """These types, without the unions and metadata around them."""
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            yield from _flat(kind.types)
        elif isinstance(kind, inspect.Metadata):
            yield from _flat([kind.type])
        else:
            yield kind


# --- fields --------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+").fullmatch
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*").fullmatch
_SUBJECT = re.compile(rf"(?=.{{1,{ID_CHARS_MAX}}}\Z)[!-)+-\-/-=?-~]+(\.[!-)+-\-/-=?-~]+)*").fullmatch
_ID = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{ID_CHARS_MAX}}}").fullmatch
_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{NAMESPACE_CHARS_MAX}}}").fullmatch
_UUID = re.compile(r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}").fullmatch


def check_url(text: str, field: str) -> str:
    parse_url(text, field)
    return text


def check_headers(mapping: Mapping[str, str], field: str) -> dict[str, str]:
    """The headers, if a callback may have them."""
    if len(mapping) > HEADERS_MAX:
        raise InvalidInput(field, f"must have at most {HEADERS_MAX} headers")
    seen: set[str] = set()
    size = 0
    for name, value in mapping.items():
        size += len(name) + len(value) + 4  # ": " and the line's end
        if size > HEADERS_BYTES_MAX:
            raise InvalidInput(field, f"must have at most {HEADERS_BYTES_MAX} bytes in total")
        folded = (_known_name if len(name) <= HEADER_NAME_CHARS_CACHED_MAX else _header_name)(name, field)
        if folded in seen:
            raise InvalidInput(field, f"must not contain {_quoted(name)} twice: header names ignore case")
        if not _HEADER_VALUE(value):
            raise InvalidInput(
                field, f"has a value for {_quoted(name)} with characters that are not allowed in a header"
            )
        seen.add(folded)
    return dict(mapping)


def _header_name(name: str, field: str) -> str:
    """The name in lower case, if a callback may have it."""
    if not _TOKEN(name):
        raise InvalidInput(field, f"contains {_quoted(name)}, which is not a valid header name")
    if is_reserved(name):
        raise InvalidInput(field, f"must not set {_quoted(name)}, which is reserved")
    return name.lower()


_known_name = lru_cache(maxsize=1_024)(_header_name)  # most timers have the same few names


def check_subject(text: str, field: str) -> str:
    """A subject without wildcards that NATS does not reserve. The deliverer checks for Duetime's own subjects."""
    if not _SUBJECT(text):
        raise InvalidInput(
            field, f"must be 1 to {ID_CHARS_MAX} characters: tokens separated by dots, without spaces, * or >"
        )
    if is_brokers_own(text):
        raise InvalidInput(field, "must not be a subject that NATS reserves ($…, _INBOX…, _R_…, _GR_…)")
    return text


def check_id(text: str, field: str) -> str:
    if not _ID(text):
        raise InvalidInput(field, _length_fault(text, ID_CHARS_MAX) or "must not have control characters")
    return text


def check_namespace(text: str, field: str) -> str:
    if not _NAMESPACE(text):
        allowed = "must have only letters, digits, dots, hyphens and underscores"
        raise InvalidInput(field, _length_fault(text, NAMESPACE_CHARS_MAX) or allowed)
    return text


def _length_fault(text: str, chars_max: int) -> str | None:
    """What is wrong with the length, in the words of ``_reason``."""
    if not text:
        return "must not be empty"
    return f"must have at most {chars_max} characters" if len(text) > chars_max else None


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
        raise InvalidInput(name, f"must be one of {', '.join(words)}, not {_quoted(given)}")
    return given


def whole(query: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
        raise InvalidInput(name, f"must be a whole number from {low} to {high}")
    return int(text)
