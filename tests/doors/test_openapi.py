"""The OpenAPI document is valid, agrees with the code, and is served together with a page that shows it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any, get_origin

import jsonschema_rs
import msgspec
import msgspec.inspect
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from duetime import client
from duetime.doors import http_v1, platform_schema, wire
from duetime.doors import http_v1_schema as schema
from duetime.doors.http_v1 import HttpV1Door
from duetime.doors.http_v1_values import retention_of
from duetime.doors.monitoring import METRICS, MonitoringDoor
from duetime.doors.openapi import Api, document
from duetime.doors.openapi_texts import ABOUT, HTTP_V1, PLATFORM
from duetime.doors.operation import Operation, Text
from duetime.doors.platform import PlatformDoor
from duetime.doors.reference import example, page
from duetime.doors.retry_policy import Duration
from duetime.errors import InvalidInput, Unsupported
from duetime.model import Status
from duetime.store import Abilities, Filter, Order, Query
from duetime.targets import is_reserved
from duetime.timetext import parse_duration, parse_time
from duetime.urls import parse_url
from duetime.version import __version__
from tests.servers import KEY, Duetime, Receiver

NOTHING: Any = None
DOOR = HttpV1Door(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, request_bytes_max=1, batch_bytes_max=1, shards=1)
PLATFORM_DOOR = PlatformDoor(NOTHING, NOTHING, NOTHING, request_bytes_max=1)
OPERATIONS_DOOR = MonitoringDoor(
    NOTHING, NOTHING, NOTHING, NOTHING, None, ready=bool, watchdog=NOTHING, refusal=NOTHING, virtual_clock=None
)
OPERATIONS = DOOR.operations()
PLATFORM_OPERATIONS = [*PLATFORM_DOOR.operations(), *OPERATIONS_DOOR.operations()]
APIS = [(HTTP_V1, OPERATIONS), (PLATFORM, PLATFORM_OPERATIONS)]
ALL = [(api, operation) for api, operations in APIS for operation in operations]
DOCUMENT = document(ABOUT, APIS, version="1.2.3")
NAMES = {**HTTP_V1.names, **PLATFORM.names}
SCHEMAS = DOCUMENT["components"]["schemas"]
STRUCTS = {
    kind
    for module in (schema, platform_schema)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
} - {msgspec.Struct, platform_schema.Success}
TAKEN: list[Any] = list(dict.fromkeys(operation.body for _, operation in ALL if operation.body is not None))


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


# --- the document is valid -------------------------------------------------------------------------------------------


def test_every_schema_is_valid_json_schema() -> None:
    """By the meta schema of the JSON Schema dialect that OpenAPI 3.1 uses."""
    for name, one in SCHEMAS.items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **one})
        assert one["title"] == name
    for _, _, operation in described():
        for parameter in operation.get("parameters", ()):
            jsonschema_rs.meta.validate(
                {"$schema": "https://json-schema.org/draft/2020-12/schema", **parameter["schema"]}
            )


def test_schemathesis_can_read_the_document() -> None:
    import schemathesis
    from schemathesis.core.result import Ok

    loaded = schemathesis.openapi.from_dict(json.loads(json.dumps(DOCUMENT)))
    loaded.config.update(base_url="http://127.0.0.1:9")
    loaded.validate()
    operations = [result.ok() for result in loaded.get_all_operations() if isinstance(result, Ok)]
    found = {f"{operation.method.upper()} {operation.path}" for operation in operations}
    assert found == {f"{operation.method} {operation.path}" for _, operation in ALL}


def test_document_has_the_required_parts() -> None:
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


def test_every_reference_resolves_and_every_component_is_used() -> None:
    references = {part["$ref"] for part in every(DOCUMENT) if "$ref" in part}
    for reference in references:
        found: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    for kind in ("schemas", "responses"):
        for name in DOCUMENT["components"][kind]:
            assert f"#/components/{kind}/{name}" in references


# --- the document agrees with the code -------------------------------------------------------------------------------


def test_document_has_every_route_and_nothing_else() -> None:
    shown = {(method, re.sub(r"{\w+}", "{}", path)) for method, path, _ in described()}
    doors = (DOOR, PLATFORM_DOOR, OPERATIONS_DOOR)
    served = {(method, path) for door in doors for path, methods in door.routes().items() for method in methods}
    assert shown == served - {("GET", "/clock"), ("POST", "/clock")}  # only for development, with --virtual-clock


@pytest.mark.parametrize(("api", "operation"), ALL, ids=lambda of: getattr(of, "name", ""))
def test_every_operation_is_described_as_registered(api: Api, operation: Operation) -> None:
    shown = DOCUMENT["paths"][operation.path][operation.method.lower()]
    assert shown["summary"] == operation.summary and shown["description"]
    asked = [(one["name"], one["in"]) for one in shown.get("parameters", ()) if one["in"] != "path"]
    assert asked == [(parameter.name, parameter.place) for parameter in operation.parameters]
    assert shown.get("security") == (None if operation.needs_key else [])
    common = {401, 403, 429, 500, 503} | ({400} if api is HTTP_V1 else set()) if operation.needs_key else set()
    statuses = {*operation.responses, *operation.errors, *common}
    assert set(shown["responses"]) == {str(status) for status in statuses}
    if operation.body is None:
        assert "requestBody" not in shown
    else:
        assert reference_of(shown["requestBody"]) == operation.body.__name__
    for status, kind in operation.responses.items():
        given = shown["responses"][str(status)]
        assert ("Location" in given.get("headers", {})) == (status == 201)
        if isinstance(kind, Text):
            assert set(given["content"]) == set(kind.examples)
        elif kind is None:
            assert "content" not in given
        else:
            fields = (get_origin(kind) or kind).__struct_encode_fields__
            assert SCHEMAS[reference_of(given)]["properties"].keys() == {*fields}


def reference_of(body: dict[str, Any]) -> str:
    reference: str = body["content"]["application/json"]["schema"]["$ref"]
    return reference.rpartition("/")[2]


def test_schemas_of_requests_reject_unknown_fields() -> None:
    for kind in TAKEN:
        assert kind.__struct_config__.forbid_unknown_fields
        assert SCHEMAS[kind.__name__]["additionalProperties"] is False


def test_every_error_code_is_described_with_its_status() -> None:
    told = {status: error.description for status, error in HTTP_V1.errors.items()}
    shown = {(status, name) for status, name, _ in HTTP_V1.error_examples}
    for _, status, code in http_v1._ERRORS:
        if status != 405:
            assert re.search(rf"\b{code}\b", told[status]), code
            assert (status, code) in shown
    assert "INTERNAL_ERROR" in told[500]


# --- its examples are valid ------------------------------------------------------------------------------------------


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """The content of each request and response, with its place."""
    for method, path, operation in described():
        for where, part in {"request": operation.get("requestBody", {}), **operation["responses"]}.items():
            for media_type, body in part.get("content", {}).items():
                yield f"{method} {path} {where} {media_type}", body
    for name, answer in DOCUMENT["components"]["responses"].items():
        for media_type, body in answer["content"].items():
            yield f"{name} {media_type}", body


@pytest.mark.parametrize("body", [pytest.param(body, id=where) for where, body in bodies()])
def test_every_body_has_examples_that_match_its_schema(body: dict[str, Any]) -> None:
    shown = [body["example"]] if "example" in body else [one["value"] for one in body["examples"].values()]
    assert shown
    for one in shown:
        keep(body["schema"], json.loads(json.dumps(one)))


def keep(one: dict[str, Any], value: Any) -> None:
    """Check that the value matches a schema of the document, including formats."""
    jsonschema_rs.validate(one | {"components": DOCUMENT["components"]}, value, validate_formats=True)


def test_examples_of_metrics_are_lines_that_a_service_has(service: Duetime) -> None:
    shown = service.request("GET", "/metrics").body.decode()
    for text in METRICS.examples.values():
        for line in text.removesuffix("# EOF\n").splitlines():
            assert line.rpartition(" ")[0] in shown, line


def test_every_error_status_has_an_example() -> None:
    assert {status for status, *_ in HTTP_V1.error_examples} == set(HTTP_V1.errors)
    assert {status for status, *_ in PLATFORM.error_examples} == set(PLATFORM.errors)


def test_examples_of_unsupported_requests_have_the_messages_of_the_code() -> None:
    few = Abilities(orders=frozenset({Order.DUE}))
    with pytest.raises(Unsupported) as error:
        few.check_filter(Filter(status=Status.FAILED))
    assert str(error.value) in [body["message"] for _, _, body in HTTP_V1.error_examples]
    with pytest.raises(Unsupported) as error:
        Abilities(offset_max=10_000).check_query(Query(namespace="default", offset=10_001))
    assert str(error.value) in [body["message"] for _, _, body in PLATFORM.error_examples]


@pytest.mark.parametrize("kind", sorted(STRUCTS, key=str), ids=lambda kind: kind.__name__)
def test_schema_has_every_field_of_its_type(kind: Any) -> None:
    name = NAMES.get(kind.__name__, kind.__name__)
    assert name in SCHEMAS
    tag = {kind.__struct_config__.tag_field} - {None}
    assert set(SCHEMAS[name]["properties"]) == {*kind.__struct_encode_fields__, *tag}
    assert SCHEMAS[name]["description"]


def test_limits_of_lists_are_those_of_the_code() -> None:
    limit = next(one for one in DOCUMENT["paths"]["/api/v1/timers"]["get"]["parameters"] if one["name"] == "limit")
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": http_v1.LIMIT_MAX, "default": 50}
    assert http_v1.LIMIT_DEFAULT == 50


def test_limits_of_headers_and_bodies_are_those_of_the_code() -> None:
    headers = SCHEMAS["CreateTimer"]["properties"]["callbackHeaders"]
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
    (Duration, parse_duration),
    (schema.Retention, lambda text, _: retention_of(text)),
    (schema.Url, parse_url),
]


def named(kind: Any) -> str:
    return next((name for name, value in vars(schema).items() if value is kind), "")


@pytest.mark.parametrize(("kind", "check"), EXACT, ids=[named(kind) for kind, _ in EXACT])
@settings(deadline=None)
@given(data=st.data())
def test_pattern_accepts_exactly_what_the_code_accepts(
    kind: Any, check: Callable[[str, str], object], data: st.DataObject
) -> None:
    like = st.from_regex(pattern_of(kind))  # sometimes with a final line break, which does not match
    text = data.draw(st.one_of(like, st.text(max_size=300), like.map(lambda text: text * 40)))
    assume(not is_reserved(text))  # the description lists these
    assert keeps(kind, text) == passes(check, text)


@pytest.mark.parametrize(("kind", "check"), NEARLY, ids=[named(kind) for kind, _ in NEARLY])
@settings(deadline=None)
@given(data=st.data())
def test_values_that_the_code_accepts_match_the_pattern(
    kind: Any, check: Callable[[str, str], object], data: st.DataObject
) -> None:
    """A match may still be invalid: a pattern can't check dates or limits."""
    like = st.from_regex(pattern_of(kind).removesuffix("$"))
    text = data.draw(st.one_of(like, st.from_regex(pattern_of(kind)), st.text(max_size=20)))
    if passes(check, text):
        assert re.fullmatch(pattern_of(kind), text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((schema.Time, text) for text in ("2030-01-31T09:00:00Z", "2030-01-31t09:00:00.123456789z")),
        *((schema.Time, text) for text in ("2030-01-31T09:00:00+05:30", "2030-01-31T09:00:00-23:59")),
        *((Duration, text) for text in ("500ms", "30s", "10m", "24h", "1h30m", "7d", "0s", "1d2h3m4s5ms")),
        *((schema.Retention, text) for text in ("forever", "30d", "1s")),
        *(
            (schema.Url, text)
            for text in ("http://a", "HTTPS://a.b:1/c?d#e", "https://[2001:db9::1]:8443/", "http://a?")
        ),
    ],
)
def test_schema_accepts_common_values(kind: Any, text: str) -> None:
    assert keeps(kind, text) and passes(next(check for one, check in NEARLY if one is kind), text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((schema.Time, text) for text in ("2030-01-31T09:00:00", "2030-01-31", "", "2030-01-31T24:00:00Z", "now")),
        *((Duration, text) for text in ("", "30", "s", "1.5s", "30s10m", "1h1h", "-1s", " 1s")),
        *((schema.Retention, text) for text in ("", "never", "forever1d")),
        *((schema.Url, text) for text in ("", "/a", "ftp://a", "http://", "http:///a", "http://a b", "http://u:p@a")),
        *((schema.Url, text) for text in ("http://a\\b", "http://ä", "http://a/\x7f")),
    ],
)
def test_schema_rejects_common_mistakes(kind: Any, text: str) -> None:
    assert not keeps(kind, text) and not passes(next(check for one, check in NEARLY if one is kind), text)


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
def test_examples_match_the_schema_and_the_type(kind: Any) -> None:
    whole = {"$ref": f"#/components/schemas/{kind.__name__}", "components": DOCUMENT["components"]}
    for one in SCHEMAS[kind.__name__]["examples"]:
        jsonschema_rs.validate(whole, one)
        msgspec.json.decode(json.dumps(one), type=kind)


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
def test_optional_fields_of_requests_are_absent_rather_than_null(kind: Any) -> None:
    """Generated clients omit them; the code accepts null, too."""
    one = SCHEMAS[kind.__name__]
    assert not [part for part in every(one) if "null" in part.get("type", ()) or part.get("default", 0) is None]
    for field in msgspec.structs.fields(kind):
        if field.default is None:
            msgspec.json.decode(json.dumps(one["examples"][0] | {field.encode_name: None}), type=kind)


