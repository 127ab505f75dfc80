"""Generated ids, and the keys under which stores keep timers."""

from __future__ import annotations

import uuid
from itertools import islice

import pytest

from duetime.identity import IDS_AT_ONCE, new_ids
from duetime.model import timer_uuid
from tests.clocks import ManualClock


# Databases contain these keys: with other keys, their timers would not be found.
@pytest.mark.parametrize(
    ("namespace", "id", "key"),
    [
        ("default", "a", "530ab2341d65f8b29cb5cf02a8c3d769"),
        ("billing", "order-1", "dbc10ea8842cf51c99118c60cfd04f1e"),
        ("default", "01a1e3321e2e4b02a550950f2b9fe475", "1822f6d2d8e62ee2334d266885643f67"),
        ("default", "01a1e332-1e2e-4b02-a550-950f2b9fe475", "01a1e3321e8db1b51e2db3292743608a"),
        ("default", "01A1E332-1E2E-4B02-A550-950F2B9FE475", "01a1e3321e2d8a395012d48512012fbe"),
    ],
)
def test_storage_keys_are_stable(namespace: str, id: str, key: str) -> None:
    assert timer_uuid(namespace, id).hex() == key


def test_an_id_that_only_looks_like_a_uuid_has_a_key_of_the_same_length() -> None:
    whole = "01a1e332-1e2e-4b02-a550-950f2b9fe475"
    for place in range(len(whole)):
        for other in (" ", "g", "-", "é", "\n"):
            assert len(timer_uuid("default", whole[:place] + other + whole[place + 1 :])) == 16


def test_namespaces_with_the_same_prefix_have_different_keys() -> None:
    id = str(uuid.uuid4())
    one, other = timer_uuid("one", id), timer_uuid("other", id)
    assert one[:5] == other[:5] and one[5:] != other[5:]


def test_new_ids_are_uuids_that_begin_with_the_time() -> None:
    clock = ManualClock()
    ids = new_ids(clock)
    made = list(islice(ids, 3 * IDS_AT_ONCE))
    assert len(set(made)) == len(made)
    for id in made:
        read = uuid.UUID(id)
        assert str(read) == id and read.version == 4 and read.variant == uuid.RFC_4122
        assert read.int >> 80 == clock.now()
    clock.advance(1000)
    assert next(ids) > max(made)
    assert timer_uuid("default", next(ids)) > max(timer_uuid("default", id) for id in made)
