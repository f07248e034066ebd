"""What DeepEP's two buffers have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.moe.comm import Comm
from fabric_ray.moe.comm import ranks_per_node as nodes_of
from fabric_ray.moe.deepep import ways
from fabric_ray.moe.deepep.event import EventOverlap, Streams, captured
from fabric_ray.moe.deepep.normal import Normal
from fabric_ray.moe.device_memory import is_captured
from fabric_ray.moe.exchanges import Exchanges


class Runtime:
    """What callers ask DeepEP's native layer for."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def get_num_rdma_ranks(self) -> int:
        """Number of nodes; with more than one, handles of normal calls are those over nodes."""
        return self._nodes


class SharedCalls:
    """Calls of both, and parts of calls."""

    _exchanges: Exchanges
    _normal: Normal
    _streams: Streams

    @staticmethod
    def capture() -> EventOverlap:
        """An event behind what torch's current stream has been given; over, without a GPU."""
        return captured()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of low-latency calls with ``async_finish``, on torch's current GPU.

        Raises:
            Unsupported: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise Unsupported("there are no streams among host tensors; leave get_comm_stream out")
        return self._streams.beside(torch.device("cuda", torch.cuda.current_device()))

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that were given up, and why."""
        return self._exchanges.masked

    def explain(self) -> str:
        """What buffers there are now, and what makes them as large as they are."""
        return self._exchanges.explain()

    def _sums(
        self, way: ways.Handle, x: Tensor, bias: Tensor | tuple[Tensor, ...] | None
    ) -> Tensor:
        """The ranks' answers and the biases added up, rounded once to the type of ``x``."""
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        shape = (way.tokens, x.shape[1])
        for one in biases:
            ways.check_together(x.device, one)
            if one.shape != shape:
                raise InvalidArgument(f"bias is {tuple(one.shape)}; give {shape}")
        sums = self._normal.receive(way, x, torch.float32 if biases else None)
        for one in biases:
            sums += one.float()
        return sums.to(x.dtype)


def wait_for(*events: EventOverlap | None) -> None:
    """What follows on the current stream waits for the events."""
    for event in events:
        if event is not None:
            event.current_stream_wait()


def check_counted(device: torch.device) -> None:
    """That a call which waits for the number of rows that come may do so.

    Raises:
        Unsupported: a CUDA graph is captured on the device.
    """
    if is_captured(device):
        raise Unsupported(
            "this dispatch can't be captured: it waits for the number of rows that come, with "
            "do_cpu_sync=False and non_blocking=True too; leave it out of CUDA graphs, or use "
            "Buffer's low-latency calls"
        )


def wait_for_losses(device: torch.device) -> None:
    """Waits for what is before a call on the current stream, since ranks may be lost there.

    Raises:
        Unsupported: a CUDA graph is captured on the device.
    """
    if device.type != "cuda":
        return
    if is_captured(device):
        raise Unsupported(
            "masks can't be queried in a CUDA graph: the host knows them when kernels have run; "
            "query them after the replay, on its stream"
        )
    torch.cuda.current_stream(device).synchronize()


def ranks_of_a_node(comm: Comm, given: int | None) -> int:
    """Those that are given, or by the hosts' names; all ranks call it together.

    Raises:
        InvalidArgument: they don't divide the ranks.
    """
    per_node = nodes_of(comm) if given is None else given
    if per_node < 1 or comm.size() % per_node:
        raise InvalidArgument(f"{comm.size()} ranks are no whole number of nodes of {per_node}")
    return per_node
