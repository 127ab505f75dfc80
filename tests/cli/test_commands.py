"""Every command against a real server: text output, JSON output and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duetime.cli import _parser, main
from duetime.client import Client
from duetime.commands import output
from duetime.commands.completion import _nodes
from tests.cli.conftest import COMMAND, Shell
from tests.nats import Nats
from tests.servers import KEY, Duetime, Receiver, Reply, until, unused_port

URL = "http://127.0.0.1:9/never"


def fresh() -> str:
    return uuid.uuid4().hex


def test_timer_from_create_to_delete(shell: Shell) -> None:
    id = fresh()
    line = shell.good("create", "--in", "10m", "--url", URL, "--id", id, "--payload", '{"a": 1}')
    assert re.fullmatch(rf"default/{id}  pending  due in (10m|9m \d+s) \(20[\d:.TZ-]+\)\n", line), line
    shown = shell.good("get", id)
    assert re.search(r"^target +POST http://127.0.0.1:9/never$", shown, re.MULTILINE), shown
    assert re.search(r'^payload +\{"a":1\}$', shown, re.MULTILINE), shown
    assert re.search("due in (1h|59m)", shell.good("update", id, "--in", "1h", "--payload", "null"))
    timer = shell.json("get", f"default/{id}")
    assert timer["payload"] is None and timer["status"] == "pending"
    assert re.match(rf"default/{id}  canceled  (now|\d+s ago) ", shell.good("cancel", id))
    assert shell.json("get", id)["status"] == "canceled"
    assert shell.good("delete", id, "--yes") == f"default/{id}  deleted\n"
    for command in (["get"], ["cancel"], ["delete", "--yes"], ["update", "--in", "1s"], ["attempts"], ["replay"]):
        assert shell.bad(1, *command, id).startswith(f"timer default/{id} not found")


def test_create_of_an_existing_timer_says_so(shell: Shell) -> None:
    id = fresh()
    create = ("create", "--in", "1h", "--url", URL, "--id", id)
    assert shell.run(*create).stderr == shell.run(*create).stderr == ""
    assert "with different parameters: choose another --id" in shell.bad(1, "create", "--in", "2h", *create[3:])
    shell.good("cancel", id)
    ran = shell.run(*create)
    assert ran.returncode == 0 and ran.stdout.startswith(f"default/{id}  canceled  ")
    assert ran.stderr == (
        "duetime: this timer already exists and is canceled: nothing was changed; --replace creates it anew\n"
    )
    assert shell.run(*create, "--replace").stderr == ""
    shell.good("update", id, "--in", "3h")
    assert "already exists and is pending" in shell.run(*create).stderr


def test_error_for_one_timer_does_not_stop_the_others(shell: Shell) -> None:
    first, last = fresh(), fresh()
    for id in (first, last):
        shell.good("create", "--in", "1h", "--url", URL, "--id", id)
    ran = shell.run("cancel", first, fresh(), last)
    assert ran.returncode == 1 and ran.stderr.count("not found") == 1 and ran.stdout.count("  canceled  ") == 2
    ran = shell.run("update", first, "--in", "1s")
    assert ran.returncode == 1 and "canceled" in ran.stderr
    assert [timer["status"] for timer in shell.json_lines("replay", first, last)] == ["pending", "pending"]
    deleted = [{"deleted": {"namespace": "default", "id": id}} for id in (first, last)]
    assert shell.json_lines("delete", first, last, "--yes") == deleted


def test_bulk_cancel_continues_until_all_are_canceled(shell: Shell) -> None:
    id = fresh()
    with Client(shell.env["TIMER_URL"], KEY) as client:
        for _ in range(2):
            client.batch_ids({"delay": "1h", "callback_url": URL, "correlation_id": id} for _ in range(600))
    cancel = ("cancel", "--correlation-id", id, "--yes")
    assert shell.json(*cancel, "--before", "in 10 minutes") == {"canceled": 0}
    assert shell.good(*cancel, "--after", "in 10 minutes", "--limit", "1") == "1 timer canceled\n"
    assert shell.json(*cancel) == {"canceled": 1199}
    assert shell.good("count", "--correlation-id", id, "--status", "canceled") == "1200\n"


def test_cancel_of_everything_needs_the_namespace_star(shell: Shell) -> None:
    id = fresh()
    shell.good("create", "--in", "1h", "--url", URL, "--id", id)
    assert "--namespace '*' is all" in shell.bad(2, "cancel", "--yes")
    assert shell.json("get", id)["status"] == "pending"
    shell.good("cancel", "--namespace", "*", "--yes")
    assert shell.json("get", id)["status"] == "canceled"


def test_create_sends_every_option(shell: Shell) -> None:
    namespace, id = fresh(), fresh()
    shell.good("namespaces", "create", namespace)
    at = (datetime.now(UTC) + timedelta(days=400)).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    arguments = ["create", "--at", at, "--url", URL, "--id", id, "--namespace", namespace, "--method", "PATCH"]
    arguments += ["--header", "X-A: b:c", "--header", "X-D:e", "--metadata", "[1]", "--correlation-id", "c 1"]
    arguments += ["--retries", "0", "--timeout", "5s", "--protocol", "status", "--payload", "12345678901234567890.10"]
    arguments += ["--retry-initial-interval", "1 minute", "--retry-max-interval", "2h", "--retry-backoff", "1.5"]
    arguments += ["--give-up-on", "400, 404"]
    timer = shell.json(*arguments)
    assert timer["executeAt"] == at and timer["callbackMethod"] == "PATCH"
    assert timer["callbackHeaders"] == {"X-A": "b:c", "X-D": "e"}
    assert (timer["metadata"], timer["correlationId"]) == ([1], "c 1")
    policy = timer["retryPolicy"]
    assert (policy["maxRetries"], policy["backoffMultiplier"], policy["giveUpOn"]) == (0, 1.5, [400, 404])
    assert (policy["initialInterval"], policy["maxInterval"]) == ("1m", "2h")
    assert (timer["callbackTimeout"], timer["responseProtocol"]) == ("5s", "status")
    assert shell.json(*arguments)["id"] == id  # an identical create returns the same timer
    changed = [*arguments, "--payload", "2"]
    assert "--replace" in shell.bad(1, *changed)
    assert shell.json(*changed, "--replace")["payload"] == 2
    shown = shell.good("get", f"{namespace}/{id}")
    assert "X-A: b:c" in shown and "any 2xx" in shown and re.search(r"retries +none", shown)


def test_update_changes_the_given_parts_of_the_retry_policy(shell: Shell) -> None:
    id = fresh()
    shell.good("create", "--in", "1h", "--url", URL, "--id", id, "--retries", "7", "--give-up-on", "400")
    policy = shell.json("update", id, "--retry-initial-interval", "5s")["retryPolicy"]
    assert (policy["maxRetries"], policy["initialInterval"], policy["giveUpOn"]) == (7, "5s", [400])
    policy = shell.json("update", id, "--retry-backoff", "1", "--give-up-on", "none")["retryPolicy"]
    assert (policy["initialInterval"], policy["backoffMultiplier"], policy["giveUpOn"]) == ("5s", 1, [])
    assert "gives up on" not in shell.good("get", id)


def test_timer_can_be_sent_to_a_subject(tmp_path: Path) -> None:
    with Nats() as broker, Duetime(tmp_path, TIMER_BROKER_URL=broker.url) as service:
        shell = Shell(tmp_path, f"http://127.0.0.1:{service.port}")
        timer = shell.json("create", "--in", "1h", "--subject", "orders.due", "--header", "X-A: b")
        assert (timer["callbackSubject"], timer["callbackUrl"]) == ("orders.due", None)
        assert shell.json("update", timer["id"], "--subject", "orders.late")["callbackSubject"] == "orders.late"
        assert re.search("^target +orders.late$", shell.good("get", timer["id"]), re.MULTILINE)
        assert shell.json("update", timer["id"], "--url", URL)["callbackUrl"] == URL


def test_payload_can_come_from_a_file_or_stdin(shell: Shell) -> None:
    (shell.directory / "order.json").write_text('{"from": "file"}\n')
    create = ["create", "--in", "1h", "--url", URL, "--payload"]
    assert shell.json(*create, "@order.json")["payload"] == {"from": "file"}
    assert shell.json(*create, "-", stdin='"stdin"')["payload"] == "stdin"
    assert "can't read none.json" in shell.bad(2, *create, "@none.json")
    (shell.directory / "broken.json").write_text("{")
    assert "--payload: broken.json is not valid JSON (" in shell.bad(2, *create, "@broken.json")
    assert "--payload: stdin is not valid JSON (" in shell.bad(2, *create, "-", stdin="{")
    assert shell.json(*create, "-1.5e3")["payload"] == -1500


def test_list_filters_aligns_and_limits(shell: Shell) -> None:
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
    assert len(page.stdout.splitlines()) == 3 and page.stderr.startswith("showing 2; more available: ")
    assert len(shell.json_lines("list", "--namespace", namespace, "--limit", "2")) == 2
    assert "more available" in shell.run("list", "--namespace", namespace, "--limit", "2", "--json").stderr
    assert len(shell.json_lines("list", "--namespace", namespace, "--all")) == 5
    soon = (datetime.now(UTC) + timedelta(hours=2.5)).isoformat()
    assert [t["id"] for t in shell.json_lines("list", "--namespace", namespace, "--before", soon)] == ["t0", "t1"]
    late = shell.json_lines("list", "--namespace", namespace, "--after", soon, "--status", "pending")
    assert [t["id"] for t in late] == ["t2", "t3", "t4"]
    assert [t["id"] for t in shell.json_lines("list", "--namespace", namespace, "--id", "t3")] == ["t3"]
    assert shell.good("count", "--namespace", namespace, "--id", "t3") == "1\n"
    assert shell.good("count", "--namespace", namespace, "--before", "in 150 minutes") == "2\n"
    assert shell.run("list", "--correlation-id", fresh()).stderr == "no timers\n"


def test_list_continues_after_short_pages(shell: Shell) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    with Client(shell.env["TIMER_URL"], KEY) as client:
        payload = "x" * 250_000
        client.batch(
            {"delay": f"{n + 1}h", "callback_url": URL, "id": f"t{n}", "namespace": namespace, "payload": payload}
            for n in range(20)
        )
    for options, number in ((["--limit", "19"], 19), (["--all"], 20)):
        listed = shell.json_lines("list", "--namespace", namespace, "--status", "pending", *options)
        assert [t["id"] for t in listed] == [f"t{n}" for n in range(number)]


def test_attempts_are_shown_and_failed_timers_replayed(shell: Shell, receiver: Receiver) -> None:
    namespace = fresh()
    shell.good("namespaces", "create", namespace)
    url = receiver.reply(f"/{namespace}", Reply(status=500, body=b"no\x1b[2J\nway"))
    create = ["create", "--in", "0s", "--url", url, "--namespace", namespace, "--retries", "0", "--id"]
    for id in ("a", "b"):
        shell.good(*create, id)
    failed = ["list", "--namespace", namespace, "--status", "failed"]
    until("both timers have failed", lambda: len(shell.json_lines(*failed)) == 2)
    assert shell.run("watch", f"{namespace}/a").returncode == 1
    table = shell.good("attempts", f"{namespace}/a")
    assert re.search(r"^1 .* responded +500 +HTTP 500 +no", table, re.MULTILINE), table
    [attempt] = shell.json("attempts", f"{namespace}/a")["attempts"]
    assert attempt["status"] == 500 and attempt["answer"] == "no\x1b[2J\nway"
    assert "pending  due" in shell.good("replay", f"{namespace}/a")
    receiver.wait(f"/{namespace}", 3)
    until("the timer has failed again", lambda: len(shell.json_lines(*failed)) == 2)
    assert "--yes" in shell.bad(2, "replay", "--status", "failed", "--namespace", namespace)
    assert shell.good("replay", "--status", "failed", "--namespace", namespace, "--yes") == "2 timers replayed\n"
    receiver.wait(f"/{namespace}", 5)
    assert shell.json("replay", "--status", "completed", "--namespace", namespace, "--yes") == {"replayed": 0}
    id = fresh()
    shell.good("create", "--in", "1h", "--url", URL, "--id", id)
    assert "no attempts yet" in shell.run("attempts", id).stderr
    assert "only finished timers can be replayed" in shell.bad(1, "replay", id)


def test_namespaces_can_be_created_shown_paused_and_given_secrets(shell: Shell) -> None:
    name = fresh()
    assert re.search(r"retention +9d", shell.good("namespaces", "create", name, "--retention", "9d", "--shards", "4"))
    assert re.search(rf"^{name} +active +4 +9d +1 +0 ", shell.good("namespaces"), re.MULTILINE)
    assert shell.good("namespaces", "list").splitlines()[0].startswith("NAMESPACE")
    assert "paused: its timers do not fire" in shell.good("namespaces", "pause", name)
    assert shell.json("namespaces", "show", name)["paused"] is True
    assert shell.json("namespaces", "resume", name)["paused"] is False
    made = shell.json("namespaces", "secret", "add", name)
    assert made["secret"].startswith("whsec_")
    assert "whsec_" in shell.good("namespaces", "secret", "add", name)
    shown = shell.good("namespaces", "show", name)
    assert re.search(rf"{made['id']}, signs callbacks until in (1d|24h|23h)", shown), shown
    assert "deleted" in shell.good("namespaces", "secret", "delete", name, made["id"])
    assert {each["name"] for each in shell.json("namespaces")["namespaces"]} >= {"default", name}
    assert "namespaces create" in shell.bad(1, "namespaces", "show", fresh())
    assert "namespaces create" in shell.bad(1, "create", "--in", "1s", "--url", URL, "--namespace", fresh())
    assert shell.bad(1, "namespaces", "create", name, "--shards", "5")


def test_namespace_settings_can_be_updated(shell: Shell) -> None:
    name = fresh()
    assert re.search(r"^weight +5$", shell.good("namespaces", "create", name, "--weight", "5"), re.MULTILINE)
    assert shell.json("namespaces", "create", name, "--weight", "5")["weight"] == 5
    assert "already exists with a different weight" in shell.bad(1, "namespaces", "create", name, "--weight", "6")
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
        (["fly"], "unknown command 'fly' (usage"),
        (["create", "--url", URL], "--in --at is required"),
        (["create", "--in", "1s"], "one of the arguments --url --subject is required (usage: duetime create --help)"),
        (["create", "--in", "1s", "--url", URL, "--subject", "a"], "--subject: not allowed with argument --url"),
        (["create", "--in", "1s", "--url", URL, "--give-up-on", "4xx"], "--give-up-on: must be HTTP statuses like"),
        (["create", "--in", "1s", "--url", URL, "--retry-backoff", "0.5"], "--retry-backoff: must be a number, at"),
        (["create", "--in", "1s", "--url", URL, "--retry-backoff", "nan"], "--retry-backoff: must be a number, at"),
        (["update", "x", "--retry-max-interval", "soon"], "--retry-max-interval: 'soon' is not a duration"),
        (["create", "--in", "1s", "--at", "friday 9:00", "--url", URL], "not allowed with argument --in"),
        (["create", "--in", "1s", "--url", URL, "--header", "x"], "--header: must be 'NAME: VALUE'"),
        (
            ["create", "--in", "1s", "--url", URL, "--payload", "{a"],
            "--payload: is not valid JSON: put JSON in single quotes",
        ),
        (["create", "--in", "1s", "--url", URL, "--replace"], "--replace needs --id"),
        (["create", "--in", "1s", "--url", URL, "--retries", "-1"], "--retries: must be a whole number, at least 0"),
        (["get"], "required: timer"),
        (["get", "/x"], "names no timer"),
        (["get", "x/"], "names no timer"),
        (["list", "--status", "lost"], "invalid choice: 'lost'"),
        (["list", "--limit", "0"], "--limit: must be a whole number, at least 1"),
        (["list", "--stat", "failed"], "unknown option --stat; did you mean --status? (usage: duetime list --help)"),
        (["create", "--delay", "5s"], "unknown option --delay; did you mean --in? (usage: duetime create --help)"),
        (["create", "--in", "5s", "--callback-url", URL], "unknown option --callback-url; did you mean --url?"),
        (["create", "--retry=3", "--in", "5s"], "unknown option --retry; did you mean --retries?"),
        (["create", "--body", "x"], "unknown option --body; did you mean --payload?"),
        (["create", "--in", "-5s", "--url", URL], "--in: '-5s' is not a duration"),
        (["--fast", "list"], "unknown option --fast (usage: duetime --help)"),
        (["get", "x", "y"], "unrecognized arguments: y (usage: duetime get --help)"),
        (["crate"], "unknown command 'crate'; did you mean `duetime create`?"),
        (["server"], "unknown command 'server'; did you mean `duetime serve`?"),
        (["pause", "x"], "unknown command 'pause'; did you mean `duetime namespaces pause`?"),
        (["list-all-of-them"], "unknown command 'list-all-of-them' (usage: duetime --help)"),
        (["update", "x"], "nothing to change"),
        (["create", "--in", "soon", "--url", URL], "--in: 'soon' is not a duration like 30s, 10m"),
        (["create", "--at", "soon", "--url", URL], "--at: 'soon' is not a time like 'tomorrow 9:00'"),
        (["list", "--after", "soon"], "--after: 'soon' is not a time like 'today'"),
        (["cancel"], "give timer ids or filters: --namespace"),
        (["cancel", "x", "--correlation-id", "c"], "give timer ids or filters, not both"),
        (["delete"], "required: timer"),
        (["delete", "x"], "delete asks for confirmation, but stdin is not a terminal: add --yes"),
        (["replay"], "give timer ids, or --status with other filters"),
        (["replay", "x", "--status", "failed"], "not both"),
        (["namespaces", "secret"], "required: command"),
        (["namespaces", "create", "x", "--weight", "0"], "--weight: must be a whole number, at least 1"),
        (["namespaces", "update", "x", "--weight", "1.5"], "--weight: must be a whole number, at least 1"),
        (["namespaces", "update", "x"], "nothing to change"),
        (["serve", "--fast"], "unknown option --fast (usage: duetime serve --help)"),
    ],
    ids=" ".join,
)
def test_usage_error_is_one_line_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in this process, which is faster and possible because nothing is sent."""
    try:
        code: object = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    assert code == 2 and not printed.out
    assert printed.err.startswith("duetime: ") and says in printed.err and printed.err.count("\n") == 1


