"""The OpenAPI document: it is one, it says what the code does, and it is served with a page for people to anyone."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from duetime import __version__
from duetime.deliverers.http import is_reserved
from duetime.doors import durable, wire
from duetime.doors import durable_schema as schema
from duetime.doors.durable import DurableDoor
from duetime.doors.durable_values import retention_of
from duetime.doors.openapi import document
from duetime.doors.reference import example, page
from duetime.errors import InvalidInput
from duetime.timetext import parse_duration, parse_time
from duetime.urls import parse_url
from tests.servers import KEY, Duetime, Receiver

DOOR = DurableDoor(
    None,  # type: ignore[arg-type]
    None,  # type: ignore[arg-type]
    None,  # type: ignore[arg-type]
    None,  # type: ignore[arg-type]
    request_bytes_max=1,
    batch_bytes_max=1,
    shards=1,
)
OPERATIONS = DOOR.operations()
DOCUMENT = document(OPERATIONS, version="1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
STRUCTS = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
STRUCTS.remove(msgspec.Struct)
TAKEN = [operation.takes for operation in OPERATIONS if operation.takes is not None]


def described() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def every(part: Any) -> Iterator[dict[str, Any]]:
    """Each object in a part of the document."""
    if isinstance(part, dict):
        yield part
        for value in part.values():
            yield from every(value)
    elif isinstance(part, list):
        for item in part:
            yield from every(item)


# --- it is an OpenAPI document -------------------------------------------------------------------------------------


def test_every_schema_is_one() -> None:
    """By the meta schema of the dialect that OpenAPI 3.1 uses; the operations' own are parts of it or references."""
    for name, one in SCHEMAS.items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **one})
        assert one["title"] == name
    for _, _, operation in described():
        for parameter in operation.get("parameters", ()):
            jsonschema_rs.meta.validate(
                {"$schema": "https://json-schema.org/draft/2020-12/schema", **parameter["schema"]}
            )


def test_schemathesis_can_read_it() -> None:
    import schemathesis

    loaded = schemathesis.openapi.from_dict(json.loads(json.dumps(DOCUMENT)))
    loaded.config.update(base_url="http://127.0.0.1:9")
    loaded.validate()
    found = {f"{result.ok().method.upper()} {result.ok().path}" for result in loaded.get_all_operations()}
    assert found == {f"{operation.method} {operation.path}" for operation in OPERATIONS}


def test_it_has_the_parts_that_the_standard_asks_for() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["title"] and DOCUMENT["info"]["version"] == "1.2.3"
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    names = []
    for method, path, operation in described():
        names.append(operation["operationId"])
        assert set(operation["tags"]) <= tags
        given = operation.get("parameters", [])
        assert len({(one["name"], one["in"]) for one in given}) == len(given)
        in_path = [one for one in given if one["in"] == "path"]
        assert [one["name"] for one in in_path] == re.findall(r"{(\w+)}", path)
        assert all(one["required"] is True for one in in_path)
        assert all(one["description"] for one in given), (method, path)
        assert all(re.fullmatch("[1-5][0-9]{2}", status) for status in operation["responses"])
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-zA-Z]+", name) for name in names)
    for response in DOCUMENT["components"]["responses"].values():
        assert response["description"]
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert {name for choice in DOCUMENT["security"] for name in choice} == set(schemes)


def test_every_reference_leads_somewhere_and_every_component_is_used() -> None:
    references = {part["$ref"] for part in every(DOCUMENT) if "$ref" in part}
    for reference in references:
        found: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    for kind in ("schemas", "responses"):
        for name in DOCUMENT["components"][kind]:
            assert f"#/components/{kind}/{name}" in references


# --- it says what the code does ------------------------------------------------------------------------------------


def test_every_route_is_in_it_and_nothing_else() -> None:
    shown = {(method, re.sub(r"{\w+}", "{}", path)) for method, path, _ in described()}
    assert shown == {(method, path) for path, methods in DOOR.routes().items() for method in methods}


