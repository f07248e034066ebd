"""Callers with the right key, or of the same user, are answered; all others are refused."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from fabric_ray import rpc
from fabric_ray.errors import HandshakeError, Refused, ResourceError, TransferTimeout, Unreachable
from fabric_ray.rpc import Server, call

KEYS = [None, b"a secret"]


def shout(request: bytes) -> bytes:
    if request == b"no":
        raise ValueError("it says no")
    return request.upper()


@pytest.fixture
def guarded() -> Iterator[Server]:
    server = Server(shout, key=b"a secret", bind=["127.0.0.1"])
    yield server
    server.close()


@pytest.mark.parametrize("key", KEYS, ids=["same user", "key"])
def test_a_request_gets_its_reply(key: bytes | None) -> None:
    server = Server(shout, key=key)
    for request in (b"", b"hello", b"x" * (3 << 20)):
        assert call("127.0.0.1", server.port, request, key=key) == request.upper()
    with pytest.raises(Refused, match="it says no"):
        call("127.0.0.1", server.port, b"no", key=key)
    server.close()
    with pytest.raises(Unreachable, match="no process answers"):
        call("127.0.0.1", server.port, b"", key=key)


@pytest.mark.parametrize("key", [b"another", b"", None])
def test_a_caller_with_another_key_is_refused(key: bytes | None, guarded: Server) -> None:
    with pytest.raises((HandshakeError, Unreachable)):
        call("127.0.0.1", guarded.port, b"hello", key=key)


def test_a_caller_that_cannot_prove_its_key_gets_no_proof(guarded: Server) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), 5) as stranger:
        stranger.sendall(b"fabric-ray/ask/3" + bytes(32))
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.recv(1)  # it proves nothing to an unproven caller
        stranger.settimeout(5)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b"", "it hangs up"


def test_a_handshake_byte_by_byte_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_HANDSHAKE_S", 0.5)
    server = Server(shout, key=b"a secret", bind=["127.0.0.1"])
    handshake = b"fabric-ray/ask/3" + bytes(32)
    with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
        stranger.settimeout(0.1)
        for sent in range(len(handshake)):
            try:
                stranger.sendall(handshake[sent : sent + 1])
                assert stranger.recv(1) == b"", "nothing was proven"
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the server waited for all of it")
    server.close()


def test_a_reply_byte_by_byte_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                while not over.wait(0.1):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TransferTimeout):
            call("127.0.0.1", listener.getsockname()[1], b"hello", key=b"a secret", timeout=0.5)
        over.set()
        thread.join()


def test_strangers_hold_few_threads_and_block_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_HANDSHAKE_S", 0.5)
    monkeypatch.setattr(rpc, "_MOST_UNPROVEN", 2)
    server = Server(shout, key=b"a secret", bind=["127.0.0.1"])
    with contextlib.ExitStack() as strangers:
        for _ in range(8):
            at = "127.0.0.1", server.port
            strangers.enter_context(socket.create_connection(at, 5))
        asked = call("127.0.0.1", server.port, b"hello", key=b"a secret", timeout=60)
        assert asked == b"HELLO"
        answering = [t for t in threading.enumerate() if t.name == "fabric-answering"]
        assert len(answering) < 8, "others wait until the first are hung up on"
    server.close()


def test_a_thread_that_can_not_be_had_ends_one_connection_only(
    monkeypatch: pytest.MonkeyPatch, guarded: Server
) -> None:
    def start(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.create_connection(("127.0.0.1", guarded.port), 5) as refused:
        assert refused.recv(1) == b"", "it hangs up"
    assert call("127.0.0.1", guarded.port, b"hello", key=b"a secret") == b"HELLO"


@pytest.mark.parametrize("key", KEYS, ids=["same user", "key"])
def test_a_forked_child_that_closes_leaves_its_parent_listening(key: bytes | None) -> None:
    server = Server(shout, key=key)
    if (child := os.fork()) == 0:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(2):  # The first would still reach an accept that is under way.
        assert call("127.0.0.1", server.port, b"hello", key=key) == b"HELLO"
    server.close()


def test_a_reply_of_an_impostor_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.settimeout(5)

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(48, socket.MSG_WAITALL)
                connection.sendall(bytes(64))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(HandshakeError, match="another token"):
            call("127.0.0.1", port, b"hello", key=b"a secret")
        thread.join()


def test_without_a_key_no_other_host_is_called() -> None:
    server = Server(shout)
    with pytest.raises(Unreachable, match="another host"):
        call("192.0.2.1", server.port, b"hello")
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_a_key_no_other_user_is_answered() -> None:
    server = Server(shout)
    code = (
        "import os; from fabric_ray.rpc import call\n"
        "'here'.encode('idna')  # What is imported lazily may be another user's to read.\n"
        "os.setuid(65534)\n"
        f"try: call('127.0.0.1', {server.port}, b'hello')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    server.close()
    assert said.stdout.strip() == "HandshakeError", said.stderr


@pytest.mark.parametrize("key", KEYS, ids=["same user", "key"])
def test_a_port_that_is_taken_is_an_error(key: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match="choose another"):
            Server(shout, port=port, key=key, bind=["127.0.0.1"])
