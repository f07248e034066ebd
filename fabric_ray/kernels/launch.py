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
        grid: tuple[int, int],
        threads: int,
        arguments: ctypes.Structure,
    ) -> None:
        """Begins a kernel of a file: ``grid`` blocks of ``threads`` each."""
