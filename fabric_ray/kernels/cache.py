"""Compiled kernels, kept on disk: compiled once for each machine, by whichever process is first."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_ray.errors import ResourceError
from fabric_ray.kernels.nvrtc import Nvrtc
from fabric_ray.kernels.sources import Source

#: Where compiled kernels are kept, if not in the user's cache.
VARIABLE = "FABRIC_RAY_KERNEL_CACHE"
#: What every kernel is compiled with.
OPTIONS = ("--std=c++17",)
_DIGEST = 32
_log = logging.getLogger("fabric_ray.kernels")


@dataclass(frozen=True)
class Compiled:
    """Machine code of a file of kernels."""

    source: str
    architecture: str
    code: bytes
    cached: bool
    """It was there already."""


class Cache:
    """Compiles, or finds what was compiled.

    An entry's name is the hash of source, headers, options, architecture and the compiler's
    version. It appears whole, by a rename, and begins with the hash of the rest: one that a crash
    or a full disk has cut short is compiled again.

    Where the user's cache can't be written (no home, a read-only root, a full disk), machine code
    is kept in memory, and a warning says so once. A folder that was named must be writable.

    Args:
        folder: the default is ``FABRIC_RAY_KERNEL_CACHE``, or ``fabric-ray/kernels`` in the user's
            cache.
        compiler: found when the first kernel is compiled if ``None``.
    """

    def __init__(self, folder: Path | None = None, compiler: Nvrtc | None = None) -> None:
        named = os.environ.get(VARIABLE)
        self._named = folder is not None or bool(named)
        self.folder = folder or (Path(named) if named else _user_folder())
        self._compiler = compiler
        self._in_memory: dict[str, bytes] = {}

    @property
    def compiler(self) -> Nvrtc:
        """NVRTC.

        Raises:
            CompileError: there is none.
        """
        if self._compiler is None:
            self._compiler = Nvrtc()
        return self._compiler

    def get(self, source: Source, architecture: str, options: Sequence[str] = ()) -> Compiled:
        """Machine code for an architecture, ``sm_90a`` for example.

        Raises:
            CompileError: it doesn't compile, or there is no compiler.
            ResourceError: a folder was named that can't be written.
        """
        every = (*OPTIONS, *options)
        key = self.key(source, architecture, every)
        code = self._in_memory.get(key)
        if code is None and self.folder is not None:
            code = _read(self.folder / f"{key}.cubin")
        if code is not None:
            return Compiled(source.name, architecture, code, cached=True)
        code = self.compiler.compile(source, architecture, every)
        self._keep(key, code)
        return Compiled(source.name, architecture, code, cached=False)

    def _keep(self, key: str, code: bytes) -> None:
        cause: OSError | str = "this user has no home directory"
        if self.folder is not None:
            try:
                return _write(self.folder / f"{key}.cubin", code)
            except OSError as error:
                cause = error
        where = f" in {self.folder}" if self.folder else ""
        advice = f"name a folder that can be written with {VARIABLE}"
        if self._named:
            text = f"compiled kernels can't be kept{where}: {cause}; {advice}"
            raise ResourceError(text, call="write")
        if not self._in_memory:
            _log.warning(
                "compiled kernels can't be kept%s: %s; every process compiles them again: %s",
                where,
                cause,
                advice,
            )
        self._in_memory[key] = code

    def key(self, source: Source, architecture: str, options: Sequence[str]) -> str:
        """The name of an entry."""
        major, minor = self.compiler.version
        parts = [f"nvrtc {major}.{minor}", architecture, *options, source.name, source.text]
        parts += [text for header in source.headers for text in header]
        whole = hashlib.sha256()
        for part in parts:
            data = part.encode()
            whole.update(len(data).to_bytes(8, "little") + data)
        return whole.hexdigest()


def _user_folder() -> Path | None:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "fabric-ray" / "kernels"
    except RuntimeError:  # no HOME, and a user id without an entry in the password file
        return None


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
