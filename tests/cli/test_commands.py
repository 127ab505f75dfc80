"""Every command against a real service: what people read, what machines read, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duetime.cli import main
from duetime.client import Client
from duetime.commands import output
from tests.cli.conftest import COMMAND, Shell
from tests.servers import KEY, Duetime, Receiver, Reply, until, unused_port

URL = "http://127.0.0.1:9/never"


def fresh() -> str:
    return uuid.uuid4().hex


def test_a_timer_from_create_to_cancel(shell: Shell) -> None:
    id = fresh()
    line = shell.good("create", "--in", "10m", "--url", URL, "--id", id, "--payload", '{"a": 1}')
    assert re.fullmatch(rf"default/{id}  pending  due in (10m|9m \d+s) \(20[\d:.TZ-]+\)\n", line), line
    shown = shell.good("get", id)
    assert re.search(r"^target +POST http://127.0.0.1:9/never$", shown, re.MULTILINE), shown
    assert re.search(r'^payload +\{"a":1\}$', shown, re.MULTILINE), shown
    assert re.search("due in (1h|59m)", shell.good("update", id, "--in", "1h", "--payload", "null"))
    timer = shell.json("get", f"default/{id}")
    assert timer["payload"] is None and timer["status"] == "pending"
    assert shell.good("cancel", id) == f"default/{id}  removed\n"
    assert "there is no timer" in shell.bad(1, "get", id)
    assert "there is no timer" in shell.bad(1, "cancel", id)
    assert "there is no timer" in shell.bad(1, "update", id, "--in", "1s")
    assert "there is no timer" in shell.bad(1, "attempts", id)
    assert "there is no timer" in shell.bad(1, "replay", id)


def test_every_option_of_create(shell: Shell) -> None:
    namespace, id = fresh(), fresh()
    shell.good("namespaces", "create", namespace)
    at = (datetime.now(UTC) + timedelta(days=400)).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    arguments = ["create", "--at", at, "--url", URL, "--id", id, "--namespace", namespace, "--method", "PATCH"]
    arguments += ["--header", "X-A: b:c", "--header", "X-D:e", "--metadata", "[1]", "--correlation-id", "c 1"]
    arguments += ["--retries", "0", "--timeout", "5s", "--protocol", "status", "--payload", "12345678901234567890.10"]
    timer = shell.json(*arguments)
    assert timer["executeAt"] == at and timer["callbackMethod"] == "PATCH"
    assert timer["callbackHeaders"] == {"X-A": "b:c", "X-D": "e"}
    assert (timer["metadata"], timer["correlationId"], timer["retryPolicy"]["maxRetries"]) == ([1], "c 1", 0)
    assert (timer["callbackTimeout"], timer["responseProtocol"]) == ("5s", "status")
    assert shell.json(*arguments)["id"] == id  # the same again
    changed = [*arguments, "--payload", "2"]
    assert "other parameters" in shell.bad(1, *changed) and "--replace" in shell.bad(1, *changed)
    assert shell.json(*changed, "--replace")["payload"] == 2
    shown = shell.good("get", f"{namespace}/{id}")
    assert "X-A: b:c" in shown and "any 2xx" in shown and re.search(r"retries +none", shown)


def test_payloads_from_a_file_and_from_another_command(shell: Shell) -> None:
    (shell.directory / "order.json").write_text('{"from": "file"}\n')
    create = ["create", "--in", "1h", "--url", URL, "--payload"]
    assert shell.json(*create, "@order.json")["payload"] == {"from": "file"}
    assert shell.json(*create, "-", stdin='"stdin"')["payload"] == "stdin"
    assert "can't read none.json" in shell.bad(2, *create, "@none.json")
    assert "is not JSON" in shell.bad(2, *create, "-", stdin="{")


def test_lists(shell: Shell) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    with Client(shell.env["TIMER_URL"], KEY) as client:
        for n in range(5):
            client.create(delay=timedelta(hours=n + 1), callback_url=URL, id=f"t{n}", namespace=namespace)
    lines = shell.good("list", "--namespace", namespace, "--status", "pending").splitlines()
    assert lines[0].split()[:4] == ["TIMER", "STATUS", "WHEN", "DUE"]
    assert [line.split()[0] for line in lines[1:]] == [f"{namespace}/t{n}" for n in range(5)]
    assert len({line.index("pending") for line in lines[1:]}) == 1  # aligned
    page = shell.run("list", "--namespace", namespace, "--limit", "2")
    assert len(page.stdout.splitlines()) == 3 and "--all" in page.stderr
    cut = shell.json("list", "--namespace", namespace, "--limit", "2")
    assert len(cut["timers"]) == 2 and cut["nextCursor"]
    whole = shell.json("list", "--namespace", namespace, "--all")
    assert len(whole["timers"]) == 5 and whole["nextCursor"] is None
    soon = (datetime.now(UTC) + timedelta(hours=2.5)).isoformat()
    assert [t["id"] for t in shell.json("list", "--namespace", namespace, "--before", soon)["timers"]] == ["t0", "t1"]
    late = shell.json("list", "--namespace", namespace, "--after", soon, "--status", "pending")
    assert [t["id"] for t in late["timers"]] == ["t2", "t3", "t4"]
    assert shell.run("list", "--correlation-id", fresh()).stderr == "no timers\n"
    assert "executeAfter" in shell.bad(1, "list", "--after", "yesterday")


def test_short_pages_are_gone_on_from(shell: Shell) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    with Client(shell.env["TIMER_URL"], KEY) as client:
        new = [{"delay": f"{n + 1}h", "callback_url": URL, "id": f"t{n}", "namespace": namespace} for n in range(20)]
        client.batch([one | {"payload": "x" * 250_000} for one in new])
    for options, number in ((["--limit", "19"], 19), (["--all"], 20)):
        listed = shell.json("list", "--namespace", namespace, "--status", "pending", *options)
        assert [t["id"] for t in listed["timers"]] == [f"t{n}" for n in range(number)]


def test_attempts_and_replays(shell: Shell, receiver: Receiver) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    url = receiver.reply(f"/{namespace}", Reply(status=500, body=b"no\x1b[2J\nway"))
    create = ["create", "--in", "0s", "--url", url, "--namespace", namespace, "--retries", "0", "--id"]
    for id in ("a", "b"):
        shell.good(*create, id)
    failed = ["list", "--namespace", namespace, "--status", "failed"]
    until("both failed", lambda: len(shell.json(*failed)["timers"]) == 2)
    assert shell.run("watch", f"{namespace}/a").returncode == 1
    table = shell.good("attempts", f"{namespace}/a")
    assert re.search(r"^1 .* answered +500 ", table, re.MULTILINE), table
    [attempt] = shell.json("attempts", f"{namespace}/a")["attempts"]
    assert attempt["status"] == 500 and attempt["answer"] == "no\x1b[2J\nway"
    assert "pending  due" in shell.good("replay", f"{namespace}/a")
    receiver.wait(f"/{namespace}", 3)
    until("it failed again", lambda: len(shell.json(*failed)["timers"]) == 2)
    assert "--yes" in shell.bad(2, "replay", "--status", "failed", "--namespace", namespace)
    assert shell.good("replay", "--status", "failed", "--namespace", namespace, "--yes") == "2 timers replayed\n"
    receiver.wait(f"/{namespace}", 5)
    assert shell.json("replay", "--status", "completed", "--namespace", namespace, "--yes") == {"replayed": 0}
    id = fresh()
    shell.good("create", "--in", "1h", "--url", URL, "--id", id)
    assert "no attempts yet" in shell.run("attempts", id).stderr
    assert "cannot replay" in shell.bad(1, "replay", id)


def test_namespaces(shell: Shell) -> None:
    name = fresh()
    assert re.search(r"retention +9d", shell.good("namespaces", "create", name, "--retention", "9d", "--shards", "4"))
    assert re.search(rf"^{name} +active +4 +9d +1 +0 ", shell.good("namespaces"), re.MULTILINE)
    assert shell.good("namespaces", "list").splitlines()[0].startswith("NAMESPACE")
    assert "paused: nothing of it fires" in shell.good("namespaces", "pause", name)
    assert shell.json("namespaces", "show", name)["paused"] is True
    assert shell.json("namespaces", "resume", name)["paused"] is False
    made = shell.json("namespaces", "secret", "add", name)
    assert made["secret"].startswith("whsec_")
    assert "whsec_" in shell.good("namespaces", "secret", "add", name)
    shown = shell.good("namespaces", "show", name)
    assert re.search(rf"{made['id']}, ends in (1d|24h|23h)", shown), shown
    assert "deleted" in shell.good("namespaces", "secret", "delete", name, made["id"])
    assert {each["name"] for each in shell.json("namespaces")["namespaces"]} >= {"default", name}
    assert "namespaces create" in shell.bad(1, "namespaces", "show", fresh())
    assert "namespaces create" in shell.bad(1, "create", "--in", "1s", "--url", URL, "--namespace", fresh())
    assert shell.bad(1, "namespaces", "create", name, "--shards", "5")


def test_namespace_settings_are_updated(shell: Shell) -> None:
    name = fresh()
    assert re.search(r"^weight +5$", shell.good("namespaces", "create", name, "--weight", "5"), re.MULTILINE)
    assert shell.json("namespaces", "create", name, "--weight", "5")["weight"] == 5
    assert "exists with other settings" in shell.bad(1, "namespaces", "create", name, "--weight", "6")
    assert re.search(r"^weight +100$", shell.good("namespaces", "update", name, "--weight", "100"), re.MULTILINE)
    updated = shell.json("namespaces", "update", name, "--retention", "9d")
    assert (updated["retention"], updated["weight"]) == ("9d", 100)
    assert shell.json("namespaces", "show", name) == updated
    assert re.search(rf"^{name} +active +\d+ +9d +100 +0 ", shell.good("namespaces"), re.MULTILINE)
    assert "weight" in shell.bad(1, "namespaces", "update", name, "--weight", "101")
    assert "namespaces create" in shell.bad(1, "namespaces", "update", fresh(), "--weight", "2")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: command (usage: duetime --help)"),
        (["fly"], "invalid choice: 'fly'"),
        (["create", "--url", URL], "--in --at is required"),
        (["create", "--in", "1s"], "required: --url (usage: duetime create --help)"),
        (["create", "--in", "1s", "--at", "x", "--url", URL], "not allowed with argument --in"),
        (["create", "--in", "1s", "--url", URL, "--header", "x"], "--header: must be 'NAME: VALUE'"),
        (["create", "--in", "1s", "--url", URL, "--payload", "{a"], "--payload: is not JSON"),
        (["create", "--in", "1s", "--url", URL, "--replace"], "--replace needs the --id"),
        (["create", "--in", "1s", "--url", URL, "--retries", "-1"], "--retries: must be a whole number"),
        (["get"], "required: timer"),
        (["get", "/x"], "names no timer"),
        (["get", "x/"], "names no timer"),
        (["list", "--status", "lost"], "invalid choice: 'lost'"),
        (["list", "--limit", "0"], "--limit: must be a whole number from 1 on"),
        (["list", "--stat", "failed"], "unrecognized arguments: --stat"),
        (["update", "x"], "nothing to change"),
        (["replay"], "name a timer, or choose timers with --status"),
        (["replay", "x", "--status", "failed"], "not both"),
        (["namespaces", "secret"], "required: what"),
        (["namespaces", "create", "x", "--weight", "0"], "--weight: must be a whole number from 1 on"),
        (["namespaces", "update", "x", "--weight", "1.5"], "--weight: must be a whole number from 1 on"),
        (["namespaces", "update", "x"], "nothing to change"),
        (["serve", "--fast"], "unrecognized arguments: --fast"),
    ],
    ids=" ".join,
)
def test_what_is_not_understood(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: these are many, and nothing is sent."""
    try:
        code: object = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    assert said.err.startswith("duetime: ") and says in said.err and said.err.count("\n") == 1


