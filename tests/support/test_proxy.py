"""The proxy for tests: clients see each fault like a real one."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.postgres import Postgres
from tests.proxy import Proxy, nth
from tests.servers import PATIENCE_SECONDS, unused_port


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := self.request.recv(65536):
                self.request.sendall(piece)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy before a server that sends back what it gets."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as echo:
        threading.Thread(target=echo.serve_forever, args=[0.01], daemon=True).start()
        with Proxy("127.0.0.1", echo.server_address[1]) as proxy:
            yield proxy
        echo.shutdown()


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_SECONDS)


def said(connection: socket.socket, message: bytes) -> bytes:
    connection.sendall(message)
    return connection.recv(100)


def test_data_and_disconnects_are_forwarded(proxy: Proxy) -> None:
    with connected(proxy) as client:
        assert said(client, b"one") == b"one"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""


def test_refusing_keeps_open_connections_and_allowing_keeps_the_port(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
        assert said(client, b"still") == b"still"
        proxy.allow()
        with connected(proxy) as another:
            assert said(another, b"new") == b"new"


def test_a_cut_resets_open_connections_and_accepts_new_ones(proxy: Proxy) -> None:
    with connected(proxy) as client, connected(proxy) as another:
        said(client, b"one")
        proxy.cut()
        for cut in (client, another):
            with pytest.raises(ConnectionResetError):
                cut.recv(100)
    with connected(proxy) as client:
        assert said(client, b"two") == b"two"


def test_hanging_holds_data_back_and_resuming_delivers_it(proxy: Proxy) -> None:
    with connected(proxy) as client:
        said(client, b"one")
        proxy.hang()
        with connected(proxy) as late:
            for held in (client, late):
                held.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    said(held, b"two")
                held.settimeout(PATIENCE_SECONDS)
            proxy.pass_on()
            assert client.recv(100) == late.recv(100) == b"two"


def test_a_hung_connection_can_be_cut(proxy: Proxy) -> None:
    with connected(proxy) as client:
        said(client, b"one")
        proxy.hang()
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(100)


def test_an_unavailable_target_looks_like_a_reset() -> None:
    with (
        unused_port() as port,
        Proxy("127.0.0.1", port) as proxy,
        pytest.raises(ConnectionResetError),  # which may come as early as while the client connects
        connected(proxy) as client,
    ):
        client.recv(100)


def test_a_response_can_be_dropped_after_the_server_has_processed_the_request(postgres18: Postgres) -> None:
    url = postgres18.fresh()
    postgres18.sql("CREATE TABLE t (n int)", url)
    with Proxy("127.0.0.1", postgres18.port) as proxy:
        proxy.on_answer = nth(b"INSERT 0 1", 2)
        postgres18.sql("INSERT INTO t VALUES (1)", proxy.url(url))
        with pytest.raises(AssertionError, match=r"connection|reset"):
            postgres18.sql("INSERT INTO t VALUES (2)", proxy.url(url))
        postgres18.sql("INSERT INTO t VALUES (3)", proxy.url(url))
    assert postgres18.sql("SELECT n FROM t ORDER BY n", url) == "1\n2\n3"
    postgres18.give_back(url)
