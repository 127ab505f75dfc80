"""``duetime completion``: scripts that complete commands, options and choices, generated from the argument parser.

A script finds the command that the words before the cursor name (its path, such as ``namespaces secret add``), skipping
the values of options, and offers what that command takes. It never runs duetime.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from msgspec import Struct

PROGRAM = "duetime"


class Option(Struct, frozen=True):
    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


class Node(Struct, frozen=True):
    """A command: its path, its subcommands with their help, its options, and the choices of its argument."""

    path: tuple[str, ...]
    commands: dict[str, str]
    options: list[Option]
    choices: tuple[str, ...]


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    nodes = list(_nodes(parser, ()))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](nodes)


def _nodes(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Node]:
    commands: dict[str, str] = {}
    options: list[Option] = []
    choices: tuple[str, ...] = ()
    inner: list[Node] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            # An action lists the help of its commands apart from their parsers.
            commands = {each.dest: each.help or "" for each in action._choices_actions}
            for name in commands:
                inner += _nodes(action.choices[name], (*path, name))
        elif action.option_strings and action.help is not argparse.SUPPRESS:
            given = tuple(map(str, action.choices or ()))
            options.append(Option(tuple(action.option_strings), action.help or "", action.nargs != 0, given))
        elif action.choices:
            choices = tuple(map(str, action.choices))
    yield Node(path, commands, options, choices)
    yield from inner


def _words(node: Node) -> list[str]:
    """What may come next, options after all else."""
    return [*node.commands, *node.choices, *(flag for option in node.options for flag in option.flags)]


def _steps(nodes: list[Node]) -> str:
    """The patterns ``path:word`` of all words that lead to a subcommand, for a case statement."""
    return "|".join(f"'{' '.join(node.path)}:{name}'" for node in nodes for name in node.commands)


def _with_value(nodes: list[Node]) -> list[str]:
    return sorted({flag for node in nodes for option in node.options if option.takes_value for flag in option.flags})


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _choice_cases(nodes: list[Node], line: str) -> Iterator[str]:
    for node in nodes:
        for option in node.options:
            if option.choices:
                pattern = "|".join(f"'{' '.join(node.path)}:{flag}'" for flag in option.flags)
                yield f"        {pattern}) {line.format(' '.join(option.choices))} ;;"


def _bash(nodes: list[Node]) -> str:
    cases = "\n".join(f"        '{' '.join(node.path)}') words={_quoted(' '.join(_words(node)))} ;;" for node in nodes)
    values = "|".join(_with_value(nodes))
    choices = "\n".join(_choice_cases(nodes, "words='{}'"))
    return f"""\
# Completion of {PROGRAM} for bash: source <({PROGRAM} completion bash)
_{PROGRAM}() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" path='' value='' word words='' i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        if [[ $word == '=' ]]; then continue; fi
        if [[ -n $value ]]; then value=''; continue; fi
        case "$word" in {values}) value="$word"; continue ;; esac
        case "$path:$word" in {_steps(nodes)}) path="${{path:+$path }}$word" ;; esac
    done
    if [[ $cur == '=' ]]; then cur=''; fi
    if [[ -n $value ]]; then
        case "$path:$value" in
{choices}
        esac
    else
        case "$path" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -F _{PROGRAM} {PROGRAM}
"""


def _zsh(nodes: list[Node]) -> str:
    values = "|".join(_with_value(nodes))
    choices = "\n".join(_choice_cases(nodes, "compadd -- {}"))
    cases = []
    for node in nodes:
        described = [f"{name}:{help}" for name, help in node.commands.items()]
        described += node.choices
        described += [f"{flag}:{option.help}" for option in node.options for flag in option.flags]
        cases.append(f"        '{' '.join(node.path)}') offered=({' '.join(map(_quoted, described))}) ;;")
    shown = "\n".join(cases)
    return f"""\
#compdef {PROGRAM}
# Completion of {PROGRAM} for zsh: source <({PROGRAM} completion zsh), or save it as _{PROGRAM} in a directory of $fpath
_{PROGRAM}() {{
    local -a offered
    local command_path='' value='' word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        if [[ -n $value ]]; then value=''; continue; fi
        case "$word" in ({values}) value="$word"; continue ;; esac
        case "$command_path:$word" in ({_steps(nodes)}) command_path="${{command_path:+$command_path }}$word" ;; esac
    done
    if [[ -n $value ]]; then
        case "$command_path:$value" in
{choices}
        esac
    else
        case "$command_path" in
{shown}
        esac
        _describe {PROGRAM} offered
    fi
}}
if [[ "${{funcstack[1]}}" == _{PROGRAM} ]]; then _{PROGRAM} "$@"; else compdef _{PROGRAM} {PROGRAM}; fi
"""


def _fish(nodes: list[Node]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"""\
# Completion of {PROGRAM} for fish: save it as ~/.config/fish/completions/{PROGRAM}.fish
function __{PROGRAM}_at
    set -l command_path
    set -l value
    for word in (commandline -opc)[2..-1]
        if test -n "$value"
            set value
        else if contains -- $word {" ".join(_with_value(nodes))}
            set value $word
        else if contains -- "$command_path:$word" {_steps(nodes).replace("|", " ")}
            set -a command_path $word
        end
    end
    test "$command_path" = "$argv"
end
complete -c {PROGRAM} -f"""
    ]
    for node in nodes:
        here = f"complete -c {PROGRAM} -n {quoted(' '.join([f'__{PROGRAM}_at', *node.path]))}"
        lines += [f"{here} -a {name} -d {quoted(help)}" for name, help in node.commands.items()]
        if node.choices:
            lines.append(f"{here} -a {quoted(' '.join(node.choices))}")
        for option in node.options:
            names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            choices = f" -a {quoted(' '.join(option.choices))}" if option.choices else ""
            value = f" -x{choices}" if option.takes_value else ""
            lines.append(f"{here} {names}{value} -d {quoted(option.help)}")
    return "\n".join(lines) + "\n"