def test_what_the_server_refuses_is_one_line(shell: Shell) -> None:
    assert shell.bad(1, "create", "--in", "soon", "--url", URL).startswith("delay must be a duration like")
    assert "must be in the future" in shell.bad(1, "create", "--at", "2001-01-01T00:00:00Z", "--url", URL)
    assert "the key is missing or wrong" in shell.bad(1, "list", API_KEY="x" * 40)
    assert "the key is missing or wrong" in shell.bad(1, "list", API_KEY="")
    assert "not the address of a server" in shell.bad(1, "--server", "nowhere", "list")


def test_no_server(shell: Shell) -> None:
    with unused_port() as port:
        for command in (["list"], ["watch"], ["watch", "x"]):
            line = shell.bad(1, "--url", f"http://127.0.0.1:{port}", *command)
            assert "connection refused" in line and "`duetime serve`" in line


def test_the_server_and_the_key_from_everywhere(shell: Shell, service: Duetime) -> None:
    url = shell.env.pop("TIMER_URL")
    del shell.env["API_KEY"]
    for before, after in (
        (["--url", url, "--key", KEY], []),
        (["--server", url], ["--key", KEY]),
        ([], ["--server", url, "--key", KEY]),
        ([], ["--url", url, "--key", KEY]),
        (["--json"], ["--url", url, "--key", KEY]),
    ):
        shell.good(*before, "namespaces", *after)
    (shell.directory / "duetime.key").write_text(KEY)
    shell.good("create", "--in", "1h", "--url", URL, "--server", url)
    shell.good("--url", url, "create", "--in", "1h", "--url", URL)