def test_every_operation_is_described_as_it_is_registered() -> None:
    for operation in OPERATIONS:
        shown = DOCUMENT["paths"][operation.path][operation.method.lower()]
        assert shown["summary"] == operation.summary
        taken = shown.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        assert taken == (
            None if operation.takes is None else {"$ref": f"#/components/schemas/{operation.takes.__name__}"}
        )
        asked = [(one["name"], one["in"]) for one in shown.get("parameters", ()) if one["in"] != "path"]
        assert asked == [(parameter.name, parameter.place) for parameter in operation.given]
        statuses = {*operation.gives, *operation.refuses, 401, 403, 429, 500, 503}
        assert set(shown["responses"]) == {str(status) for status in statuses}
        for status, kind in operation.gives.items():
            given = shown["responses"][str(status)].get("content", {}).get("application/json", {}).get("schema")
            assert given == (None if kind is None else {"$ref": f"#/components/schemas/{kind.__name__}"})


def test_every_error_code_is_told_with_its_status() -> None:
    told: dict[str, str] = {}
    for _, _, operation in described():
        for status, answer in operation["responses"].items():
            if "$ref" in answer:
                told[status] = DOCUMENT["components"]["responses"][answer["$ref"].rpartition("/")[2]]["description"]
    for _, status, code in durable._ERRORS:
        if status != 405:
            assert re.search(rf"\b{code}\b", told[str(status)]), code
    assert "INTERNAL_ERROR" in told["500"]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_place(kind: Any) -> None:
    name = {"CamelRetryPolicy": "RetryPolicy"}.get(kind.__name__, kind.__name__)
    assert name in SCHEMAS
    assert set(SCHEMAS[name]["properties"]) == set(kind.__struct_encode_fields__)
    assert SCHEMAS[name]["description"]


def test_the_bounds_of_a_list_are_those_of_the_code() -> None:
    limit = next(one for one in DOCUMENT["paths"]["/api/v1/timers"]["get"]["parameters"] if one["name"] == "limit")
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": durable.LIMIT_MAX, "default": 50}
    assert durable.LIMIT_DEFAULT == 50


def test_headers_and_bodies_have_the_bounds_of_the_code() -> None:
    headers = SCHEMAS["CreateTimer"]["properties"]["callbackHeaders"]["anyOf"][0]
    assert headers["maxProperties"] == wire.HEADERS_MAX
    assert f"{wire.HEADERS_BYTES_MAX // 1024} KiB" in headers["description"]
    assert f"at most {wire.DEPTH_MAX} levels" in DOCUMENT["info"]["description"]
    path_id = DOCUMENT["paths"]["/api/v1/timers/{namespace}/{id}"]["get"]["parameters"]
    assert [one["schema"]["maxLength"] for one in path_id] == [wire.NAMESPACE_CHARS_MAX, wire.ID_CHARS_MAX]


def pattern_of(kind: Any) -> str:
    pattern: str = msgspec.json.schema(kind)["pattern"]
    assert pattern.startswith("^") and pattern.endswith("$")
    return pattern


def keeps(kind: Any, text: str) -> bool:
    """Whether the text keeps the schema, by a validator that reads patterns as ECMA-262 does."""
    return jsonschema_rs.is_valid(msgspec.json.schema(kind), text)


def passes(check: Callable[[str, str], object], text: str) -> bool:
    try:
        check(text, "field")
        return True
    except InvalidInput:
        return False


def header_name(text: str, field: str) -> None:
    wire.check_headers({text: ""}, field)


def header_value(text: str, field: str) -> None:
    wire.check_headers({"X-A": text}, field)


EXACT: list[tuple[Any, Callable[[str, str], object]]] = [
    (schema.Name, wire.check_namespace),
    (schema.Id, wire.check_id),
    (schema.HeaderName, header_name),
    (schema.HeaderValue, header_value),
]
NEARLY: list[tuple[Any, Callable[[str, str], object]]] = [
    (schema.Time, parse_time),
    (schema.Span, parse_duration),
    (schema.Retention, lambda text, _: retention_of(text)),
    (schema.Url, parse_url),
]


