"""Profiles: the server, key and namespace that a command uses, and errors in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.ports import free_port
from tests.servers import KEY

URL = "http://127.0.0.1:9/never"


@pytest.fixture
def url(shell: Shell) -> str:
    """The address of the server; the shell's environment has neither it nor the key, only profiles have."""
    shell.env["XDG_CONFIG_HOME"] = str(shell.directory)
    del shell.env["API_KEY"]
    return shell.env.pop("TIMER_URL")


def write(shell: Shell, text: str, mode: int = 0o600) -> Path:
    path = shell.directory / "duetime" / "config.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_server_key_and_namespace_come_from_the_profile(shell: Shell, url: str) -> None:
    name = shell.directory.name.replace("_", "-")
    path = write(shell, f'[prod]\nserver = "{url}"\nkey_file = "prod.key"\nnamespace = "{name}"\n')
    (path.parent / "prod.key").write_text(f"{KEY}\n")
    (path.parent / "prod.key").chmod(0o600)
    shell.good("--profile", "prod", "namespaces", "create", name)
    assert shell.good("create", "--profile", "prod", "--in", "1h", "--url", URL, "--id", "a").startswith(f"{name}/a ")
    shell.env["DUETIME_PROFILE"] = "prod"
    assert f"{name}/a" in shell.good("get", "a")
    assert shell.good("count") == "1\n"
    shell.good("create", "--in", "1h", "--url", URL, "--namespace", "default", "--correlation-id", name)
    assert shell.good("count", "--correlation-id", name) == "0\n"
    assert shell.good("count", "--correlation-id", name, "--namespace", "*") == "1\n"
    assert "give timer ids or filters" in shell.bad(2, "cancel", "--yes")  # the profile's namespace is no filter
    assert shell.good("cancel", "--namespace", name, "--yes") == "1 timer canceled\n"
    assert shell.run("doctor").stdout.count("FAIL") == 0


def test_flags_override_the_environment_and_the_environment_overrides_profiles(shell: Shell, url: str) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    write(shell, f'[good]\nserver = "{url}"\nkey = "{KEY}"\n[bad]\nserver = "{nowhere}"\nkey = "{"x" * 40}"\n')
    listed = ("namespaces", "list")
    shell.good("--profile", "good", *listed)
    shell.good("--profile", "good", *listed, DUETIME_PROFILE="bad")
    shell.good("--profile", "good", *listed, TIMER_URL=nowhere, API_KEY="y" * 40)  # a typed profile is a flag
    assert nowhere in shell.bad(1, *listed, DUETIME_PROFILE="good", TIMER_URL=nowhere)
    assert "rejected the API key" in shell.bad(1, *listed, DUETIME_PROFILE="good", API_KEY="y" * 40)
    shell.good(*listed, DUETIME_PROFILE="bad", TIMER_URL=url, API_KEY=KEY)
    shell.good("--server", url, "--key", KEY, *listed, DUETIME_PROFILE="bad")
    # The key of a profile is sent to the server of the profile only.
    write(shell, f'[other]\nserver = "{nowhere}"\nkey = "{KEY}"\n')
    assert "rejected the API key" in shell.bad(1, "--profile", "other", "--server", url, *listed)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[dev]\nserver = "http://x"\n[stage]\n', "there is no profile 'prod' in {path}: it has dev, stage"),
        ("", "there is no profile 'prod' in {path}: the file has no profiles"),
        ("[prod", "{path} is not valid TOML"),
        ('server = "http://x"', "{path}: server is outside a profile: put it in a table like [prod]"),
        ('[prod]\nurl = "http://x"', "profile prod: unknown setting 'url'; the settings are server, key, key_file"),
        ("[prod]\nserver = 1", "profile prod: server must be a non-empty string"),
        ('[prod]\nkey = "x"\nkey_file = "y"', "profile prod: give key or key_file, not both"),
        ('[prod]\nkey_file = "none"', "can't read the key_file "),
    ],
)
def test_error_explains_what_is_wrong_with_the_profile(shell: Shell, url: str, text: str, says: str) -> None:
    path = write(shell, text)
    assert says.format(path=path) in shell.bad(2, "--profile", "prod", "list")


def test_key_readable_by_others_causes_one_warning(shell: Shell, url: str) -> None:
    path = write(shell, f'[prod]\nserver = "{url}"\nkey = "{KEY}"\n', mode=0o644)
    ran = shell.run("--profile", "prod", "namespaces")
    assert ran.returncode == 0 and ran.stderr.count("\n") == 1 and f"chmod 600 {path}" in ran.stderr
    path.chmod(0o600)
    assert not shell.run("--profile", "prod", "namespaces").stderr


def test_profiles_are_listed_without_keys(shell: Shell, url: str) -> None:
    assert "no profiles" in shell.run("profiles").stderr
    write(shell, f'[prod]\nserver = "{url}"\nkey = "{KEY}"\nnamespace = "shop"\n[local]\n')
    text = shell.good("--profile", "prod", "profiles")
    assert [line.split() for line in text.splitlines()] == [
        ["PROFILE", "SERVER", "NAMESPACE", "KEY"],
        ["prod", "active", url, "shop", "set"],
        ["local", "default", "none"],
    ]
    assert KEY not in text
    assert shell.json("profiles")["profiles"][0] == {
        "name": "prod",
        "server": url,
        "namespace": "shop",
        "key": True,
        "active": False,
    }
