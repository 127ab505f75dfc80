"""The reference of the HTTP APIs: the OpenAPI document, and the same as a web page. Neither needs a key.

Both are built once, when the service starts. The page is plain HTML with an inline style sheet. It has no scripts and
loads nothing, and its Content-Security-Policy forbids both. All text is escaped, except the markup of this module,
which has the type ``_Html``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

import msgspec

from duetime.doors.examples import Json
from duetime.doors.http import GUARDS, JSON, Handler, Request, Response, guards

DOCUMENT_PATH = "/api/v1/openapi.json"
PAGE_PATH = "/docs"


class ReferenceDoor:
    """Errors have the format of the API that is described."""

    def __init__(self, described: Json, *, refusal: Callable[[Exception], Response]) -> None:
        """``described`` is the OpenAPI document."""
        self._document = Response(200, msgspec.json.encode(described), (JSON, _UNKEPT), GUARDS)
        self._page = Response(200, page(described).encode(), (_HTML, _UNKEPT), guards(CSP))
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {DOCUMENT_PATH: {"GET": self.document}, PAGE_PATH: {"GET": self.page}}

    async def document(self, request: Request) -> Response:
        return self._document

    async def page(self, request: Request) -> Response:
        return self._page


# --- HTML ----------------------------------------------------------------------------------------------------------


class _Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def _el(tag: str, *inner: str, **attributes: str) -> _Html:
    """An element. What is in it is escaped unless it is HTML."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    return _Html(f"<{tag}{named}>{_join(inner)}</{tag}>")


def _join(parts: Iterable[str], between: str = "") -> _Html:
    return _Html(between.join(part if isinstance(part, _Html) else html.escape(part) for part in parts))


def _link(to: str, text: str) -> _Html:
    return _el("a", text, href=to)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> _Html:
    head = _el("thead", _el("tr", *(_el("th", text, scope="col") for text in heads)))
    body = _el("tbody", *(_el("tr", *(_el("td", cell) for cell in row)) for row in rows))
    return _el("div", _el("table", head, body), class_="wide")


# --- the page ------------------------------------------------------------------------------------------------------


def page(described: Json) -> str:
    """The document as a page."""
    info = described["info"]
    groups = [(tag, _operations(described, tag["name"])) for tag in described["tags"]]
    schemas = described["components"]["schemas"]
    head = _join(
        [
            _Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            _el("title", f"{info['title']} API {info['version']}"),
            _el("style", _Html(_STYLE)),
        ]
    )
    intro = _el(
        "header",
        _el("h1", f"{info['title']} API ", _el("small", info["version"])),
        *(_el("p", paragraph) for paragraph in info["description"].split("\n\n")),
        _el("p", "The same as an OpenAPI 3.1 document: ", _link(DOCUMENT_PATH, DOCUMENT_PATH)),
        _el("p", "To run the examples, set these first:"),
        _el("pre", _el("code", "export DUETIME=http://localhost:3000\nexport API_KEY=…")),
    )
    main = _el(
        "main",
        intro,
        *(_group(tag, operations, described) for tag, operations in groups),
        _el("section", _el("h2", "schemas"), *(_schema(name, schema) for name, schema in schemas.items())),
    )
    body = _el("body", _nav(groups, schemas), main)
    return "<!doctype html>" + _el("html", _el("head", head), body, lang="en")


