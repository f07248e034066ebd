"""Two runs of the tests with real servers don't get one port."""

from __future__ import annotations

import socket

import pytest

from tests.adapters.vllm import servers


def bound_as_vllm(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    return server


def test_a_port_that_is_bound_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    port = servers.free_port()
    with bound_as_vllm(port):  # its server has not begun to listen
        monkeypatch.setattr(servers, "_given", set())
        monkeypatch.setattr(servers, "PORTS", range(port, port + 1))
        with pytest.raises(AssertionError, match=f"no port is free from {port} to {port}"):
            servers.free_port()


def test_a_reserved_port_is_its_servers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    port = servers.reserved_port()
    monkeypatch.setattr(servers, "PORTS", range(port, port + 1))
    with pytest.raises(AssertionError, match="no port is free"):
        servers.free_port()
    with bound_as_vllm(port) as server:
        server.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5.0):
            server.accept()[0].close()
