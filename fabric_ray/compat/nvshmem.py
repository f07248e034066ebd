"""What callers of pplx-kernels ask of NVSHMEM, which isn't used here."""

from __future__ import annotations

from typing import Any


def nvshmem_init(
    global_rank: int, local_rank: int, world_size: int, device: Any, uid: Any = None
) -> None:
    """Nothing: an ``AllToAll`` connects its ranks itself."""


class PyTorchStreamWrapper:
    """A stream of torch in the names of ``cuda.core``."""

    def __init__(self, pt_stream: Any) -> None:
        self.pt_stream = pt_stream
        self.handle = pt_stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the stream's address."""
        return 0, int(self.pt_stream.cuda_stream)
