"""Shell completion: bash runs the script; the scripts for zsh and fish contain the same words."""

from __future__ import annotations

import argparse
import re
import subprocess

import pytest

from duetime.cli import _parser, main
from duetime.commands.completion import _nodes, _words

NODES = list(_nodes(_parser(), ()))


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(script: str, *words: str) -> list[str]:
    """The words that bash offers for the last word."""
    program = f"""{script}
COMP_WORDS=(duetime "$@"); COMP_CWORD=$#
declare -F "$(complete -p duetime | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" > /dev/null || exit 3
_duetime; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ran = subprocess.run(
        ["bash", "-uc", program, "bash", *words], capture_output=True, text=True, timeout=30, check=True
    )
    assert not ran.stderr, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ca"], ["cancel"]),
        (["namespaces", "se"], ["secret"]),
        (["namespaces", "secret", "a"], ["add"]),
        (["list", "--status", "c"], ["completed", "canceled"]),
        (["replay", "--status", ""], ["failed", "completed", "canceled"]),
        (["list", "--status", "=", "f"], ["failed"]),
        (["list", "--status", "="], ["pending", "executing", "completed", "failed", "canceled"]),
        (["create", "--m"], ["--metadata", "--method"]),
        (["create", "--method", "P"], ["POST", "PUT", "PATCH"]),
        (["--profile", "prod", "co"], ["count", "completion"]),
        (["--server", "http", ":", "//list", "wa"], ["watch"]),
        (["--key", "list", "wa"], ["watch"]),
        (["completion", "b"], ["bash"]),
        (["get", "--payl"], []),
        (["create", "--id", ""], []),
    ],
    ids=" ".join,
)
def test_bash_completes_what_fits_the_words_before(
    words: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(printed("bash", capsys), *words) == offered


def test_bash_offers_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed("bash", capsys)
    assert len(NODES) > 25
    for node in NODES:
        assert completed(script, *node.path, "") == _words(node)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_contain_the_same_words(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(shell, capsys)
    assert script.count("'") % 2 == script.count("\\'") % 2
    for node in NODES:
        path = " ".join(node.path)
        here = (
            re.search(rf"^ *'{path}'\) offered=\((.*)\) ;;$", script, re.MULTILINE)
            if shell == "zsh"
            else re.search(
                rf"((?:^complete -c duetime -n '{f'__duetime_at {path}'.strip()}' .*\n)+)", script, re.MULTILINE
            )
        )
        assert here is not None, path
        for word in _words(node):
            flag = f"-l {word[2:]} " if word.startswith("--") else f"-s {word[1:]} " if word[0] == "-" else word
            assert (f"'{word}:" in here[1] or f"'{word}'" in here[1]) if shell == "zsh" else flag in here[1], word
        for option in node.options:
            assert not option.choices or " ".join(option.choices) in script


def test_suppressed_options_are_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert argparse.SUPPRESS not in printed("bash", capsys) and "--listener" not in printed("bash", capsys)
