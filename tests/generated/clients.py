"""The generators, how their clients are built, and the program of each that makes the round trip.

``package.json``, ``go.mod`` and the lock file of developers pin the generators. ``DUETIME_URL`` and ``API_KEY`` tell a
program where the service is; it exits with 0 if every answer was as expected.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from tests.generated.later import later
from tests.servers import KEY, Duetime

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
NODE_MODULES = HERE / "node_modules"
SECONDS_MAX = 900
Command = Sequence[str | Path]


class Missing(Exception):
    """The machine lacks something that a client is generated or built with."""


class Failed(AssertionError):
    """A command failed; the message has its output."""


class Client(NamedTuple):
    name: str
    """Also that of the folder of its program."""
    generator: str
    version: Callable[[], str]
    needs: Sequence[str]
    """Programs that must be on the path."""
    build: Callable[[Path], Command]
    """Generates and builds the client of ``openapi.json`` in a folder that holds its program; the command to run it."""

    def make(self, folder: Path, document: dict[str, Any]) -> Command:
        for program in self.needs:
            if shutil.which(program) is None:
                raise Missing(f"{program} is not installed")
        shutil.copytree(PROGRAMS / self.name, folder)
        (folder / "openapi.json").write_text(json.dumps(document))
        return self.build(folder)


def check_round_trip(client: Client, folder: Path) -> None:
    """Build the client and let it make its round trip to this version of the service and to a later one."""
    with Duetime(folder / "service") as service:
        command = client.make(folder / "client", service.request("GET", "/api/v1/openapi.json").body)
        run(command, folder / "client", service.port)
        found = service.request("GET", "/api/v1/timers").body["timers"]
        assert sorted((timer["callbackUrl"], timer["status"], timer["executeAt"][:4] == "2099") for timer in found) == [
            ("http://127.0.0.1:9/hook", "canceled", True),
            ("http://127.0.0.1:9/hook", "pending", False),
            ("http://127.0.0.1:9/platform", "pending", True),
        ]
    with Duetime(folder / "later") as service, later(service) as port:
        run(command, folder / "client", port)


def run(command: Command, folder: Path, port: int = 0) -> str:
    told = {"DUETIME_URL": f"http://127.0.0.1:{port}", "API_KEY": KEY, "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | told, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    if ran.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout


def _openapi_generator(folder: Path, kind: str, *options: str) -> None:
    found = util.find_spec("openapi_generator_cli")
    if found is None or found.origin is None:
        raise Missing("openapi-generator-cli is not installed")
    jar = Path(found.origin).with_name("openapi-generator.jar")
    run(["java", "-jar", jar, "generate", "-i", "openapi.json", "-g", kind, "-o", "client", *options], folder)


def _node(folder: Path, *command: str) -> None:
    """Run a program of the pinned packages, which the folder uses, too."""
    if not (folder / "node_modules").exists():
        if not NODE_MODULES.exists():
            raise Missing(f"run `npm ci` in {HERE}")
        (folder / "node_modules").symlink_to(NODE_MODULES)
        (folder / "package.json").write_text('{"type": "module"}')
    run([folder / "node_modules/.bin" / command[0], *command[1:]], folder)


_TSC = (
    "tsc",
    "--strict",
    "--skipLibCheck",
    "--target",
    "es2022",
    "--module",
    "nodenext",
    "--outDir",
    "built",
    "roundtrip.ts",
)


def _python(folder: Path) -> Command:
    _openapi_generator(folder, "python")
    shutil.move(folder / "client/openapi_client", folder)
    return [sys.executable, "roundtrip.py"]


# Without this, clients in Go and Java refuse the answers of a later version that have more fields.
_TAKE_MORE = "--additional-properties=disallowAdditionalPropertiesIfNotPresent=false"
# Without this, requests in Java contain empty headers, which replace those of the timer.
_SEND_LESS = "--additional-properties=containerDefaultToNull=true"


def _go(folder: Path) -> Command:
    _openapi_generator(folder, "go", _TAKE_MORE)
    run(["go", "mod", "init", "example.com/roundtrip"], folder)
    run(["go", "mod", "edit", "-module", "example.com/client"], folder / "client")
    run(
        ["go", "mod", "edit", "-require", "example.com/client@v0.0.0", "-replace", "example.com/client=./client"],
        folder,
    )
    run(["go", "mod", "tidy"], folder)
    run(["go", "build", "-o", "roundtrip", "."], folder)
    return ["./roundtrip"]


def _java(folder: Path) -> Command:
    _openapi_generator(folder, "java", _TAKE_MORE, _SEND_LESS)
    run(["mvn", "-q", "-B", "-DskipTests", "-Dmaven.javadoc.skip", "package"], folder / "client")
    return ["java", "-cp", "client/target/classes:client/target/lib/*", "RoundTrip.java"]


def _typescript_fetch(folder: Path) -> Command:
    _openapi_generator(folder, "typescript-fetch", "--additional-properties", "importFileExtension=.js")
    _node(folder, *_TSC)
    return ["node", "built/roundtrip.js"]


def _rust(folder: Path) -> Command:
    _openapi_generator(folder, "rust")
    run(["cargo", "build", "--quiet"], folder)
    return ["target/debug/roundtrip"]


def _oapi_codegen(folder: Path) -> Command:
    code = run(
        ["go", "tool", "oapi-codegen", "-generate", "types,client", "-package", "client", "openapi.json"], folder
    )
    (folder / "client").mkdir()
    (folder / "client/client.go").write_text(code)
    run(["go", "build", "-o", "roundtrip", "."], folder)
    return ["./roundtrip"]


def _openapi_typescript(folder: Path) -> Command:
    _node(folder, "openapi-typescript", "openapi.json", "-o", "api.ts")
    _node(folder, *_TSC)
    return ["node", "built/roundtrip.js"]


def _pinned(file: Path, pattern: str) -> str:
    found = re.search(pattern, file.read_text())
    assert found is not None, (file, pattern)
    return found[1]


def _jar() -> str:
    return _pinned(HERE.parents[1] / "requirements-dev.lock", r"openapi-generator-cli==(\S+)")


def _npm() -> str:
    return _pinned(HERE / "package.json", r'"openapi-typescript": "(.+)"')


def _module() -> str:
    return _pinned(PROGRAMS / "oapi-codegen/go.mod", r"oapi-codegen/v2 v(\S+)")


_GENERATOR = "openapi-generator"

QUICK = [
    Client("openapi-typescript", "openapi-typescript", _npm, ["node"], _openapi_typescript),
    Client("python", _GENERATOR, _jar, ["java"], _python),
    Client("typescript-fetch", _GENERATOR, _jar, ["java", "node"], _typescript_fetch),
]
"""Those that `make test` builds: their tools are small."""

CLIENTS = [
    *QUICK,
    Client("go", _GENERATOR, _jar, ["java", "go"], _go),
    Client("java", _GENERATOR, _jar, ["java", "mvn"], _java),
    Client("rust", _GENERATOR, _jar, ["java", "cargo"], _rust),
    Client("oapi-codegen", "oapi-codegen", _module, ["go"], _oapi_codegen),
]
