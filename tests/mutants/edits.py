"""Finds every small change of a module that a test should notice: in its Python, and in the SQL in its strings.

Skips changes that no test should notice: annotations, docstrings, log messages, and the numbers of module constants,
which are choices and not rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import parso


@dataclass(frozen=True)
class Edit:
    """Replace ``source[start:end]`` with ``text``."""

    start: int
    end: int
    text: str
    line: int
    scope: str
    """The enclosing function or class, or the constant that is set."""

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def edits_of(source: str) -> list[Edit]:
    """All edits of a module, in order of position."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Edit] = {}
    for node in _nodes(parso.parse(source)):  # type: ignore[no-untyped-call]
        if _is_left_out(node):
            continue
        for start, end, text in (*_python(node), *_sql(node)):
            line, column = node.start_pos
            at = starts[line - 1] + column
            place = (at + start, at + end, text)
            found.setdefault(place, Edit(*place, source.count("\n", 0, at + start) + 1, _scope(node)))
    return [found[place] for place in sorted(found)]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _code(node: Any) -> str:
    code: str = node.get_code(include_prefix=False)
    return code


def _parents(node: Any) -> Iterator[tuple[Any, Any]]:
    """Each ancestor of a node, with the child that leads to the node."""
    while node.parent is not None:
        yield node.parent, node
        node = node.parent


def _is_left_out(node: Any) -> bool:
    for parent, child in _parents(node):
        kind = parent.type
        if kind in ("import_from", "import_name", "decorator", "assert_stmt", "error_node"):  # no support for ``match``
            return True
        if kind == "tfpdef" or (kind == "annassign" and child is parent.children[1]):
            return True
        if kind == "funcdef" and child is parent.annotation:
            return True
        if kind == "simple_stmt" and (child.type in ("string", "strings") or _code(child).startswith("log.")):
            return True
    return False


def _scope(node: Any) -> str:
    for parent, _ in _parents(node):
        if parent.type in ("funcdef", "classdef"):
            return str(parent.name.value)
        if parent.type == "expr_stmt" and _is_top_level(parent):
            return _code(parent.children[0])
    return "module"


def _is_top_level(statement: Any) -> bool:
    return bool(statement.parent.type == "simple_stmt" and statement.parent.parent.type == "file_input")


# Python.

_COMPARISONS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "in": "not in"}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|", "<<": ">>"}
_CALCULATIONS = ("arith_expr", "term", "expr", "and_expr", "shift_expr", "power")
_ASSIGNMENTS = {"+=": "-=", "-=": "+=", "|=": "&=", "*=": "="}
_WORDS = {"True": "False", "False": "True", "break": "continue", "continue": "break"}
_KEEPING = ("replace", "_pending")
"""Functions that keep a field unchanged if it is not given: forgetting one is a mistake that no type checker finds."""


def _python(node: Any) -> Iterator[tuple[int, int, str]]:
    code, kind = _code(node), node.type
    parent = node.parent.type if node.parent is not None else ""
    whole = 0, len(code)
    if parent == "comparison" and code in _COMPARISONS:
        yield *whole, _COMPARISONS[code]
    elif kind == "comp_op":
        yield *whole, code.replace("not", "").strip()
    elif parent in _CALCULATIONS and kind == "operator" and code in _ARITHMETIC:
        yield *whole, _ARITHMETIC[code]
    elif kind == "operator" and code in _ASSIGNMENTS:
        yield *whole, _ASSIGNMENTS[code]
    elif kind == "keyword" and code in ("and", "or"):
        yield *whole, "or" if code == "and" else "and"
    elif kind == "keyword" and code in _WORDS:
        yield *whole, _WORDS[code]
    elif kind == "not_test" or (kind == "factor" and code.startswith("-")):
        yield 0, len(code) - len(_code(node.children[1])), ""
    elif kind == "number" and not _is_constant(node):
        yield *whole, str(_other(_value(code)))
    elif kind in ("if_stmt", "while_stmt") and node.children[1].type not in ("comparison", "not_test"):
        yield _negated(node, node.children[1])
    elif kind == "test" and len(node.children) == 5 and node.children[2].type not in ("comparison", "not_test"):
        yield _negated(node, node.children[2])
    elif kind == "return_stmt" and code not in ("return", "return None"):
        yield *whole, "return None"
    elif parent == "except_clause" and node is node.parent.children[1]:
        yield *whole, "ZeroDivisionError"
    elif parent == "simple_stmt" and _does_something(node):
        yield *whole, "pass"
    elif kind == "argument" and code.partition("=")[0].isidentifier() and _is_keeping(node):
        comma = node.get_next_sibling()
        yield 0, len(code) + (len(comma.get_code()) if comma is not None and comma.type == "operator" else 0), ""


def _negated(node: Any, condition: Any) -> tuple[int, int, str]:
    text = _code(condition)
    start = len("".join(child.get_code() for child in node.children[: node.children.index(condition)]))
    start += len(condition.get_first_leaf().prefix) - len(node.get_first_leaf().prefix)
    return start, start + len(text), f"not ({text})"


