"""The web page: serves the files in ``web/``, as they are when the server starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from duetime.doors.http import GUARDS, Handler, Request, Response, guards

FOLDER = Path(__file__).parent / "web"
PAGE = "index.html"
HELLO = "/ui/hello"
"""The URL for the first timer of a new user: a receiver that always exists and does nothing."""
PAGE_GUARDS = guards(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
HELLO_BYTES_MAX = 4096
PLAIN_TYPE = "text/plain; charset=utf-8"


class WebDoor:
    def __init__(self, *, refusal: Callable[[Exception], Response], folder: Path = FOLDER) -> None:
        self.refusal = refusal
        self._files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".")
        }

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Each file has its own route, so no path leads to any other file."""
        routes = {f"/ui/{name}": {"GET": _file(name, content)} for name, content in self._files.items()}
        routes[HELLO] = {"POST": _hello}
        if PAGE in self._files:
            routes["/"] = routes[f"/ui/{PAGE}"]
        return routes


async def _hello(request: Request) -> Response:
    await request.body(HELLO_BYTES_MAX)
    return Response(200, b'{"ok":true}')


def _file(name: str, content: bytes) -> Handler:
    kind = TYPES.get(Path(name).suffix, PLAIN_TYPE)
    etag = b'"%s"' % hashlib.sha256(content).hexdigest()[:32].encode()
    kept = (b"etag", etag), (b"cache-control", b"no-cache")
    guarded = PAGE_GUARDS if kind.startswith("text/html") else GUARDS
    whole = Response(200, content, ((b"content-type", kind.encode()), *kept), guarded)
    unchanged = Response(304, headers=kept, guards=guarded)

    async def serve(request: Request) -> Response:
        known = request.header(b"if-none-match") or b""
        return unchanged if etag in known else whole

    return serve
