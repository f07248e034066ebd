"""Who asks by host and port is answered if it may be, and by nobody else."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from fabric_ray.compat import rendezvous as module
from fabric_ray.compat.rendezvous import Rendezvous, ask
from fabric_ray.errors import HandshakeError, Refused, ResourceError, TransferTimeout, Unreachable

TOKENS = [None, b"a secret"]


def shout(request: bytes) -> bytes:
    if request == b"no":
        raise ValueError("it says no")
    return request.upper()


@pytest.fixture
def guarded() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous(shout, token=b"a secret", bind=["127.0.0.1"])
    yield rendezvous
    rendezvous.close()


@pytest.mark.parametrize("token", TOKENS, ids=["same user", "token"])
def test_a_question_gets_its_answer(token: bytes | None) -> None:
    rendezvous = Rendezvous(shout, token=token)
    for request in (b"", b"hello", b"x" * (3 << 20)):
        assert ask("127.0.0.1", rendezvous.port, request, token=token) == request.upper()
    with pytest.raises(Refused, match="it says no"):
        ask("127.0.0.1", rendezvous.port, b"no", token=token)
    rendezvous.close()
    with pytest.raises(Unreachable, match="no process answers"):
        ask("127.0.0.1", rendezvous.port, b"", token=token)


@pytest.mark.parametrize("token", [b"another", b"", None])
def test_who_has_another_token_is_told_nothing(token: bytes | None, guarded: Rendezvous) -> None:
    with pytest.raises((HandshakeError, Unreachable)):
        ask("127.0.0.1", guarded.port, b"hello", token=token)


def test_who_can_not_prove_its_token_is_not_answered(guarded: Rendezvous) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), 5) as stranger:
        stranger.sendall(b"fabric-ray/ask/2" + bytes(32))
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.recv(1)  # it proves nothing to who hasn't
        stranger.settimeout(5)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b"", "it hangs up"


def test_who_drips_its_handshake_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_S", 0.5)
    rendezvous = Rendezvous(shout, token=b"a secret", bind=["127.0.0.1"])
    handshake = b"fabric-ray/ask/2" + bytes(32)
    with socket.create_connection(("127.0.0.1", rendezvous.port), 5) as stranger:
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
            pytest.fail("all of it was waited for")
    rendezvous.close()


def test_who_drips_its_answer_is_given_up() -> None:
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
            ask("127.0.0.1", listener.getsockname()[1], b"hello", token=b"a secret", timeout=0.5)
        over.set()
        thread.join()


def test_strangers_hold_few_threads_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_S", 0.5)
    monkeypatch.setattr(module, "_MOST_UNPROVEN", 2)
    rendezvous = Rendezvous(shout, token=b"a secret", bind=["127.0.0.1"])
    with contextlib.ExitStack() as strangers:
        for _ in range(8):
            at = "127.0.0.1", rendezvous.port
            strangers.enter_context(socket.create_connection(at, 5))
        asked = ask("127.0.0.1", rendezvous.port, b"hello", token=b"a secret", timeout=60)
        assert asked == b"HELLO"
        answering = [t for t in threading.enumerate() if t.name == "fabric-answering"]
        assert len(answering) < 8, "others wait until who came first is hung up on"
    rendezvous.close()


def test_a_thread_that_can_not_be_had_ends_one_connection_only(
    monkeypatch: pytest.MonkeyPatch, guarded: Rendezvous
) -> None:
    def start(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.create_connection(("127.0.0.1", guarded.port), 5) as refused:
        assert refused.recv(1) == b"", "it hangs up"
    assert ask("127.0.0.1", guarded.port, b"hello", token=b"a secret") == b"HELLO"


@pytest.mark.parametrize("token", TOKENS, ids=["same user", "token"])
def test_a_forked_child_that_closes_leaves_its_parent_listening(token: bytes | None) -> None:
    rendezvous = Rendezvous(shout, token=token)
    if (child := os.fork()) == 0:
        rendezvous.close()
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(2):  # The first would still reach an accept that is under way.
        assert ask("127.0.0.1", rendezvous.port, b"hello", token=token) == b"HELLO"
    rendezvous.close()


def test_an_answer_of_somebody_else_is_refused() -> None:
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
            ask("127.0.0.1", port, b"hello", token=b"a secret")
        thread.join()


def test_without_a_token_no_other_host_is_asked() -> None:
    rendezvous = Rendezvous(shout)
    with pytest.raises(Unreachable, match="another host"):
        ask("192.0.2.1", rendezvous.port, b"hello")
    rendezvous.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_a_token_no_other_user_is_answered() -> None:
    rendezvous = Rendezvous(shout)
    code = (
        "import os; from fabric_ray.compat.rendezvous import ask\n"
        "'here'.encode('idna')  # What is imported lazily may be another user's to read.\n"
        "os.setuid(65534)\n"
        f"try: ask('127.0.0.1', {rendezvous.port}, b'hello')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    rendezvous.close()
    assert said.stdout.strip() == "HandshakeError", said.stderr


@pytest.mark.parametrize("token", TOKENS, ids=["same user", "token"])
def test_a_port_that_is_taken_is_an_error(token: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match="choose another"):
            Rendezvous(shout, port=port, token=token, bind=["127.0.0.1"])
