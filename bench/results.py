"""The raw figures of one run as a file: what was run, on which machine, and every sample of every part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from bench.rounds import Sample, Samples

DIGITS = 5


class Failure(Struct):
    measurement: str
    part: str
    why: str


class Results(Struct):
    began_at: str  # RFC 3339
    command: str
    quick: bool
    machine: str
    versions: dict[str, str]
    rounds: int | None = None  # where somebody asked for so many
    seconds: float = 0.0
    others_share: float = 0.0  # of the CPU, what others used meanwhile
    samples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def of(self, measurement: str) -> Samples:
        return Samples(self.samples.get(measurement, {}))

    def add(self, measurement: str, part: str, sample: Sample) -> None:
        self.samples.setdefault(measurement, {}).setdefault(part, []).append(kept(sample))

    def save(self, file: Path) -> None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load(file: Path) -> Results:
    return msgspec.json.decode(file.read_bytes(), type=Results)


def kept(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and distributions, without what only the measurement itself needs."""
    return {
        name: _rounded(value)
        for name, value in sample.items()
        if value is None or isinstance(value, int | float | str) or name.endswith("lateness_ms")
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    # Instants have more digits than they need, too.
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and abs(value) < 1e9 else value
