"""What a rank's kernels run on, and its graphs: a GPU, the processor in its place, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fabric_ray.kernels.launch import Launcher
from tests.host_graph import Graph
from tests.host_kernels import Host

Work = Callable[[], Any]


class Stand(Protocol):
    """One rank's device."""

    device: torch.device
    launcher: Launcher | None

    def capture(self, work: Work) -> Work:
        """Keeps what ``work`` launches and computes; what is returned does it again. On the
        processor it is done while it is captured, on a GPU it is not."""

    def finish(self) -> None:
        """Waits for what was launched."""


class OnGpu:
    """Kernels on the current GPU."""

    launcher = None

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Engines that are opened later find CUDA in use.
        torch.zeros(1, device=self.device)

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def finish(self) -> None:
        torch.cuda.synchronize()


class OnProcessor:
    """Kernels on the processor; what a graph can't have is refused there as by a GPU."""

    def __init__(self, host: Host) -> None:
        self.device = torch.device("cpu")
        self._graphs: list[Graph] = []
        self._host = host.another()
        self.launcher: Launcher = self

    def launch(self, *launched: Any, **options: Any) -> None:
        def launch() -> None:
            self._host.launch(*launched, **options)

        if self._graphs:
            self._graphs[-1].launched(launch)
        else:
            launch()

    def resident(self, *of: Any) -> int:
        return self._host.resident(*of)

    def capture(self, work: Work) -> Work:
        graph = Graph()
        self._graphs.append(graph)
        with graph.capture():
            work()
        return graph.replay

    def finish(self) -> None:
        """Launches are over when they return."""


class NoKernels:
    """A rank that is served by the host alone."""

    launcher = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def capture(self, work: Work) -> Work:
        return work

    def finish(self) -> None:
        """Nothing was launched."""
