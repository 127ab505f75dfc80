"""The checks of HTTP requests: strict JSON, readable errors, and the rules for fields."""

from __future__ import annotations

import enum
import gc
import json
import random
import sys
import tracemalloc
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from duetime.doors import wire
from duetime.errors import InvalidInput

examined = settings(derandomize=True, deadline=None, database=None, max_examples=200)

# Few letters and all the characters that a careless scan trips over, so that collisions are common.
_TEXT = st.text('ab":\\ \n\t{}[],é😀', max_size=6) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**308), 10**308)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXT, inner, max_size=5),
    max_leaves=20,
)


def refusal(body: bytes) -> str:
    with pytest.raises(InvalidInput) as raised:
        wire.check_json(body)
    assert raised.value.field == "body"
    return raised.value.reason


@examined
@given(
    _VALUES,
    st.booleans(),
    st.sampled_from([None, 0, 2, "\t"]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")]),
)
def test_ordinary_json_passes(
    value: Any, ascii_only: bool, indent: int | str | None, separators: tuple[str, str]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators)
    wire.check_json(text.encode())


@examined
@given(
    st.binary(max_size=200)
    | st.text('{}[]":,\\u0d8aefE+-.123 ntrls\n', max_size=60).map(lambda text: text.encode())
    | st.tuples(_VALUES, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda drawn: json.dumps(drawn[0]).encode()[: drawn[1]] + drawn[2] + json.dumps(drawn[0]).encode()[drawn[1] :]
    )
)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"\x00")
@example(b"9" * 10_000)
def test_arbitrary_bytes_raise_only_invalid_input(body: bytes) -> None:
    try:
        wire.check_json(body)
    except InvalidInput as error:
        assert error.field == "body"
        assert "\n" not in error.reason


class _Duplicate(Exception):
    pass


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) != len(pairs):
        raise _Duplicate


_TRICKY_VALUES = ("1", '":"', '": "', '"a\\":"', '" :"', '"\\u0022:"', '["a","a"]', '"x"', "null")


def _object_text(chance: random.Random, depth: int = 0) -> str:
    """An object in JSON whose keys may repeat, each spelled in one of the ways that JSON has for it."""

    def blank() -> str:
        return chance.choice(("", "", " ", "\n", "\t", "\r\n "))

    parts = []
    for _ in range(chance.randint(0, 4)):
        key = "".join(chance.choices('ab":', k=chance.randint(0, 2)))
        spelled = chance.choice((json.dumps(key), '"' + "".join(f"\\u{ord(char):04x}" for char in key) + '"'))
        nested = depth < 2 and chance.random() < 0.4
        value = _object_text(chance, depth + 1) if nested else chance.choice(_TRICKY_VALUES)
        parts.append(blank() + spelled + blank() + ":" + blank() + value + blank())
    return "{" + ",".join(parts) + "}"


