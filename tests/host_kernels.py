"""Runs kernels on the processor: the same sources, built by the system's C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fabric_ray.kernels import structs
from fabric_ray.kernels.channel import ARGUMENTS
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.sources import FOLDER

#: A warp there. Few, for each is a thread; none of the kernels counts on a number.
THREADS = 4
#: What is built is kept there, for all processes that run tests.
BUILD = Path(__file__).parents[1] / "build" / "host-kernels"
FLAGS = (
    "-std=c++20 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off -pthread "
    "-shared -fPIC -fno-gnu-unique"
)


@functools.cache
def _built(compiler: str) -> Path:
    """The folder of what was built with these flags from these sources, on this machine."""
    digest = hashlib.sha256(f"{os.path.realpath(compiler)} {FLAGS}".encode())
    for source in sorted(FOLDER.rglob("*")):
        if source.suffix in {".cu", ".cuh", ".h"}:
            digest.update(f"{source.relative_to(FOLDER)}\0".encode() + source.read_bytes())
    return BUILD / digest.hexdigest()[:16]


def cxx() -> str:
    """The C++ compiler. Without one a test is skipped, and listed as left out: who builds the
    project needs a C compiler alone."""
    found = shutil.which("c++") or shutil.which("g++")
    return found or pytest.skip("there is no C++ compiler here: install g++")


def _compiled(file: str) -> Path:
    """The library of a file of kernels, built once for all processes that run tests."""
    compiler = cxx()
    out = _built(compiler) / f"{Path(file).stem}.so"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder) / out.name
            command = [
                compiler,
                *FLAGS.split(),
                "-I",
                FOLDER,
                "-o",
                made,
                "-x",
                "c++",
                FOLDER / file,
            ]
            subprocess.run(command, check=True, timeout=250)
            # Another process may have been first: the two are alike, and neither is half there.
            made.replace(out)
    return out


class Host:
    """A launcher that runs kernels where it is called, one at a time.

    What the threads of a block share is static there: who runs beside others in a process takes
    :meth:`another`. What is in the folder already isn't built again.

    Args:
        at_a_time: blocks of a launch that wait for one another.
        threads: maximum number of threads of a block, a multiple of a warp's.
    """

    def __init__(self, build: Path, at_a_time: int = 1, threads: int = THREADS) -> None:
        self._build = build
        self._at_a_time = at_a_time
        self._threads = threads
        self._copies = 0
        self._lock = threading.Lock()

    def another(self, at_a_time: int = 2) -> Host:
        """The same kernels, with memory of their own."""
        with self._lock:
            self._copies += 1
            folder = self._build / f"copy-{self._copies}"
        folder.mkdir()
        return _Copy(folder, self, at_a_time)

    def built(self, file: str) -> Path:
        """The library of a file of kernels."""
        with self._lock:
            return self._compiled(file)

    def _compiled(self, file: str) -> Path:
        out = self._build / f"{Path(file).stem}.so"
        return out if out.exists() else Path(shutil.copy(_compiled(file), out))

    @functools.cache  # noqa: B019
    def library(self, file: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.built(file)))

    def launch(
        self,
        file: str,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: ctypes.Structure,
        *,
        together: bool = False,
    ) -> None:
        if not together or blocks == 1:
            self._run(file, kernel, range(blocks), blocks, threads, arguments)
            return
        with ThreadPoolExecutor(blocks) as pool:
            runs = [
                pool.submit(of._run, file, kernel, range(i, i + 1), blocks, threads, arguments)
                for i, of in enumerate(self._beside(blocks))
            ]
        for run in runs:
            run.result()

    def resident(self, file: str, kernel: str, threads: int) -> int:
        return 2 * self._at_a_time  # half of them are taken

    @functools.cache  # noqa: B019
    def _beside(self, blocks: int) -> list[Host]:
        return [self, *(self.another() for _ in range(blocks - 1))]

    def _run(
        self,
        file: str,
        kernel: str,
        run: range,
        blocks: int,
        threads: int,
        arguments: ctypes.Structure,
    ) -> None:
        library = self.library(file)
        assert getattr(library, f"{kernel}_nbytes")() == ctypes.sizeof(arguments)
        getattr(library, f"{kernel}_on_host")(
            run.start, run.stop, blocks, min(threads, self._threads), ctypes.byref(arguments)
        )


class _Copy(Host):
    def __init__(self, build: Path, original: Host, at_a_time: int) -> None:
        super().__init__(build, at_a_time, original._threads)
        self._original = original

    def built(self, file: str) -> Path:
        with self._lock:
            built = self._original.built(file)
            own = self._build / built.name
            # What is loaded from there is never written over.
            return own if own.exists() else Path(shutil.copy(built, own))


def exchange_kernels(build: Path) -> Host:
    """All kernels of an exchange, built in a folder."""
    host = Host(build)
    for file in {**structs.ARGUMENTS, **ARGUMENTS}:
        host.built(file)
    return host


class StepByStep:
    """Launches each step of a launch by itself, by way of :meth:`step`."""

    def __init__(self, under: Launcher) -> None:
        self._under = under

    def launch(
        self,
        file: str,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: Any,
        *,
        together: bool = False,
    ) -> None:
        for step in arguments.step[: arguments.n]:
            one = structs.Steps(arguments.meeting, 1)
            one.step[0] = step
            launch = functools.partial(self._under.launch, file, kernel, blocks, threads, one)
            self.step(one.step[0], launch)

    def step(self, step: structs.Step, launch: Callable[[], None]) -> None:
        """Launches a step."""
        launch()

    def resident(self, file: str, kernel: str, threads: int) -> int:
        return self._under.resident(file, kernel, threads)


class Stream:
    """A launcher that goes on while kernels run, as a GPU's stream does: each block of a launch in
    a thread, behind the same block of the launch before. Such kernels take the number of their
    ``first`` block."""

    def __init__(self, host: Host, blocks: int) -> None:
        self._hosts = [host.another() for _ in range(blocks)]
        self._threads = [ThreadPoolExecutor(1) for _ in range(blocks)]
        self._runs: list[Future[None]] = []

    def launch(
        self,
        file: str,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: ctypes.Structure,
        *,
        together: bool = False,
    ) -> None:
        assert blocks == len(self._hosts)
        for i, (host, thread) in enumerate(zip(self._hosts, self._threads, strict=True)):
            of_block = type(arguments).from_buffer_copy(arguments)
            of_block.first = i
            run = thread.submit(host.launch, file, kernel, 1, threads, of_block)
            self._runs.append(run)

    def finish(self, timeout: float) -> None:
        """Waits until all kernels have ended; none is launched any more."""
        for run in self._runs:
            run.result(timeout)
        for thread in self._threads:
            thread.shutdown()


def launching(host: Host, stack: ExitStack, blocks: int | None = None) -> dict[str, Any]:
    """Options of a rank on kernels, which run where they are called, or by blocks in a stream that
    has ended when the stack has unwound."""
    if blocks is None:
        return {"launcher": host.another()}
    stream = Stream(host, blocks)
    stack.callback(stream.finish, 60.0)
    return {"launcher": stream, "workers": blocks}