def test_errors_of_the_service_name_what_was_typed(shell: Shell) -> None:
    refused = {
        "--at: must be in the future": ["--at", "2001-01-01T00:00:00Z", "--url", URL],
        "--in: must be at most 100 years": ["--in", "36526d", "--url", URL],
        "--at: must be at most 100 years": ["--at", "in 36526 days", "--url", URL],
        "--url: ": ["--in", "1s", "--url", "ftp://x"],
        "--header: ": ["--in", "1s", "--url", URL, "--header", "Host: x"],
        "--timeout: ": ["--in", "1s", "--url", URL, "--timeout", "0s"],
        "--retries: ": ["--in", "1s", "--url", URL, "--retries", "999999999"],
        "--id: ": ["--in", "1s", "--url", URL, "--id", "x" * 256],
        "--namespace: ": ["--in", "1s", "--url", URL, "--namespace", "a b"],
        "--correlation-id: ": ["--in", "1s", "--url", URL, "--correlation-id", ""],
        "--subject: ": ["--in", "1s", "--subject", "a b"],
        "--method: can't be combined with --subject": ["--in", "1s", "--subject", "a", "--method", "PUT"],
        "--retry-initial-interval: ": ["--in", "1s", "--url", URL, "--retry-initial-interval", "1ms"],
        "--retry-max-interval: ": ["--in", "1s", "--url", URL, "--retry-max-interval", "1ms"],
        "--retry-backoff: ": ["--in", "1s", "--url", URL, "--retry-backoff", "1001"],
        "--give-up-on: ": ["--in", "1s", "--url", URL, "--give-up-on", "200"],
    }
    for says, options in refused.items():
        assert shell.bad(1, "create", *options).startswith(says), says
    for inner in (["create"], ["update", "--weight", "2"], ["show"], ["pause"], ["resume"], ["secret", "add"]):
        assert shell.bad(1, "namespaces", *inner, "a b").startswith("name: must "), inner
    for command in (["get"], ["update", "--in", "1s"], ["cancel"], ["delete", "--yes"], ["replay"], ["watch"]):
        assert shell.bad(1, *command, "a b/x").startswith("timer: namespace must "), command
        assert shell.bad(1, *command, "x" * 256).startswith("timer: id must "), command
    for command in (["list"], ["count"], ["cancel"], ["replay", "--status", "failed"]):
        line = shell.bad(1, *command, "--namespace", "nope")
        assert line.startswith("namespace 'nope' does not exist: create it with `duetime namespaces create`")
    assert "the service rejected the API key" in shell.bad(1, "list", API_KEY="x" * 40)
    assert "the service rejected the API key" in shell.bad(1, "list", API_KEY="")
    assert "not the address of a service" in shell.bad(1, "--server", "nowhere", "list")


