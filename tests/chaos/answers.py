"""A rule for the proxy that cuts connections between a commit and its response.

``postgres_answers`` and ``mysql_answers`` recognize responses by their shape in each protocol. A rule that never
matches makes its scenario fail, so that a changed shape does not go unnoticed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import NamedTuple


class Answers(NamedTuple):
    """Whether a piece of data from the server contains the response to a verb, after its commit."""

    is_put: Callable[[bytes], bool]
    is_begin: Callable[[bytes], bool]
    is_record: Callable[[bytes], bool]


class Cutting:
    """A rule of the proxy: cuts random responses of one kind until it has cut ``times``."""

    def __init__(
        self,
        is_wanted: Callable[[bytes], bool],
        *,
        share: float,
        times: int,
        draw: random.Random,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_wanted = is_wanted
        self._share = share
        self._times = times
        self._draw = draw
        self._on_cut = on_cut
        self.seen = 0
        self.cuts = 0
        self.done = threading.Event()

    def __call__(self, piece: bytes) -> bool:
        if self.cuts >= self._times or not self._is_wanted(piece):
            return False
        self.seen += 1
        if self._draw.random() >= self._share:
            return False
        self.cuts += 1
        self._on_cut()
        if self.cuts >= self._times:
            self.done.set()
        return True