def helped(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_teaches(shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # it is as wide as the terminal
    top = shell.good("--help")
    commands = ("serve", "create", "get", "list", "update", "cancel", "replay", "watch", "namespaces", "attempts")
    for command in commands:
        assert re.search(rf"^    {command} ", top, re.MULTILINE)
        text = helped(capsys, command)
        assert f"usage: duetime {command}" in text
        if command != "serve":
            assert "examples:\n  duetime " in text, command
            assert max(map(len, text.splitlines())) <= 120, command
    assert "DATABASE_URL" in helped(capsys, "serve")
    assert "DELETE /api/v1/timers" in helped(capsys, "cancel")
    assert shell.good("--version").startswith("duetime ")


def test_each_command_imports_only_what_it_needs(shell: Shell) -> None:
    def loaded(*arguments: str) -> set[str]:
        script = (
            "import sys; from duetime.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "print('\\n'.join(sys.modules), file=sys.stderr)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=shell.directory,
            env=shell.env,
            capture_output=True,
            text=True,
            check=True,
        )
        return set(ran.stderr.splitlines())

    of_client = loaded("list")
    assert "duetime.client.blocking" in of_client
    for module in of_client:
        assert not module.startswith(
            ("uvloop", "httptools", "apsw", "duetime.doors", "duetime.stores", "duetime.engine")
        )
    shell.env["DUETIME_NONSENSE"] = "1"  # stops the start once everything is imported
    of_serve = loaded("serve")
    assert "uvloop" in of_serve and not any(module.startswith("duetime.client") for module in of_serve)


def test_a_reader_that_has_seen_enough(shell: Shell) -> None:
    for _ in range(3):
        shell.good("create", "--in", "1h", "--url", URL, "--payload", json.dumps("x" * 100_000))
    command = " ".join([*COMMAND, "list", "--json", "--all"])
    ran = subprocess.run(
        ["bash", "-c", f"{command} | head -c 10; exit ${{PIPESTATUS[0]}}"],
        cwd=shell.directory,
        env=shell.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 141 and not ran.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"),
        (0.4, "now"),
        (598, "in 9m 58s"),
        (599.9, "in 10m"),
        (-3, "3s ago"),
        (3600, "in 1h"),
        (3601, "in 1h"),
        (-90_061, "1d 1h ago"),
        (86_400 * 400, "in 400d"),
    ],
)
def test_relative_times(seconds: float, text: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert output.relative(now + timedelta(seconds=seconds), round(now.timestamp() * 1000)) == text


def test_what_others_wrote_can_not_move_the_cursor() -> None:
    assert output.safe("a\x1b[2J\nü\udcff") == "a\\x1b[2J\\nü\\udcff"
    assert output.short("x" * 100, 10) == "x" * 9 + "…"


def test_bytes_that_are_no_text_are_refused_politely(shell: Shell) -> None:
    ran = subprocess.run(
        [*[part.encode() for part in COMMAND], b"get", b"\xff"],
        cwd=shell.directory,
        env=shell.env,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 1 and ran.stderr.startswith(b"duetime: ") and ran.stderr.count(b"\n") == 1


def test_the_page_names_every_command(shell: Shell) -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    for command in re.findall(r"^    ([a-z]+) ", shell.good("--help"), re.MULTILINE):
        assert f"| `duetime {command}` |" in page, command
