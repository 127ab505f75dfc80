"""Splitting a JSON object without decoding it: each part is found, whatever it contains and wherever a stride ends."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from duetime.doors import decode_threads, json_parts
from duetime.doors.json_parts import parts_of
from duetime.errors import InvalidInput

TEXTS = ('a"b', "\\", '\\"', "x,y]}[{", "é\u2028", "", "\\\\\\", "timers", "0123456789" * 3)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 5 or kind < 0.35:
        return rng.choice(TEXTS)
    if kind < 0.5:
        return rng.choice([1, -2.5, 1e9, True, None])
    if kind < 0.75:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def taken_apart(body: bytes, parts_max: int = 100, part_bytes_max: int = 10_000) -> tuple[bytes, list[bytes]]:
    return parts_of(body, "timers", parts_max=parts_max, part_bytes_max=part_bytes_max)


def fault(body: bytes, **limits: int) -> str:
    with pytest.raises(InvalidInput) as caught:
        taken_apart(body, **limits)
    return str(caught.value)


@pytest.mark.parametrize("stride", [40, 64, 200, json_parts.STRIDE_BYTES])
def test_every_part_is_found(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_parts, "STRIDE_BYTES", stride)
    rng = random.Random(stride)
    for _ in range(200):
        before = {f"k{n}": value(rng) for n in range(rng.randrange(3))}
        after = {f"z{n}": value(rng) for n in range(rng.randrange(3))}
        items = [value(rng) for _ in range(rng.randrange(8))]
        text = json.dumps(
            {**before, "timers": items, **after},
            ensure_ascii=rng.random() < 0.5,
            indent=rng.choice([None, 1]),
            separators=rng.choice([None, (",", ":")]),
        )
        around, found = taken_apart(b" " * rng.randrange(3) + text.encode() + b"\n" * rng.randrange(3))
        assert [json.loads(part) for part in found] == items, text
        assert json.loads(around) == {**before, "timers": [], **after}, text


def test_invalid_json_is_rejected() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(800):
        text = bytearray(json.dumps({"timers": [value(rng) for _ in range(4)], "z": value(rng)}).encode())
        at = rng.randrange(len(text))
        if rng.random() < 0.5:
            del text[at]
        else:
            text[at] = rng.choice(b'[]{}",:\\ a1')
        try:
            json.loads(text)
        except ValueError:
            refused += 1
            assert fault(bytes(text)).startswith("body ")
    assert refused > 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body must be a JSON object"),
        (b"  [1]", "body must be a JSON object"),
        (b'{"timers":[1,2', "body is not valid JSON"),
        (b'{"timers":[1,,2]}', "body is not valid JSON: a value is missing at line 1 column 14"),
        (b'{"timers":[1,]}', "body is not valid JSON"),
        (b'{"timers":[1,\n\n2 3]}', "body is not valid JSON: a value is missing at line 1 column 14"),
        (b'{"timers":[1],"timers":[2]}', 'body must not contain the key "timers" twice in one object'),
        (b'{"timers":[1],"\\u0074imers":[2]}', 'body must not contain the key "timers" twice in one object'),
        (b'{"timers":[1]} 2', "body is not valid JSON"),
        (b'{"timers":[1]', "body is not valid JSON"),
        (b'{"timers":[1,2,3,4]}', "timers must have at most 3 items"),
        (b'{"timers":[1],"x":"' + b"x" * 70_000 + b'"}', "body must have at most 65536 bytes besides timers"),
        (b'{"timers":[' + b"[" * 2_000, "body must not be nested deeper than 64 levels"),
    ],
    ids=lambda given: given[:24] if isinstance(given, bytes) else None,
)
def test_error_describes_the_invalid_json(body: bytes, message: str) -> None:
    assert fault(body, parts_max=3).startswith(message)


def test_an_escaped_key_equals_the_plain_key() -> None:
    assert taken_apart(b'{"\\u0074imers": [1, 2]}')[1] == [b"1", b"2"]
    assert taken_apart(b'{"timers ": [1], "x": {"timers": [2]}}')[1] == []


def test_a_large_part_is_not_parsed() -> None:
    large = b'["' + b"\xff" * 20_000 + b'"}'
    assert taken_apart(b'{"timers":[1,' + large + b",2]}")[1] == [b"1", large, b"2"]


def test_runs_keep_the_order_and_the_limit() -> None:
    rng = random.Random(1)
    for _ in range(100):
        given = [bytes(rng.randrange(200_000)) for _ in range(rng.randrange(12))]
        runs = list(decode_threads.runs(given))
        assert [part for run in runs for part in run] == given
        assert all(run and (len(run) == 1 or sum(map(len, run)) <= decode_threads.RUN_BYTES_MAX) for run in runs)