def test_schemas_use_only_what_generators_support() -> None:
    """The only compositions are "object or null" in responses and callbacks, which their type tells apart. Every enum
    has a type."""
    for part in every(SCHEMAS):
        assert not {"allOf", "not", "if", "discriminator"} & set(part)
        if "oneOf" in part:
            kinds = [SCHEMAS[one["$ref"].rpartition("/")[2]]["properties"]["type"] for one in part["oneOf"]]
            assert kinds == [{"type": "string", "enum": [name]} for name in ("http", "nats")]
        if "anyOf" in part:
            reference, null = part["anyOf"]
            assert set(reference) == {"$ref"} and null == {"type": "null"}
        if isinstance(part.get("enum"), list):
            assert part["type"] == "string"
    # In Go the constructor of X is NewX.
    assert not {f"New{name}" for name in SCHEMAS} & set(SCHEMAS)


# --- the document and its page are served ----------------------------------------------------------------------------


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
    """Check that the page runs no scripts, loads nothing, and has no dead links."""
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(shown.tags)
    assert not shown.values("src") and not [name for _, name, _ in shown.attributes if name.startswith("on")]
    assert "url(" not in shown.style and "@import" not in shown.style
    ids = shown.values("id")
    assert len(set(ids)) == len(ids)
    for target in shown.values("href"):
        assert target == "/api/v1/openapi.json" or target.removeprefix("#") in ids, target


