"""Callback URLs: accepted and refused URLs, and origins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime import urls as module
from duetime.errors import InvalidInput
from duetime.model import HttpTarget, NatsTarget, destination_of
from duetime.urls import origin_of, parse_url


@pytest.mark.parametrize(
    ("text", "tls", "host", "port", "authority", "target", "address"),
    [
        ("http://example.com", False, "example.com", 80, "example.com", "/", None),
        ("HTTPS://Example.COM/A?b=C", True, "example.com", 443, "example.com", "/A?b=C", None),
        ("https://example.com:443/", True, "example.com", 443, "example.com", "/", None),
        ("https://example.com:80/", True, "example.com", 80, "example.com:80", "/", None),
        ("http://example.com:8080?x=/y@z", False, "example.com", 8080, "example.com:8080", "/?x=/y@z", None),
        ("http://example.com/a#frag?no", False, "example.com", 80, "example.com", "/a", None),
        ("http://example.com#@evil.com/", False, "example.com", 80, "example.com", "/", None),
        ("http://example.com./x", False, "example.com.", 80, "example.com.", "/x", None),
        ("http://a_b-c.xn--p1ai/", False, "a_b-c.xn--p1ai", 80, "a_b-c.xn--p1ai", "/", None),
        ("http://1.2.3.4:81/", False, "1.2.3.4", 81, "1.2.3.4:81", "/", "1.2.3.4"),
        ("http://[2606:4700:0::1111]/", False, "2606:4700::1111", 80, "[2606:4700::1111]", "/", "2606:4700::1111"),
        ("http://[::1]:9/", False, "::1", 9, "[::1]:9", "/", "::1"),
        ("http://1.2.3.4.example/", False, "1.2.3.4.example", 80, "1.2.3.4.example", "/", None),
        ("http://localhost:65535//x", False, "localhost", 65535, "localhost:65535", "//x", None),
    ],
)
def test_a_url_is_parsed(
    text: str, tls: bool, host: str, port: int, authority: str, target: str, address: str | None
) -> None:
    url = parse_url(text)
    assert (url.tls, url.host, url.port, url.authority, url.target) == (tls, host, port, authority, target)
    assert url.address == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example.com",
        "//example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http:/example.com",
        "http:example.com",
        "http://",
        "http:///x",
        "http://?x",
        "http://.",
        "http://./",
        "http://..",
        "http://a..b/",
        "http://example.com../",
        "http://.example.com/",
        "http://exa mple.com/",
        " http://example.com/",
        "http://example.com/ ",
        "http://example.com/a b",
        "http://example.com/\t",
        "http://exam\tple.com/",
        "http://example.com/\r\nX: y",
        "http://example.com\n",
        "http://example.com/\x00",
        "http://example.com/\x7f",
        "http://a@127.0.0.1/",
        "http://user:pass@example.com/",
        "http://@example.com/",
        "http://example.com@/",
        "http://example.com:80@evil.com/",
        "http://evil.com\\@example.com/",
        "http://example.com\\.evil.com/",
        "http:\\\\example.com/",
        "http://example.com/\\",
        "http://example.com:/",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:99999/",
        "http://example.com:+80/",
        "http://example.com:-80/",
        "http://example.com:080/",
        "http://example.com:80:80/",
        "http://example.com:8_0/",
        "http://example.com:http/",
        "http://example.com:1000000000000000000000/",
        "http://127.1/",
        "http://0/",
        "http://0x7f.1/",
        "http://0x7f000001/",
        "http://0X7F000001/",
        "http://127.0.0x1/",
        "http://0x/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://017700000001/",
        "http://127.0.0.01/",
        "http://127.0.0.1./",
        "http://127.0.0.256/",
        "http://1.2.3/",
        "http://1.2.3.4.5/",
        "http://example.1/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://①②⑦.⓪.⓪.①/",
        "http://127\u30020.0.1/",
        "http://exämple.com/",
        "http://example.com/ä",
        "http://[::1/",
        "http://::1/",
        "http://[]/",
        "http://[::1]x/",
        "http://x[::1]/",
        "http://[::1]:/",
        "http://[::1]80/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[127.0.0.1]/",
        "http://[example.com]/",
        "http://[v1.x]/",
        "http://[::1].example.com/",
        "http://%31%32%37.0.0.1/",
        "http://example.com%00.evil.com/",
        "http://example.com%2f@evil.com/",
        "http://exa*mple.com/",
        "http://a,b/",
        "http://" + "a" * 64 + ".com/",
        "http://" + "a." * 127 + "com/",
        "http://example.com/" + "x" * 2048,
    ],
)
def test_an_ambiguous_url_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(text)
    assert caught.value.field == "callback_url"


def test_errors_name_the_given_field_and_the_longest_url_is_accepted() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url("nonsense", "callbackUrl")
    assert caught.value.field == "callbackUrl"
    assert len(parse_url("http://example.com/".ljust(2048, "x")).target) == 2048 - len("http://example.com")


@settings(deadline=None)
@given(st.text(max_size=60).map(lambda tail: f"http://{tail}") | st.text(max_size=60))
def test_any_text_is_rejected_or_parsed_into_safe_parts(text: str) -> None:
    try:
        url = parse_url(text)
    except InvalidInput:
        return
    sent = f"{url.authority}{url.target}"
    assert sent.isascii()
    assert sent.isprintable()
    assert " " not in sent
    assert url.target.startswith("/")


# Origins.


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://Example.com/a", "http://example.com:80"),
        ("HTTP://example.com:80/b?c", "http://example.com:80"),
        ("https://example.com", "https://example.com:443"),
        ("https://example.com?a/b", "https://example.com:443"),
        ("https://example.com#a", "https://example.com:443"),
        ("http://[::1]:81/", "http://[::1]:81"),
        ("http://1.2.3.4:81/http://other/", "http://1.2.3.4:81"),
    ],
)
def test_an_origin_is_scheme_host_and_port(text: str, origin: str) -> None:
    assert origin_of(text) == parse_url(text).origin == origin


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "http://", "http:///x", "http://a@b/", "http://127.1/", "ftp://a/", "http://a\\@b/", "http://ä/"],
)
def test_an_invalid_url_has_a_reason_for_an_origin(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(text)
    assert origin_of(text) == f"invalid: {caught.value.reason}"


@settings(deadline=None)
@given(st.text(max_size=60).map(lambda tail: f"http://{tail}") | st.text(max_size=60))
def test_origin_of_agrees_with_the_parser_for_any_text(text: str) -> None:
    origin = origin_of(text)
    try:
        assert origin == parse_url(text).origin
    except InvalidInput as error:
        # A bad path does not matter here.
        assert origin == f"invalid: {error.reason}" or "/" in text


def test_many_urls_of_one_host_are_one_cache_entry() -> None:
    module._origin.cache_clear()
    module._cached_parse.cache_clear()
    for n in range(1000):
        origin_of(f"http://example.com/{n}")
    assert module._origin.cache_info().currsize == 1
    assert module._cached_parse.cache_info().currsize == 0


def test_a_destination_is_an_origin_or_the_broker() -> None:
    assert destination_of(HttpTarget(url="http://example.com/a")) == "http://example.com:80"
    assert destination_of(HttpTarget(url="nonsense")).startswith("invalid: ")
    assert destination_of(NatsTarget(subject="a.b")) == "nats"