def named(kind: Any) -> str:
    return next((name for name, value in vars(schema).items() if value is kind), "")


@pytest.mark.parametrize(("kind", "check"), EXACT, ids=[named(kind) for kind, _ in EXACT])
@settings(deadline=None)
@given(data=st.data())
def test_a_pattern_is_the_rule_of_the_code(kind: Any, check: Callable[[str, str], object], data: st.DataObject) -> None:
    like = st.from_regex(pattern_of(kind))  # with a line break at the end now and then, which is not part of it
    text = data.draw(st.one_of(like, st.text(max_size=300), like.map(lambda text: text * 40)))
    assume(not is_reserved(text))  # which are told in words
    assert keeps(kind, text) == passes(check, text)


@pytest.mark.parametrize(("kind", "check"), NEARLY, ids=[named(kind) for kind, _ in NEARLY])
@settings(deadline=None)
@given(data=st.data())
def test_what_the_code_takes_keeps_the_pattern(
    kind: Any, check: Callable[[str, str], object], data: st.DataObject
) -> None:
    """Not the other way round: a pattern knows neither calendars nor sums."""
    like = st.from_regex(pattern_of(kind).removesuffix("$"))
    text = data.draw(st.one_of(like, st.from_regex(pattern_of(kind)), st.text(max_size=20)))
    if passes(check, text):
        assert re.fullmatch(pattern_of(kind), text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((schema.Time, text) for text in ("2030-01-31T09:00:00Z", "2030-01-31t09:00:00.123456789z")),
        *((schema.Time, text) for text in ("2030-01-31T09:00:00+05:30", "2030-01-31T09:00:00-23:59")),
        *((schema.Span, text) for text in ("500ms", "30s", "10m", "24h", "1h30m", "7d", "0s", "1d2h3m4s5ms")),
        *((schema.Retention, text) for text in ("forever", "30d", "1s")),
        *(
            (schema.Url, text)
            for text in ("http://a", "HTTPS://a.b:1/c?d#e", "https://[2001:db9::1]:8443/", "http://a?")
        ),
    ],
)
def test_common_values_keep_the_schema(kind: Any, text: str) -> None:
    assert keeps(kind, text) and passes(next(check for one, check in NEARLY if one is kind), text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((schema.Time, text) for text in ("2030-01-31T09:00:00", "2030-01-31", "", "2030-01-31T24:00:00Z", "now")),
        *((schema.Span, text) for text in ("", "30", "s", "1.5s", "30s10m", "1h1h", "-1s", " 1s")),
        *((schema.Retention, text) for text in ("", "never", "forever1d")),
        *((schema.Url, text) for text in ("", "/a", "ftp://a", "http://", "http:///a", "http://a b", "http://u:p@a")),
        *((schema.Url, text) for text in ("http://a\\b", "http://ä", "http://a/\x7f")),
    ],
)
def test_common_mistakes_break_the_schema(kind: Any, text: str) -> None:
    assert not keeps(kind, text) and not passes(next(check for one, check in NEARLY if one is kind), text)


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
def test_examples_keep_the_schema_and_the_type(kind: Any) -> None:
    whole = {"$ref": f"#/components/schemas/{kind.__name__}", "components": DOCUMENT["components"]}
    for one in SCHEMAS[kind.__name__]["examples"]:
        jsonschema_rs.validate(whole, one)
        msgspec.json.decode(json.dumps(one), type=kind)


# --- it is served, and so is a page of it --------------------------------------------------------------------------


class Page(HTMLParser):
    """What matters of a page, and whether its elements close in order."""

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.style = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, one, value in self.attributes if one == name]


def check_harmless(shown: Page) -> None:
    """Nothing that runs, nothing from elsewhere, and every link within leads somewhere."""
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(shown.tags)
    assert not shown.values("src") and not [name for _, name, _ in shown.attributes if name.startswith("on")]
    assert "url(" not in shown.style and "@import" not in shown.style
    ids = shown.values("id")
    assert len(set(ids)) == len(ids)
    for target in shown.values("href"):
        assert target == "/api/v1/openapi.json" or target.removeprefix("#") in ids, target