def test_document_needs_no_key(service: Duetime) -> None:
    answer = service.request("GET", "/api/v1/openapi.json", headers={})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert answer.body == json.loads(json.dumps(DOCUMENT)) | {"info": {**DOCUMENT["info"], "version": __version__}}


def test_page_needs_no_key_and_runs_no_scripts(service: Duetime) -> None:
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


def test_page_shows_every_operation_and_schema() -> None:
    shown = Page(page(DOCUMENT))
    for method, path, operation in described():
        assert operation["operationId"] in shown.values("id")
        assert path in shown.text and operation["summary"] in shown.text
        assert operation["description"].replace("`", "") in shown.text
        assert example(method, path, operation, DOCUMENT) in shown.text
        for parameter in operation.get("parameters", ()):
            assert parameter["description"].replace("`", "") in shown.text
    for name, one in SCHEMAS.items():
        assert f"schema-{name}" in shown.values("id")
        for field in one.get("properties", ()):
            assert field in shown.text
        for part in every(one.get("properties", {})):
            if isinstance(part.get("description"), str):
                assert part["description"].replace("`", "") in shown.text


def test_page_escapes_all_texts() -> None:
    nasty = """</style><script>alert('1')</script>" onclick="alert(2)" &lt; <img src=x>"""
    text = json.dumps(DOCUMENT)
    hostile = json.loads(text)
    for part in every(hostile):
        for name in ("description", "summary", "title", "pattern"):
            if isinstance(part.get(name), str):
                part[name] = nasty
        if isinstance(part.get("examples"), list) and isinstance(part["examples"][0], str):
            part["examples"] = [nasty]
    shown = Page(page(hostile))
    check_harmless(shown)
    assert nasty in shown.text


