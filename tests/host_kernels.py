"""Runs kernels on the processor: the same sources, built by the system's C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from fabric_ray.kernels.sources import FOLDER

#: A warp there. Few, for each is a thread; none of the kernels counts on a number.
THREADS = 4


class Host:
    """A launcher that runs kernels where it is called."""

    def __init__(self, build: Path) -> None:
        self._build = build

    @functools.cache  # noqa: B019
    def library(self, file: str) -> ctypes.CDLL:
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("there is no C++ compiler here: install g++")
        out = self._build / f"{Path(file).stem}.so"
        flags = (
            "-std=c++20 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off -pthread "
            "-shared -fPIC"
        )
        subprocess.run(
            [compiler, *flags.split(), "-I", FOLDER, "-o", out, "-x", "c++", FOLDER / file],
            check=True,
            timeout=250,
        )
        return ctypes.CDLL(str(out))

    def launch(
        self,
        file: str,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        arguments: ctypes.Structure,
    ) -> None:
        library = self.library(file)
        assert getattr(library, f"{kernel}_nbytes")() == ctypes.sizeof(arguments)
        getattr(library, f"{kernel}_on_host")(*grid, min(threads, THREADS), ctypes.byref(arguments))
