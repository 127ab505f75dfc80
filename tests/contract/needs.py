"""Marks for tests of what not every database can do. A test is not collected for stores that lack the ability."""

from __future__ import annotations

import pytest

from duetime.store import Order

lists = pytest.mark.needs.with_args(lambda abilities: abilities.orders == frozenset(Order))
"""The store lists timers in every order."""
purge = pytest.mark.needs.with_args(lambda abilities: not abilities.expires_history)
"""Old timers are deleted by ``purge``, by the store's clock, and not by the database itself."""