def test_duplicate_keys_are_found_in_any_context() -> None:
    chance = random.Random(20260131)
    found = 0
    for _ in range(5_000):
        text = _object_text(chance)
        try:
            json.loads(text, object_pairs_hook=_distinct)
        except _Duplicate:
            found += 1
            assert "twice" in refusal(text.encode())
        else:
            wire.check_json(text.encode())
    assert 500 < found < 4_500, "both kinds must be common for this to mean anything"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "must not be empty"),
        (b" \r\n\t", "must not be empty"),
        (b"\xef\xbb\xbf{}", "must not begin with a byte order mark"),
        (b'{"a":"\xff"}', "is not valid UTF-8 (byte 6)"),
        (b'"\xc0\x80"', "is not valid UTF-8 (byte 1)"),
        (b'"\xed\xa0\x80"', "is not valid UTF-8 (byte 1)"),
        (b'{"\xff":1}', "is not valid UTF-8 (byte 2)"),
        ('{"a":1}'.encode("utf-16-le"), "is not valid JSON: "),
        (b"NaN", "is not valid JSON: NaN is not a JSON number"),
        (b'{"a":[Infinity]}', "is not valid JSON: Infinity is not a JSON number"),
        (b"[-Infinity]", "is not valid JSON: -Infinity is not a JSON number"),
        (b'"\\ud800"', "must not contain a lone surrogate (an escape of half a character)"),
        (b'"\\udc00"', "must not contain a lone surrogate (an escape of half a character)"),
        (b'"\\ud83d\\ud83d"', "must not contain a lone surrogate (an escape of half a character)"),
        (b'"\\ud83d and more"', "must not contain a lone surrogate (an escape of half a character)"),
        (b'{"\\udfff":1}', "must not contain a lone surrogate (an escape of half a character)"),
        (b'"\\u0000"', "must not contain the character \\u0000"),
        (b'{"a\\u0000":1}', "must not contain the character \\u0000"),
        (b'"\\\\\\u0000"', "must not contain the character \\u0000"),
        (b'"\\\\u0000 \\u0000"', "must not contain the character \\u0000"),
        (b'"\x00"', "is not valid JSON: Invalid control character at line 1 column 2"),
        (b'{"\n":1}', "is not valid JSON: Invalid control character at line 1 column 3"),
        (b'{"a":1,"a":1}', 'must not contain the key "a" twice in one object'),
        (b'{"a":1,"\\u0061":2}', 'must not contain the key "a" twice in one object'),
        (b'[{"b":{"a" :1,"a":1}}]', 'must not contain the key "a" twice in one object'),
        (b'{"a" :1,"a":1,"":":"}', 'must not contain the key "a" twice in one object'),
        (b'{"%s":1,"%s":1}' % (b"k" * 99, b"k" * 99), f'must not contain the key "{"k" * 63}…" twice in one object'),
        (b"{} {}", "is not valid JSON: Extra data at line 1 column 4"),
        (b"{}\x00", "is not valid JSON: Extra data at line 1 column 3"),
        (b"{},", "is not valid JSON: "),
        (b'{"a":1,}', "is not valid JSON: "),
        (b"[1,]", "is not valid JSON: "),
        (b"{'a':1}", "is not valid JSON: "),
        (b"{1:2}", "is not valid JSON: "),
        (b"/**/1", "is not valid JSON: "),
        (b"01", "is not valid JSON: "),
        (b"+1", "is not valid JSON: "),
        (b".5", "is not valid JSON: "),
        (b"1.", "is not valid JSON: "),
        (b"0x10", "is not valid JSON: "),
        (b"nul", "is not valid JSON: "),
        (b'"\\x41"', "is not valid JSON: "),
        (b'{"a":\n tru}', "is not valid JSON: Expecting value at line 2 column 2"),
        (b"1e999", "must not contain a number beyond ±1.8e308"),
        (b'{"a":[-1e309]}', "must not contain a number beyond ±1.8e308"),
        (b"1" + b"0" * 309, "must not contain a number beyond ±1.8e308"),
        (b"[-1" + b"0" * 309 + b"]", "must not contain a number beyond ±1.8e308"),
        (b'{"a":' + b"1" * 5_000 + b"}", "must not contain a number beyond ±1.8e308"),
        (b"[" * 65 + b"]" * 65, "must not be nested deeper than 64 levels"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "must not be nested deeper than 64 levels"),
        (b"[" * 50_000 + b"]" * 50_000, "must not be nested deeper than 64 levels"),
        (b"[" * 50_000, "must not be nested deeper than 64 levels"),
    ],
)
def test_hostile_body_is_rejected(body: bytes, reason: str) -> None:
    if reason.endswith(": "):
        assert refusal(body).startswith(reason)
    else:
        assert refusal(body) == reason


def test_deep_nesting_does_not_exhaust_the_stack() -> None:
    """Around the interpreter's limit one of the two parsers gives up before the other."""
    limit = sys.getrecursionlimit()
    for depth in range(limit - 200, limit + 10):
        for opening in (b"[", b'{"a":'):
            assert "valid JSON" in (reason := refusal(opening * depth + b"x")) or "deeper" in reason


