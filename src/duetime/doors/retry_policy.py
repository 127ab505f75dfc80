"""The retry policy as clients write it: the same rules in snake_case and in camelCase."""

from __future__ import annotations

from msgspec import Struct

from duetime.errors import InvalidInput
from duetime.model import RetryPolicy
from duetime.timetext import parse_duration

RETRIES_MAX = 1_000
MULTIPLIER_MAX = 1_000.0


class RetryPolicyIn(Struct):
    """What is left out keeps its default."""

    max_retries: int | None = None
    max_retry_attempts_duration: str | None = None
    initial_interval: str | None = None
    backoff_multiplier: float | None = None
    max_interval: str | None = None
    jitter: bool | None = None

    def checked(self, field: str) -> RetryPolicy:
        given: dict[str, object] = {}
        if self.max_retries is not None:
            if not 0 <= self.max_retries <= RETRIES_MAX:
                raise InvalidInput(self._name(field, "max_retries"), f"must be from 0 to {RETRIES_MAX}")
            given["max_retries"] = self.max_retries
        if self.backoff_multiplier is not None:
            if not 1 <= self.backoff_multiplier <= MULTIPLIER_MAX:
                raise InvalidInput(self._name(field, "backoff_multiplier"), f"must be from 1 to {MULTIPLIER_MAX:g}")
            given["backoff_multiplier"] = self.backoff_multiplier
        for name, ours in (
            ("max_retry_attempts_duration", "max_duration_ms"),
            ("initial_interval", "initial_interval_ms"),
            ("max_interval", "max_interval_ms"),
        ):
            text = getattr(self, name)
            if text is not None:
                given[ours] = parse_duration(text, self._name(field, name))
        if self.jitter is not None:
            given["jitter"] = self.jitter
        return RetryPolicy(**given)  # type: ignore[arg-type]

    def _name(self, field: str, name: str) -> str:
        place = self.__struct_fields__.index(name)
        return f"{field}.{self.__struct_encode_fields__[place]}"