def test_other_methods_get_the_error_format_of_the_api(service: Duetime) -> None:
    for path in ("/docs", "/api/v1/openapi.json"):
        answer = service.request("POST", path, headers={})
        assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
        assert answer.body["error"] == "METHOD_NOT_ALLOWED"
        assert service.request("HEAD", path, headers={}).status == 200


def test_commands_of_the_page_work(start_service: Callable[..., Duetime], receiver: Receiver) -> None:
    """In the order of the page, with the receiver as the target. Some get 404 or 409: others deleted their timer."""
    service = start_service(virtual_clock=True)
    for method, path, operation in described():
        command = example(method, path, operation, DOCUMENT).replace("$API_KEY", KEY)
        program, _, verb, url, *rest = shlex.split(command.replace("\\\n", ""))
        assert (program, verb) == ("curl", method)
        options = list(zip(rest[::2], rest[1::2], strict=True))
        headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
        body = next((value for option, value in options if option == "-d"), None)
        if body is not None:
            body = body.replace("https://example.com/hooks/timer", receiver.url("/documented"))
            body = body.replace("2030-", "2999-")  # the dates of the examples must be in the future
            assert "example.com" not in body
        sent = None if body is None else body.encode()
        answer = service.request(method, url.removeprefix("$DUETIME"), body=sent, headers=headers)
        assert answer.status in (200, 201, 204, 404, 409), (command, answer)


