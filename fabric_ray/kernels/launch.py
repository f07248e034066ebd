"""What launches kernels: a GPU, or in tests the processor."""

from __future__ import annotations

import ctypes
from typing import Protocol


class Launcher(Protocol):
    """Runs kernels on one device. Each takes one struct of plain values."""

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
        """Begins a kernel of a file, of so many blocks of ``threads`` each. ``together``: the
        blocks wait for one another."""

    def resident(self, file: str, kernel: str, threads: int) -> int:
        """Blocks of a kernel that run at a time when nothing else does, so that they may wait for
        one another."""
