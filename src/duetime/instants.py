"""Types of instants: whole milliseconds since the Unix epoch (UTC). They exist only for the type checker; at run time
each of them is ``int`` (docs/decisions/0035).

A duration is a plain ``int``, which the type checker does not accept as an instant. An instant plus or minus a duration
is an instant of the same type; an instant minus an instant is a duration. ``Timer`` has several instants, and each has
its own type, a subtype of ``Instant``, so that they can't be mixed up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, overload

if TYPE_CHECKING:

    class Instant(int):
        def __add__(self, ms: int, /) -> Self: ...

        @overload
        def __sub__(self, other: Instant, /) -> int: ...  # type: ignore[overload-overlap]
        @overload
        def __sub__(self, ms: int, /) -> Self: ...
        def __sub__(self, other: int, /) -> Any: ...

    class ExecuteAt(Instant): ...

    class FireAt(Instant): ...

    class CreatedAt(Instant): ...

    class StartedAt(Instant): ...

    class ExecutedAt(Instant): ...

    class DeadlineAt(Instant): ...

else:
    Instant = ExecuteAt = FireAt = CreatedAt = StartedAt = ExecutedAt = DeadlineAt = int

EPOCH = Instant(0)
"""An instant that is always in the past."""