@pytest.mark.parametrize(
    "body",
    [
        b'"\\ud83d\\ude00"',
        "😀".encode().join([b'"', b'"']),
        b'"\\\\u0000"',
        b'"\\\\\\\\u0000"',
        b'"\\\\ud800"',
        b'"NaN"',
        b'"\x7f"',
        b"9007199254740993",
        b"-99999999999999999999999999999999999999",
        str(int(sys.float_info.max)).encode(),
        b"1e-999",
        b"0." + b"1" * 10_000,
        b'{"a":{"a":1},"b":[{"a":1},{"a":1}]}',
        b'{"a":1,"A":2}',
        b'{"json":"{\\"a\\":1,\\"a\\":2}"}',
        b'{"a":":","b":" :"}',
        b'{"":1}',
        b"null",
        b' {"a" : 1}\r\n',
        b"[" * 64 + b"]" * 64,
        b"[" + b"[]," * 500 + b"[]]",
        b'{"' + b"\\\\" * 50_000 + b'":1}',
    ],
)
def test_unusual_strict_json_passes(body: bytes) -> None:
    wire.check_json(body)


def test_maximum_depth_can_be_chosen() -> None:
    wire.check_json(b"[[1]]", depth_max=2)
    with pytest.raises(InvalidInput, match="deeper than 1 levels"):
        wire.check_json(b"[[1]]", depth_max=1)


class Policy(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 3


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Create(msgspec.Struct, forbid_unknown_fields=True):
    callback_url: str
    execute_at: str | None
    retry_policy: Policy | None = None
    callback_headers: dict[str, str] = {}
    numbers: dict[int, int] = {}
    items: list[Policy] = []
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=3, pattern="^[a-z]*$")] = "x"
    multiplier: float = 2.0
    jitter: bool = True
    colour: Colour = Colour.RED
    payload: msgspec.Raw = msgspec.Raw(b"")


CREATE = msgspec.json.Decoder(Create)