def _operations(described: Json, tag: str) -> list[tuple[str, str, Json]]:
    return [
        (method.upper(), path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if tag in operation["tags"]
    ]


def _nav(groups: Sequence[tuple[Json, list[tuple[str, str, Json]]]], schemas: Json) -> _Html:
    def listed(title: str, links: Iterable[_Html]) -> _Html:
        return _join([_el("h2", title), _el("ul", *(_el("li", link) for link in links))])

    def link(method: str, path: str, operation: Json) -> _Html:
        return _el("a", _method(method), " ", path.removeprefix("/api/v1"), href=f"#{operation['operationId']}")

    return _el(
        "nav",
        *(listed(tag["name"], (link(*operation) for operation in operations)) for tag, operations in groups),
        listed("schemas", (_link(f"#schema-{name}", name) for name in schemas)),
        aria_label="contents",
    )


def _method(method: str) -> _Html:
    return _el("span", method, class_=f"method {method.lower()}")


def _group(tag: Json, operations: list[tuple[str, str, Json]], described: Json) -> _Html:
    return _el(
        "section",
        _el("h2", tag["name"]),
        _el("p", tag["description"]),
        *(_operation(method, path, operation, described) for method, path, operation in operations),
    )


def _operation(method: str, path: str, operation: Json, described: Json) -> _Html:
    parts = [
        _el("h3", _method(method), " ", _el("code", path)),
        _el("p", operation["summary"], ". ", _prose(operation["description"])),
        _el("pre", _el("code", example(method, path, operation, described))),
    ]
    if parameters := operation.get("parameters"):
        rows = [
            (_el("code", given["name"]), given["in"], _type(given["schema"]), _notes(given["schema"] | _said(given)))
            for given in parameters
        ]
        parts.append(_table(("parameter", "in", "type", ""), rows))
    if body := operation.get("requestBody"):
        parts.append(_el("p", "Request body: ", _type(_content(body))))
    answers = [(status, _resolved(answer, described)) for status, answer in operation["responses"].items()]
    told = [
        (_el("code", status), _with(answer.get("content", {})), answer["description"]) for status, answer in answers
    ]
    parts.append(_table(("response", "with", ""), told))
    _, first = answers[0]
    for media_type, body in first.get("content", {}).items():
        text = body["example"] if isinstance(body["example"], str) else json.dumps(body["example"], indent=2)
        parts.append(_el("details", _el("summary", "Example response: ", media_type), _el("pre", _el("code", text))))
    return _el("article", *parts, id=operation["operationId"])


def _said(given: Json) -> Json:
    return {"description": given["description"]} if "description" in given else {}


def _with(content: Json) -> _Html:
    """The content of a response: a type for JSON, or its media types."""
    if "application/json" in content:
        return _type(content["application/json"]["schema"])
    return _join(content, " or ")


def _content(body: Json) -> Json:
    schema: Json = body["content"]["application/json"]["schema"]
    return schema


def _resolved(part: Json, described: Json) -> Json:
    """The component that the part refers to, or the part itself."""
    if "$ref" in part:
        _, _, kind, name = part["$ref"].split("/")
        found: Json = described["components"][kind][name]
        return found
    return part


def example(method: str, path: str, operation: Json, described: Json) -> str:
    """A shell command that does the operation."""
    for given in operation.get("parameters", ()):
        if given["in"] == "path":
            path = path.replace(f"{{{given['name']}}}", quote(given["schema"]["examples"][0], safe=""))
    lines = [f'curl -X {method} "$DUETIME{path}"']
    if operation.get("security") != []:
        lines.append('-H "X-API-Key: $API_KEY"')
    if body := operation.get("requestBody"):
        lines.append("-H 'Content-Type: application/json'")
        text = json.dumps(_resolved(_content(body), described)["examples"][0], ensure_ascii=False)
        lines.append(f"-d {shlex.quote(text)}")
    return " \\\n  ".join(lines)


def _schema(name: str, schema: Json) -> _Html:
    parts = [_el("h3", name)]
    if "description" in schema:
        parts.append(_el("p", _prose(schema["description"])))
    if "properties" in schema:
        required = schema.get("required", ())
        rows = [
            (_el("code", field), "required" if field in required else "", _type(one), _notes(one))
            for field, one in schema["properties"].items()
        ]
        parts.append(_table(("field", "", "type", ""), rows))
    else:
        parts.append(_el("p", _type(schema)))
    return _el("article", *parts, id=f"schema-{name}")


def _type(schema: Json) -> _Html:
    """A schema's type in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _link(f"#schema-{name}", name)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _join((_type(option) for option in options), " or ")
    if "enum" in schema:
        return _join((_el("code", json.dumps(value)) for value in schema["enum"]), " or ")
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        return _join((_type(schema | {"type": one}) for one in kind), " or ")
    if kind == "array":
        return _join(["list of ", _type(schema.get("items", {}))])
    if kind == "object" and "additionalProperties" in schema:
        return _join(["object of ", _type(schema["additionalProperties"])])
    return _join([kind])


_BOUNDS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " entries"),
)


def _bounds(schema: Json) -> Iterable[str]:
    """The range of a value or of its length, in words."""
    for least, most, unit in _BOUNDS:
        low, high = schema.get(least), schema.get(most)
        if low is not None and high is not None and low != high:
            yield f"{low} to {high}{unit}"
        elif low is not None and high is None:
            yield f"at least {low}{unit}"
        elif high is not None and low is None:
            yield f"at most {high}{unit}"


def _prose(text: str) -> _Html:
    """Text in which backquotes mark code."""
    return _join(_el("code", part) if odd % 2 else part for odd, part in enumerate(text.split("`")))


def _notes(schema: Json) -> _Html:
    """The other details of a field: its description, bounds, default and an example."""
    whole = schema | next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), {})
    notes: list[_Html] = []
    if "description" in whole:
        notes.append(_prose(whole["description"]))
    notes += [_join([bounds]) for bounds in _bounds(whole)]
    if "pattern" in whole:
        notes.append(_join(["matches ", _el("code", whole["pattern"])]))
    if whole.get("default") is not None:
        notes.append(_join(["default ", _el("code", json.dumps(whole["default"]))]))
    if whole.get("examples", [None])[0] is not None:
        notes.append(_join(["for example ", _el("code", json.dumps(whole["examples"][0], ensure_ascii=False))]))
    return _join(_el("div", note) for note in notes)


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --quiet: #5a6370; --paper: #ffffff; --panel: #f4f6f8;
  --line: #d9dee4; --link: #0b5cad; --get: #0b6bb8; --post: #1d7a3f; --put: #8a5a00; --delete: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --quiet: #9aa5b1; --paper: #14171a; --panel: #1d2125;
  --line: #343a41; --link: #7bb8f5; --get: #74b6f2; --post: #6fcf8e; --put: #e0b45c; --delete: #f28b82; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body { margin: 0; display: grid; grid-template-columns: 19rem minmax(0, 1fr); color: var(--ink);
  background: var(--paper); font: 1rem/1.55 system-ui, sans-serif; }
nav { position: sticky; top: 0; height: 100vh; overflow-y: auto; padding: 1rem; background: var(--panel);
  border-right: 1px solid var(--line); font-size: .82rem; }
nav h2 { margin: 1rem 0 .3rem; font-size: .8rem; color: var(--quiet); text-transform: capitalize; }
nav ul { margin: 0; padding: 0; list-style: none; }
nav a { display: block; padding: .12rem 0; color: inherit; text-decoration: none; overflow-wrap: anywhere; }
nav a:hover { text-decoration: underline; }
nav .method { min-width: 3.6rem; }
main { padding: 1.5rem clamp(1rem, 4vw, 3rem) 4rem; max-width: 68rem; }
h1 small { color: var(--quiet); font-weight: normal; }
section > h2 { margin-top: 3rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line);
  text-transform: capitalize; }
article { margin: 2.2rem 0; }
article:target > h3 { outline: 2px solid var(--link); outline-offset: .3rem; }
h3 { overflow-wrap: anywhere; }
a { color: var(--link); }
code, pre, .method { font-family: ui-monospace, monospace; font-size: .88em; }
pre { padding: .8rem 1rem; overflow-x: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: .4rem; }
pre code { font-size: .85rem; }
td code { overflow-wrap: anywhere; }
td:first-child code { overflow-wrap: normal; }
.method { display: inline-block; font-weight: 700; }
.get { color: var(--get); } .post { color: var(--post); } .delete { color: var(--delete); }
.put, .patch { color: var(--put); }
.wide { overflow-x: auto; }
table { width: 100%; margin: .8rem 0; border-collapse: collapse; font-size: .88rem; }
th { color: var(--quiet); font-weight: 600; }
th, td { padding: .4rem .8rem .4rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
@media (max-width: 52rem) { body { display: block; }
  nav { position: static; height: auto; border-right: 0; border-bottom: 1px solid var(--line); } }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

CSP = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_UNKEPT = (b"cache-control", b"no-cache")
_HTML = (b"content-type", b"text/html; charset=utf-8")