def test_the_document_is_open_to_anyone(service: Duetime) -> None:
    answer = service.request("GET", "/api/v1/openapi.json", headers={})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert answer.body == json.loads(json.dumps(DOCUMENT)) | {"info": {**DOCUMENT["info"], "version": __version__}}


def test_the_page_is_open_to_anyone_and_runs_nothing(service: Duetime) -> None:
    answer = service.request("GET", "/docs", headers={})
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    shown = Page(answer.body.decode())
    check_harmless(shown)
    digest = b64encode(hashlib.sha256(shown.style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "prefers-color-scheme: dark" in shown.style
    assert answer.body.startswith(b"<!doctype html>")


def test_the_page_shows_everything() -> None:
    shown = Page(page(DOCUMENT))
    for method, path, operation in described():
        assert operation["operationId"] in shown.values("id")
        assert path in shown.text and operation["summary"] in shown.text
        assert example(method, path, operation, DOCUMENT) in shown.text
        for parameter in operation.get("parameters", ()):
            assert parameter["description"] in shown.text
    for name, one in SCHEMAS.items():
        assert f"schema-{name}" in shown.values("id")
        for field in one.get("properties", ()):
            assert field in shown.text
        for part in every(one.get("properties", {})):
            if isinstance(part.get("description"), str):
                assert part["description"] in shown.text


def test_whatever_the_document_says_is_shown_as_text() -> None:
    nasty = """</style><script>alert('1')</script>" onclick="alert(2)" &lt; <img src=x>"""
    text = json.dumps(DOCUMENT)
    hostile = json.loads(text)
    for part in every(hostile):
        for name in ("description", "summary", "title", "pattern"):
            if isinstance(part.get(name), str):
                part[name] = nasty
        if "examples" in part and isinstance(part["examples"][0], str):
            part["examples"] = [nasty]
    shown = Page(page(hostile))
    check_harmless(shown)
    assert nasty in shown.text


def test_other_methods_are_refused_in_the_shape_of_the_door(service: Duetime) -> None:
    for path in ("/docs", "/api/v1/openapi.json"):
        answer = service.request("POST", path, headers={})
        assert answer.status == 405 and answer.headers["allow"] == "GET"
        assert answer.body["error"] == "METHOD_NOT_ALLOWED"
        assert service.request("HEAD", path, headers={}).status == 200


def test_the_commands_of_the_page_are_understood(alone: Callable[..., Duetime], receiver: Receiver) -> None:
    """In the order of the page, aimed at the receiver. Some name what others delete, so 404 and 409 may come."""
    service = alone(virtual_clock=True)
    for method, path, operation in described():
        command = example(method, path, operation, DOCUMENT).replace("$API_KEY", KEY)
        program, _, verb, url, *rest = shlex.split(command.replace("\\\n", ""))
        assert (program, verb) == ("curl", method)
        options = list(zip(rest[::2], rest[1::2], strict=True))
        headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
        body = next((value for option, value in options if option == "-d"), None)
        if body is not None:
            body = body.replace("https://example.com/hooks/timer", receiver.url("/documented"))
            body = body.replace("2030-", "2999-")  # the year of the examples will have passed one day
            assert "example.com" not in body
        sent = None if body is None else body.encode()
        answer = service.request(method, url.removeprefix("$DUETIME"), body=sent, headers=headers)
        assert answer.status in (200, 201, 204, 404, 409), (command, answer)


def test_a_line_break_at_the_end_of_a_namespace_is_refused_everywhere(service: Duetime) -> None:
    asked = {"namespace": "default\n"}
    assert not keeps(schema.Name, asked["namespace"])
    answer = service.request("POST", "/api/v1/timers/replay", json=asked, headers={"X-API-Key": KEY})
    assert answer.status == 400, answer