def decode_fault(body: bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as raised:
        wire.decode(body, Create, CREATE)
    return raised.value


def test_valid_body_is_decoded_and_its_payload_kept_byte_for_byte() -> None:
    payload = b'{ "n": 123456789012345678901234567890, "s":"\\u00e9" }'
    made = wire.decode(b' {"callback_url":"u","execute_at":null,"payload":%s}' % payload, Create, CREATE)
    assert made.callback_url == "u"
    assert bytes(made.payload) == payload


KNOWN = ", ".join(Create.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (b'"callback_url":5', "callback_url must be a string, not a number"),
        (b'"callback_url":null', "callback_url must be a string, not null"),
        (b'"callback_url":true', "callback_url must be a string, not a boolean"),
        (b'"callback_url":[]', "callback_url must be a string, not an array"),
        (b'"execute_at":5', "execute_at must be a string or null, not a number"),
        (b'"jitter":"yes"', "jitter must be true or false, not a string"),
        (b'"multiplier":"2"', "multiplier must be a number, not a string"),
        (b'"retry_policy":[]', "retry_policy must be an object or null, not an array"),
        (b'"retry_policy":{"maxRetries":"x"}', "retry_policy.maxRetries must be a whole number, not a string"),
        (b'"retry_policy":{"maxRetries":1.5}', "retry_policy.maxRetries must be a whole number, not a fraction"),
        (b'"retry_policy":{"maxRetries":-1}', "retry_policy.maxRetries must be at least 0"),
        (b'"retry_policy":{"maxRetries":101}', "retry_policy.maxRetries must be at most 100"),
        (b'"name":"long"', "name must have at most 3 characters"),
        (b'"name":""', "name must not be empty"),
        (b'"name":"A"', "name is not valid"),
        (b'"colour":"blue"', 'colour must be one of red, green, not "blue"'),
        (b'"colour":"it\'s \\"\\n"', 'colour must be one of red, green, not "it\'s \\"\\n"'),
        (b'"colour":"%b"' % (b"x" * 100), f'colour must be one of red, green, not "{"x" * 63}…"'),
        (b'"callback_headers":{"a":1}', "callback_headers has an invalid value: it must be a string, not a number"),
        (b'"numbers":{"a":1}', "numbers has an invalid key: it must be a whole number, not a string"),
        (b'"items":[{},{"maxRetries":null}]', "items[1].maxRetries must be a whole number, not null"),
        (b'"callback_uri":"u"', "callback_uri is not a known field; did you mean callback_url?"),
        (b'"callbackUrl":"u"', "callbackUrl is not a known field; did you mean callback_url?"),
        (b'"url":"u"', "url is not a known field; did you mean callback_url?"),
        (
            b'"retry_policy":{"maxRetry":3}',
            "retry_policy.maxRetry is not a known field; did you mean retry_policy.maxRetries?",
        ),
        (
            b'"retry_policy":{"max_retries":3}',
            "retry_policy.max_retries is not a known field; did you mean retry_policy.maxRetries?",
        ),
        (b'"retry_policy":{"callback_url":3}', "retry_policy.callback_url is not a known field; known: maxRetries"),
        (b'"max_retries":3', "max_retries is not a known field; did you mean retry_policy.maxRetries?"),
        (b'"retries":3', "retries is not a known field; did you mean retry_policy.maxRetries?"),
        (b'"body":3', "body is not a known field; did you mean payload?"),
        (b'"callback_paylod":3', "callback_paylod is not a known field; did you mean payload?"),
        (b'"zzz":1', f"zzz is not a known field; known: {KNOWN}"),
        (b'"":1', f'"" is not a known field; known: {KNOWN}'),
        (b'"callback\\nurl":1', r'"callback\nurl" is not a known field; did you mean callback_url?'),
        (b'"x` - at `$.retry_policy":1', "retry_policy.x is not a known field; known: maxRetries"),
        (b'"%s":1' % (b"callback_url" * 9_000), f'"{("callback_url" * 9)[:63]}…" is not a known field; known: {KNOWN}'),
    ],
)
def test_error_names_the_wrong_field(fields: bytes, message: str) -> None:
    kept = {b"callback_url": b'"u"', b"execute_at": b"null"}
    kept.pop(fields.split(b'"')[1], None)
    rest = b"".join(b',"%s":%s' % pair for pair in kept.items())
    assert str(decode_fault(b"{" + fields + rest + b"}")) == message


class Http(msgspec.Struct, tag_field="type", tag="http", forbid_unknown_fields=True):
    url: str = ""
    payload: int = 0


class Nats(msgspec.Struct, tag_field="type", tag="nats", forbid_unknown_fields=True):
    topic: str = ""
    payload: int = 0


class Either(msgspec.Struct, forbid_unknown_fields=True):
    callback: Http | Nats | None = None
    group_id: str = ""
    namespace: str = ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"callback":{"type":"nats","zzz":1}}',
            "callback.zzz is not a known field for type nats; known: type, topic, payload",
        ),
        (
            b'{"callback":{"url":1,"type":"nats"}}',
            "callback.url is not a known field for type nats; known: type, topic, payload",
        ),
        (
            b'{"callback":{"type":"nats","subject":1}}',
            "callback.subject is not a known field for type nats; did you mean callback.topic?",
        ),
        (
            b'{"callback":{"type":"http","uri":1}}',
            "callback.uri is not a known field for type http; did you mean callback.url?",
        ),
        (b'{"callback":{"type":5}}', "callback.type must be a string"),
        (b'{"callback":{"type":"x"}}', 'callback.type must be one of http, nats, not "x"'),
        (b'{"topic":1}', "topic is not a known field; did you mean callback.topic?"),
        (b'{"typ":1}', "typ is not a known field; did you mean callback.type?"),
        (b'{"groupId":1}', "groupId is not a known field; did you mean namespace?"),
        (b'{"zzz":1}', "zzz is not a known field; known: callback, namespace"),
        (b'{"x` - at `$.callback":1}', "callback.x is not a known field; known: type, url, payload, topic"),
    ],
)
def test_error_for_an_unknown_field_names_those_of_the_given_type(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        wire.decode(body, Either, msgspec.json.Decoder(Either))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("callback_paylod", ("callbackUrl", "payload"), "payload"),
        ("callbackPaylod", ("callbackUrl", "payload"), "payload"),
        ("callback_paylod", ("callback_url", "callback_payload"), "callback_payload"),
        ("body", ("callback_url", "callback_payload"), "callback_payload"),
        ("idempotency_key", ("id", "payload"), "id"),
        ("idempotencyKy", ("id", "payload"), "id"),
        ("key", ("id", "payload"), "id"),
        ("id", ("execute_at", "idempotency_key"), "idempotency_key"),
        ("timer_id", ("id", "timerId"), "id"),
        ("group_id", ("namespace", "groupId"), "namespace"),
        ("topic", ("callbackUrl", "callbackSubject"), "callbackSubject"),
    ],
)
def test_names_of_the_other_api_and_older_names_are_known(name: str, known: tuple[str, ...], meant: str) -> None:
    assert wire.unknown_name(name, known, "field").reason == f"is not a known field; did you mean {meant}?"