def test_unknown_query_parameter_gets_a_documented_status(service: Duetime) -> None:
    for method, template, operation in described():
        path = template.replace("{id}", "8f14e45f-ceea-467f-a9f3-0f2b7a1c6d3e")
        path = re.sub(r"{\w+}", "default", path)
        answer = service.request(method, f"{path}?unheardOf=1")
        assert answer.status == (200 if operation["tags"] == ["monitoring"] else 400), (method, path, answer)
        assert str(answer.status) in operation["responses"], (method, path)


def test_operations_that_read_their_body_document_its_errors() -> None:
    for method, path, operation in described():
        errors = {"408", "413", "415"} & set(operation["responses"])
        assert errors == (set() if method == "GET" else {"408", "413", "415"}), (method, path)


def test_names_are_those_of_the_python_client() -> None:
    assert {"ActivityPoint", "ForecastStep"} <= set(SCHEMAS)
    for name in ("ActivityPoint", "ForecastStep", "Forecast", "DestinationFailures", "Failures", "Overview"):
        assert hasattr(client, name), name


def test_durations_of_requests_have_one_pattern() -> None:
    policies = [SCHEMAS[name]["properties"] for name in ("RetryPolicy", "PlatformRetryPolicy")]
    named = [one[name] for one in policies for name in one if "nterval" in name or "uration" in name]
    assert len(named) == 6
    delay = SCHEMAS["CreateTimer"]["properties"]["delay"]
    for one in named:
        assert [one[rule] for rule in ("pattern", "minLength", "maxLength")] == [delay["pattern"], 2, 40]


def parts(kind: Any) -> Iterator[Any]:
    """A type with all types in it."""
    if isinstance(kind, tuple):
        for one in kind:
            yield from parts(one)
    elif isinstance(kind, msgspec.Struct):
        yield kind
        yield from parts(msgspec.structs.astuple(kind))


def test_types_of_requests_leave_patterns_to_the_code_whose_messages_show_none() -> None:
    everything = list(parts(tuple(msgspec.inspect.type_info(kind) for kind in TAKEN)))
    assert any(isinstance(one, msgspec.inspect.StrType) and one.max_length == 64 for one in everything)
    assert not [one for one in everything if getattr(one, "pattern", None)]


def test_namespace_with_a_final_line_break_is_rejected_everywhere(service: Duetime) -> None:
    asked = {"namespace": "default\n"}
    assert not keeps(schema.Name, asked["namespace"])
    answer = service.request("POST", "/api/v1/timers/replay", json=asked, headers={"X-API-Key": KEY})
    assert answer.status == 400, answer
