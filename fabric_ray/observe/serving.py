"""A socket through which other processes of this user read metrics and records."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
from pathlib import Path
from threading import Event, Lock, Thread

import msgspec

from fabric_ray.decoding import from_json
from fabric_ray.errors import FabricError
from fabric_ray.observe import process
from fabric_ray.observe.client import LONGEST_QUESTION, AskMetrics, Question
from fabric_ray.observe.run_directory import make_run_dir, run_dir, socket_path, unready_path
from fabric_ray.rpc import peer_user

_PATIENCE_S = 5.0
_REST_S = 0.1
_log = logging.getLogger("fabric_ray.observe")


class Window:
    """A socket of this process, with mode 0600 in a directory with mode 0700. Only processes of the
    same user, or root, are answered; nothing can be changed through it."""

    def __init__(self, directory: Path | None = None) -> None:
        directory = directory or run_dir()
        make_run_dir(directory)
        self.path = socket_path(directory, os.getpid())
        self._owner = os.getpid()
        self._listener = socket.socket(socket.AF_UNIX)
        self._closed = Event()
        unready = unready_path(self.path)
        # A process of the same number may have left one.
        unready.unlink(missing_ok=True)
        self._listener.bind(str(unready))
        unready.chmod(0o600)
        self._listener.listen(8)
        # Clients remove a socket without a listener, so it gets its name once it listens.
        unready.replace(self.path)
        Thread(target=self._serve, name="fabric-observe", daemon=True).start()

    @property
    def is_owner(self) -> bool:
        """False in a forked child: the socket belongs to its parent."""
        return self._owner == os.getpid()

    def close(self) -> None:
        """Closes the socket, in the process that opened it."""
        self._closed.set()
        if self.is_owner:
            self.path.unlink(missing_ok=True)
            # Wakes the thread that accepts.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                # Unless it is closed, this passes: too many open files, say.
                self._closed.wait(_REST_S)
                continue
            with peer:
                try:
                    self._answer(peer)
                except OSError:
                    _log.debug("a process that asked has gone", exc_info=True)
                except Exception:
                    _log.exception("a question could not be answered")

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(_PATIENCE_S)
        if peer_user(peer) not in (os.geteuid(), 0):
            return
        peer.sendall(answer(_question(peer)))


def answer(question: bytes) -> bytes:
    """What a process says to a question, or what is wrong with it."""
    try:
        asked = from_json(question, Question)
    except msgspec.DecodeError as error:
        return msgspec.json.encode({"error": f"the question isn't understood: {error}"})
    if isinstance(asked, AskMetrics):
        return msgspec.json.encode(process.metrics())
    return msgspec.json.encode(process.records(asked.since, asked.oldest))


def _question(peer: socket.socket) -> bytes:
    heard = bytearray()
    while b"\n" not in heard and len(heard) <= LONGEST_QUESTION and (piece := peer.recv(1 << 16)):
        heard += piece
    return bytes(heard)


_lock = Lock()


def _anew() -> None:
    # The thread that held the lock does not exist in the child.
    global _lock
    _lock = Lock()


os.register_at_fork(after_in_child=_anew)

_window: Window | None = None


def serve(directory: str | Path | None = None) -> Path:
    """Lets ``fabric-ray top`` and ``fabric-ray trace`` of the same user look into this process.

    May be called again; the directory of the first call stays. With ``FABRIC_RAY_OBSERVE=1`` in the
    environment it is called when the first engine opens.

    Args:
        directory: by default ``$FABRIC_RAY_RUN_DIR``, ``$XDG_RUNTIME_DIR/fabric-ray``, or one in
            ``/tmp``.

    Returns:
        the socket.

    Raises:
        InvalidArgument: the directory isn't this user's alone, or its name is too long.
    """
    global _window
    with _lock:
        if _window is not None and not _window.is_owner:
            _window.close()
            _window = None
        if _window is None:
            _window = Window(Path(directory) if directory else None)
            atexit.register(stop)
        return _window.path


def serve_quietly() -> None:
    """As :func:`serve`, but only logs a warning if that fails."""
    try:
        serve()
    except (FabricError, OSError) as error:
        _log.warning("this process can't be looked into: %s", error)


def stop() -> None:
    """Ends what :func:`serve` began."""
    global _window
    with _lock:
        if _window is not None:
            _window.close()
            _window = None