def test_other_server_is_not_mistaken_for_a_missing_timer(shell: Shell) -> None:
    with Receiver() as other:
        other.reply("/api/v1/timers/default/a", Reply(404, b"<html>"))
        other.reply("/api/v1/timers", Reply(501, b"<html>"))
        for status, command in ((404, ["get", "a"]), (501, ["create", "--in", "1h", "--url", URL])):
            assert shell.bad(1, "--server", other.base, *command) == (
                f"{other.base} responds, but not like Duetime (status {status}): check the address of the service "
                "(--server, TIMER_URL or the profile)"
            )


def test_refused_connection_suggests_to_start_the_service(shell: Shell) -> None:
    with unused_port() as port:
        for command in (["list"], ["watch"], ["watch", "x"]):
            line = shell.bad(1, "--url", f"http://127.0.0.1:{port}", *command)
            assert "connection refused" in line and "`duetime serve`" in line
    line = shell.bad(1, "--server", "http://no-such-name.invalid", "list")
    assert "check the address of the service" in line and "duetime serve" not in line
    line = shell.bad(1, "--server", shell.env["TIMER_URL"].replace("http:", "https:"), "list")
    assert line.endswith("is it a server without TLS, at http://?")


def test_server_and_key_can_be_given_before_or_after_the_command(shell: Shell, service: Duetime) -> None:
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