def test_long_unknown_name_is_not_compared_with_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def nearest(name: str, known: tuple[str, ...], nested: tuple[str, ...]) -> None:
        compared.append(name)

    monkeypatch.setattr(wire, "_nearest", nearest)
    for length in (wire.NAME_CHARS_MAX, wire.NAME_CHARS_MAX + 1, 100_000):
        decode_fault(b'{"%s":1}' % (b"x" * length))
    assert compared == ["x" * wire.NAME_CHARS_MAX]


def test_missing_field_is_an_error() -> None:
    fault = decode_fault(b'{"callback_url":"u"}')
    assert (fault.field, fault.reason) == ("execute_at", "is required")


class Callback(msgspec.Struct):
    type: str


class Outer(msgspec.Struct):
    callback: Callback


def test_error_for_a_missing_nested_field_names_its_path() -> None:
    with pytest.raises(InvalidInput, match=r"^callback\.type is required$"):
        wire.decode(b'{"callback":{}}', Outer, msgspec.json.Decoder(Outer))


@pytest.mark.parametrize("body", [b"[]", b' "x"', b"1", b"null", b"\n[{}]"])
def test_body_that_is_no_object_is_rejected(body: bytes) -> None:
    assert str(decode_fault(body)) == "body must be a JSON object"


def test_decode_is_as_strict_as_check_json() -> None:
    assert "twice" in str(decode_fault(b'{"callback_url":"u","execute_at":null,"payload":{"a":1,"a":2}}'))


@settings(examined, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(
            ["callback_url", "execute_at", "retry_policy", "callback_headers", "items", "payload", "numbers"]
        ),
        _VALUES,
    )
)
def test_arbitrary_values_of_fields_raise_only_invalid_input(document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    try:
        wire.decode(body, Create, CREATE)
    except InvalidInput as error:
        assert error.field and "`" not in error.field
        assert "$" not in str(error).replace("$ref", "")


def fault(check: Callable[[Any, str], object], value: Any) -> str:
    with pytest.raises(InvalidInput) as raised:
        check(value, "it")
    assert raised.value.field == "it"
    return raised.value.reason


def test_only_absolute_http_urls_are_accepted() -> None:
    assert wire.check_url("https://example.com/hook?a=b", "it") == "https://example.com/hook?a=b"
    for url in ("", "ftp://example.com", "/hook", "http://", "http://a b/", "http://a/\r\n", "http://a/" + "x" * 2048):
        assert fault(wire.check_url, url)


def test_ordinary_headers_are_returned_unchanged() -> None:
    headers = {"X-Order": "12", "authorization": "Bearer \tx", "Content-Type": "text/plain", "X-Name": "é", "E": ""}
    assert wire.check_headers(headers, "it") == headers
    assert wire.check_headers({}, "it") == {}


@pytest.mark.parametrize(
    "name", ["", "a b", "a:", "a\n", "a\r\nb", "é", "a\0", "(a)", 'a"', "a/b", "a\t", "a@b", "\u212a"]
)
def test_header_name_that_is_no_token_is_rejected(name: str) -> None:
    assert "is not a valid header name" in fault(wire.check_headers, {name: "x"})


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\n", "\n", "a\0", "\x1b", "\x7f", "\x85", "€", "😀"])
def test_header_value_with_a_forbidden_character_is_rejected(value: str) -> None:
    assert "not allowed in a header" in fault(wire.check_headers, {"x": value})


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "Content-Length",
        "Transfer-Encoding",
        "Connection",
        "Keep-Alive",
        "Proxy-Connection",
        "TE",
        "Trailer",
        "Upgrade",
        "Expect",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
        "duetime-attempt",
        "duetime-timer",
        "Duetime-Anything",
        "traceparent",
    ],
)
def test_headers_of_the_connection_and_of_duetime_are_rejected(name: str) -> None:
    for spelled in (name, name.lower(), name.upper()):
        assert fault(wire.check_headers, {spelled: "x"}) == f'must not set "{spelled}", which is reserved'


