"""Which NATS subjects a timer may go to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.doors import wire
from duetime.errors import InvalidInput


@pytest.mark.parametrize(
    "subject", ["a", "a.b", "orders.due.EU-1", "a_b.c/d", "~!#%&+,-;<=?@[]^{|}", "x" * 255, "a.$JS"]
)
def test_valid_subject_is_accepted(subject: str) -> None:
    assert wire.check_subject(subject, "field") == subject


@pytest.mark.parametrize(
    "subject",
    [
        *(
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "*",
            ">",
            "a.*",
            "a.>",
            "a*",
            "a>b",
            "a b",
            "a\tb",
            "a\nb",
            "a\r\nb",
            " a",
            "a ",
        ),
        *("\x00", "a\x7f", "ü", "a.\u2028", "\ud800", "x" * 256, "a\n"),
    ],
)
def test_invalid_subject_is_rejected(subject: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        wire.check_subject(subject, "the.field")
    assert raised.value.field == "the.field" and "tokens separated by dots" in raised.value.reason


@pytest.mark.parametrize(
    "subject", ["$JS.API.STREAM.DELETE.X", "$JS.ACK.a.b", "$SYS.x", "$KV.b.k", "$O.b", "$", "_INBOX.a.b", "_INBOX.x"]
)
def test_subjects_of_the_broker_are_recognized(subject: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        wire.check_subject(subject, "field")
    assert "NATS reserves" in raised.value.reason


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.text(st.sampled_from("ab.*> \t\r\n$_ü\x00"), max_size=8))
def test_valid_subjects_are_one_line_of_plain_tokens(subject: str) -> None:
    try:
        wire.check_subject(subject, "field")
    except InvalidInput:
        return
    assert subject.isascii() and subject.isprintable() and not set("*> ") & set(subject)
    assert all(subject.split(".")) and not subject.startswith(("$", "_INBOX."))