def test_help_has_usage_and_examples(
    shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # help texts are as wide as the terminal
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
    assert "When the command returns, the timer is on disk." in helped(capsys, "create")
    for command in ("list", "attempts", "watch"):
        assert "--json or a wider terminal shows all" in " ".join(helped(capsys, command).split())
    assert shell.good("help", "list") == shell.good("list", "--help")
    assert shell.good("--version").startswith("duetime ")


def test_help_calls_the_service_so(capsys: pytest.CaptureFixture[str]) -> None:
    for node in _nodes(_parser(), ()):
        text = helped(capsys, *node.path)
        if node.path not in (("profiles",), ("serve",)):  # with the key ``server`` and the settings
            assert not re.search(r"(?<!-)\bserver", text), node.path


def test_commands_import_only_what_they_need(shell: Shell) -> None:
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
    assert "duetime.client.sync_client" in of_client
    for module in of_client:
        assert not module.startswith(
            ("uvloop", "httptools", "apsw", "duetime.doors", "duetime.stores", "duetime.engine")
        )
    shell.env["DUETIME_NONSENSE"] = "1"  # stops the start once everything is imported
    of_serve = loaded("serve")
    assert "uvloop" in of_serve and not any(module.startswith("duetime.client") for module in of_serve)


def test_closed_pipe_ends_the_command_silently(shell: Shell) -> None:
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
def test_relative_time_is_rounded_to_two_units(seconds: float, text: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert output.relative(now + timedelta(seconds=seconds), round(now.timestamp() * 1000)) == text


def test_control_characters_are_escaped() -> None:
    assert output.safe("a\x1b[2J\nü\udcff") == "a\\x1b[2J\\nü\\udcff"


def test_rows_fit_a_terminal_but_keep_the_first_column_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("x" * 30, "pending", "y" * 50, "2030"), ("x", "failed", "y" * 40, "2031")]
    heads = ("TIMER", "STATUS", "ERROR", "DUE")
    assert output.short("x" * 100, 10) == "x" * 100
    assert output.table(heads, rows, free_text=(2,), drop=(3,))[1] == f"{'x' * 30}  pending  {'y' * 50}  2030"
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.short("x" * 100, 10) == "x" * 9 + "…"
    for columns, line in (
        (97, f"{'x' * 30}  pending  {'y' * 50}  2030"),
        (80, f"{'x' * 30}  pending  {'y' * 32}…  2030"),
        (67, f"{'x' * 30}  pending  {'y' * 19}…  2030"),
        (66, f"{'x' * 30}  pending  {'y' * 24}…"),
        (51, f"{'x' * 30}  pending  {'y' * 9}…"),
        (50, f"{'x' * 30}  pending  {'y' * 9}…"),
        (20, f"{'x' * 30}  pending  {'y' * 9}…"),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = output.table(heads, rows, free_text=(2,), drop=(3,))
        assert lines[1] == line, columns
        if columns > 50:
            assert max(map(len, lines)) <= columns
        else:  # the row wraps, and the others are no longer than they must be
            assert lines[2] == f"x  failed   {'y' * 9}…"


def test_argument_that_is_not_utf8_is_an_error(shell: Shell) -> None:
    ran = subprocess.run(
        [*[part.encode() for part in COMMAND], b"get", b"\xff"],
        cwd=shell.directory,
        env=shell.env,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 1 and ran.stderr.startswith(b"duetime: ") and ran.stderr.count(b"\n") == 1


def test_every_command_is_documented(shell: Shell) -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    for command in re.findall(r"^    ([a-z]+) ", shell.good("--help"), re.MULTILINE):
        assert f"| `duetime {command}` |" in page, command
