"""A service whose store has fewer abilities than any real one: in memory, with the abilities that a test sets.

``python -m tests.few_abilities serve`` is ``duetime serve`` with them; ``FewAbilities`` starts it so.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from duetime import cli, node
from duetime.store import Abilities, Order
from duetime.stores.memory import MemoryStore
from tests.servers import Duetime

ROOT = Path(__file__).parents[1]


def without(*orders: Order) -> Abilities:
    """All abilities except these orders."""
    return Abilities(orders=frozenset(Order) - set(orders))


class FewAbilities(Duetime):
    module = "tests.few_abilities"

    def __init__(self, directory: Path, abilities: Abilities, **env: Any) -> None:
        encoded = msgspec.json.encode(abilities).decode()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        super().__init__(directory, PYTHONPATH=path, DATABASE_URL="memory:", ABILITIES=encoded, **env)


if __name__ == "__main__":
    abilities = msgspec.json.decode(os.environ["ABILITIES"], type=Abilities)
    node.MemoryStore = partial(MemoryStore, abilities=abilities)  # type: ignore[attr-defined, assignment]
    sys.exit(cli.main())