def test_header_names_are_case_insensitive() -> None:
    assert (
        fault(wire.check_headers, {"X-A": "1", "x-a": "2"}) == 'must not contain "x-a" twice: header names ignore case'
    )
    assert (
        fault(wire.check_headers, {"x-a": "1", "X-A": "2"}) == 'must not contain "X-A" twice: header names ignore case'
    )


def test_number_and_size_of_headers_are_limited() -> None:
    wire.check_headers({f"x-{n}": "" for n in range(64)}, "it")
    assert "at most 64" in fault(wire.check_headers, {f"x-{n}": "" for n in range(65)})
    wire.check_headers({"x": "v" * (16 * 1024 - 5)}, "it")
    assert "16384 bytes" in fault(wire.check_headers, {"x": "v" * (16 * 1024 - 4)})


def test_id_is_1_to_255_characters_without_control_characters() -> None:
    for good in ("a", "x" * 255, "order 12/é😀", "..", "%00"):
        assert wire.check_id(good, "it") == good
    for bad in ("a\0", "a\n", "\x7f", "\x9f", "\ud800"):
        assert fault(wire.check_id, bad) == "must not have control characters"
    assert fault(wire.check_id, "") == "must not be empty"
    assert fault(wire.check_id, "x" * 256) == "must have at most 255 characters"


def test_namespace_is_1_to_64_plain_characters() -> None:
    for good in ("default", "A.b_c-9", "x" * 64):
        assert wire.check_namespace(good, "it") == good
    for bad in ("a b", "a/b", "é", "a\n", "a:b", "٣"):
        assert fault(wire.check_namespace, bad) == "must have only letters, digits, dots, hyphens and underscores"
    assert fault(wire.check_namespace, "") == "must not be empty"
    assert fault(wire.check_namespace, "x" * 65) == "must have at most 64 characters"


def test_uuid_has_one_form_and_is_returned_in_lower_case() -> None:
    text = "123e4567-e89b-42d3-a456-426614174000"
    assert wire.check_uuid(text.upper(), "it") == text
    for bad in (
        "",
        text[:-1],
        text + "0",
        text.replace("-", ""),
        f"{{{text}}}",
        f"urn:uuid:{text}",
        "g" + text[1:],
        text + "\n",
    ):
        assert fault(wire.check_uuid, bad).startswith("must be a UUID like")


@pytest.mark.parametrize(("chars", "accepted"), [(100_000, False), (16_000, True)])
def test_large_header_names_are_not_cached(chars: int, accepted: bool) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for n in range(100):
            name = f"x-{n}-{chars}-".ljust(chars, "a")
            if accepted:
                wire.check_headers({name: ""}, "it")
            else:
                assert "16384 bytes" in fault(wire.check_headers, {name: ""})
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2 * chars
