"""The server and the client are two distributions that share the import package ``duetime``. These tests build both,
without a network, and install the client alone and with the server."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from duetime.client.version import __version__ as client_version
from duetime.version import __version__ as server_version

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sysconfig.get_path("purelib"))
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
USE = "from duetime.client import Client; Client('http://localhost:3000', 'k').close()"


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(project: Path, directory: Path) -> zipfile.ZipFile:
    """Build the project's wheel from a copy, because a build leaves files behind."""
    hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
    copy = directory / "project"
    shutil.copytree(project / "src", copy / "src", ignore=hidden)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(project / name, copy)
    run("-c", BUILD, str(directory), cwd=copy)
    [wheel] = directory.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(ROOT, tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(ROOT / "sdks/python", tmp_path_factory.mktemp("client"))


def files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def metadata(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    message = Parser().parsestr(wheel.read(name).decode())
    return {
        header: message.get_all(header, []) for header in ("Name", "Version", "Requires-Dist", "License-Expression")
    }


def test_wheels_contain_their_own_files_only(server: zipfile.ZipFile, client: zipfile.ZipFile) -> None:
    def sources(*folders: str) -> set[str]:
        return {
            path.relative_to(ROOT / folder).as_posix()
            for folder in folders
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc" and ".egg-info" not in str(path)
        }

    assert files(client) == sources("sdks/python/src") and files(server) == sources("src")
    assert not files(client) & files(server)
    assert all(name.startswith("duetime/client/") for name in files(client))
    assert "duetime/client/py.typed" in files(client) and "duetime/py.typed" in files(server)
    assert "duetime/__init__.py" not in files(server)  # it would hide the other distribution


def test_wheels_have_the_right_metadata(server: zipfile.ZipFile, client: zipfile.ZipFile) -> None:
    of_client = {"Name": ["duetime-client"], "Version": [client_version], "Requires-Dist": ["msgspec>=0.19"]}
    assert metadata(client) == {**of_client, "License-Expression": ["Apache-2.0"]}
    of_server = metadata(server)
    assert of_server["Name"] == ["duetime"] and of_server["Version"] == [server_version]
    assert "duetime-client>=0.1" in of_server["Requires-Dist"]


def installed(wheels: list[zipfile.ZipFile], directory: Path, *, libraries: list[Path]) -> list[str]:
    """The start of a program that can import only the standard library, these wheels and these libraries."""
    for wheel in wheels:
        wheel.extractall(directory)
    for library in libraries:
        (directory / library.name).symlink_to(library)
    start = f"import sys; sys.path.append({str(directory)!r})"
    return ["-W", "error", "-I", "-S", "-c", start]


def test_client_needs_only_msgspec(client: zipfile.ZipFile, tmp_path: Path) -> None:
    *options, start = installed([client], tmp_path, libraries=[INSTALLED / "msgspec"])
    assert run(*options, f"{start}; {USE}; import duetime.client as it; print(it.__file__)", cwd=tmp_path).startswith(
        str(tmp_path)
    )
    missing = "import importlib.util; print(importlib.util.find_spec('duetime.model'))"
    assert run(*options, f"{start}; {missing}", cwd=tmp_path) == "None\n"


def test_server_and_client_can_be_installed_together(
    server: zipfile.ZipFile, client: zipfile.ZipFile, tmp_path: Path
) -> None:
    *options, start = installed([server, client], tmp_path, libraries=[])
    start += f"; sys.path.append({str(INSTALLED)!r})"  # with the drivers, but without the sources of this checkout
    program = f"{start}; {USE}; import duetime.cli; sys.argv = ['duetime', '--version']; duetime.cli.main()"
    assert run(*options, program, cwd=tmp_path) == f"duetime {server_version}\n"
    places = "import duetime.cli, duetime.client; print(duetime.cli.__file__, duetime.client.__file__)"
    assert run(*options, f"{start}; {places}", cwd=tmp_path).count(str(tmp_path)) == 2