def _is_constant(node: Any) -> bool:
    """Whether it is the number of a module constant, or a part of it."""
    for parent, _ in _parents(node):
        if parent.type in ("funcdef", "classdef", "lambdef", "fstring", "comparison"):
            return False
        if parent.type == "expr_stmt":
            return _is_top_level(parent)
    return False


def _value(code: str) -> int | float:
    number = code.replace("_", "")
    return float(number) if "." in number or ("e" in number.lower() and "x" not in number) else int(number, 0)


def _other(number: float) -> float:
    """One more, or twice as much where one more would hardly be noticed."""
    return number + 1 if number < 10 else number * 2


def _does_something(node: Any) -> bool:
    """Whether this statement can be removed without making later names undefined."""
    if _scope(node) == "__init__":
        return False
    if node.type in ("atom_expr", "power"):
        return "(" in _code(node) and not _code(node).startswith("log.")
    if node.type != "expr_stmt":
        return False
    target, how = node.children[0], node.children[1]
    return how.type == "operator" and (how.value != "=" or target.type in ("atom_expr", "power"))


def _is_keeping(argument: Any) -> bool:
    call = argument.parent.parent if argument.parent.type == "arglist" else argument.parent
    before = call.get_previous_sibling()
    return before is not None and _code(before).rpartition(".")[2] in _KEEPING


# SQL.

_IS_SQL = re.compile(r"\b(SELECT|WHERE|UPDATE|DELETE|INSERT|AND|ORDER BY|CASE|IN \()\b|^\w+ (<>|<=|>=|<|>|=) ")
_COMMENT = re.compile(r"--[^\n]*")
_CONDITION = r"[\w.]+ (?:=|<>|<=|>=|<|>) (?:[\w.]+|\$\d+|\?)(?![\w.(\[])"
_COMPARED = {"<=": "<", "<": "<=", ">=": ">", ">": ">=", "<>": "=", "!=": "="}
_RULES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(r"\bAND\b"), "OR"),
    (re.compile(r"\bOR\b(?! (?:IGNORE|REPLACE))"), "AND"),
    (re.compile(rf"\bAND ({_CONDITION})"), lambda found: f"AND (1 = 1 OR {found[1]})"),
    (
        re.compile(r"\bWHERE ([\w.]+ (?:=|<>|<=|>=|<|>) (?:[\w.]+|\$\d+|\?)(?= AND))"),
        lambda f: f"WHERE (1 = 1 OR {f[1]})",
    ),
    (re.compile(r"(?<= )(?:<=|>=|<>|!=|<|>)(?= )"), lambda found: _COMPARED[found[0]]),
    (re.compile(r"(?<= )==?(?= )"), "<>"),
    (re.compile(r"(?<= )[+-](?= )"), lambda found: "-" if found[0] == "+" else "+"),
    (re.compile(r"\bIS NOT NULL\b"), "IS NULL"),
    (re.compile(r"\bIS NULL\b"), "IS NOT NULL"),
    (re.compile(r"(?<!AS )(?<!IF )(?<!IS )\bNOT (?!NULL|MATERIALIZED)"), ""),
    (re.compile(r"\bmin(?=\()"), "max"),
    (re.compile(r"\bmax(?=\()"), "min"),
    (re.compile(r"\bleast(?=\()"), "greatest"),
    (re.compile(r"\bFOR (?:SHARE|NO KEY UPDATE|UPDATE)(?: SKIP LOCKED)?"), ""),
    (re.compile(r"\bDESC\b"), "ASC"),
    (re.compile(r"(?<!SELECT )(?<!RETURNING )(?<![\w$.'\"])\d+(?![\w.'])"), lambda found: str(_other(int(found[0])))),
]
_CLAUSE = re.compile(r"\b(SET|VALUES|WHERE|AND|OR|ON|WHEN|HAVING|SELECT|FROM|USING|INSERT)\b")


def _sql(node: Any) -> Iterator[tuple[int, int, str]]:
    if node.type not in ("string", "fstring_string"):
        return
    text = _code(node)
    whole, before = text, ""
    if node.type == "fstring_string":
        inside = [child for child in node.parent.children if child.type != "fstring_start"]
        whole = "".join(map(_code, inside))
        before = "".join(map(_code, inside[: inside.index(node)]))
    if not _IS_SQL.search(whole.lstrip("fr\"'")):
        return
    comments = [found.span() for found in _COMMENT.finditer(text)]
    for pattern, after in _RULES:
        for found in pattern.finditer(text):
            if any(start <= found.start() < end for start, end in comments):
                continue
            clauses = _CLAUSE.findall(before + text[: found.start()])
            if found[0] == "=" and clauses and clauses[-1] in ("SET", "INSERT"):
                continue  # an assignment, not a comparison
            yield *found.span(), found.expand(after) if isinstance(after, str) else after(found)
