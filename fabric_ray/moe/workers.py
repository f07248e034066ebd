"""The calls of a high-throughput exchange on a device: the host decides, kernels move rows.

The machine that the host steps while a rank is in a call posts jobs, each for up to a chunk of
tokens: copies of rows and sums. A kernel that each call launches on the current stream carries them
out. The call returns when its jobs are done, and the kernel ends by itself then. What the two share
is native/moe's ``throughput/workers/device.rs``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_ray._native import MoeThroughput
from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import structs
from fabric_ray.kernels.launch import Launcher
from fabric_ray.moe import rows
from fabric_ray.moe.device_memory import gpu, room_on
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.tokens import Dispatched, RowPart, given, room, sums

_FILE = "moe/work.cu"
_THREADS = 256
_LINE = 128
#: A worker ends after so many timeouts without progress of the host.
_DEVICE_TIMEOUTS = 16


def workers_on(device: torch.device, workers: int, answer_dtype: torch.dtype) -> Launcher:
    """A launcher for so many workers on a GPU.

    Raises:
        InvalidArgument: the GPU can't run all of them at once: a worker that waits for another's
        job would wait for ever.
        ResourceError: there is no such GPU.
        CompileError: a kernel doesn't compile for it.
    """
    launcher = gpu(device)
    most = launcher.resident(_FILE, _kernel(answer_dtype), _THREADS)
    if workers > most:
        raise InvalidArgument(f"workers: got {workers}, expected at most {most} on {device}")
    return launcher


class Memory:
    """Memory that a rank's kernels and its exchange share; allocated once its size is known.

    Args:
        engine: registers this rank's part of the memory.
        device: where rows lie.
    """

    def __init__(self, engine: TransferEngine, device: torch.device) -> None:
        self.device = device
        self._engine = engine
        self.region = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.words = torch.empty(0, dtype=torch.int64, device="cpu")

    def allocate(self, nbytes: int, words: int) -> tuple[Region, int, object]:
        """The rows, and words in host memory that kernels can reach."""
        self.region, region = room_on(self._engine, nbytes, self.device)
        pinned = self.device.type == "cuda"
        whole = torch.zeros(words + _LINE // 8, dtype=torch.int64, device="cpu", pin_memory=pinned)
        begin = -whole.data_ptr() % _LINE // 8
        self.words = whole[begin : begin + words]
        return region, self.words.data_ptr(), self.words


class WorkerSteps:
    """Launches one rank's kernels of an exchange.

    Args:
        native: the exchange, over ``memory``.
        parts: what a token is made of.
        hidden: elements of an answer, of ``answer_dtype``.
        launcher: launches on the device.
        workers: blocks of the kernel, each of which does one job at a time.
        timeout: seconds that ranks may be apart.
    """

    def __init__(
        self,
        native: MoeThroughput,
        memory: Memory,
        *,
        parts: Sequence[RowPart],
        topk: int,
        hidden: int,
        max_tokens: int,
        answer_dtype: torch.dtype,
        launcher: Launcher,
        workers: int,
        timeout: float,
    ) -> None:
        self._native, self._memory = native, memory
        self._device = device = memory.device
        self._parts, self._topk, self._hidden = tuple(parts), topk, hidden
        self._answer_dtype, self._workers = answer_dtype, workers
        self._launcher = launcher
        self._caller = threading.Lock()
        self._tokens = self._rows = 0
        jobs, job_words, depth, out_stride, meta = native.work_form(workers)
        stride = -(-hidden * answer_dtype.itemsize // 16) * 16
        self._of_node = torch.zeros(max_tokens, stride, dtype=torch.uint8, device=device)
        self._totals = torch.zeros(max_tokens, hidden, dtype=torch.float32, device=device)
        self._scratch = torch.zeros(workers, job_words, dtype=torch.int64, device=device)
        self._fixed = structs.Work(
            shared=memory.words.data_ptr(),
            jobs=jobs,
            job_words=job_words,
            depth=depth,
            scratch=self._scratch.data_ptr(),
            region=memory.region.data_ptr(),
            out_stride=out_stride,
            meta=meta,
            elements=hidden,
            of_node=self._of_node.data_ptr(),
            of_node_stride=stride,
            totals=self._totals.data_ptr(),
        )
        self._kernel = _kernel(answer_dtype)
        self.set_timeout(timeout)
        kept = (memory, self._of_node, self._totals, self._scratch)
        self._finalizer = weakref.finalize(self, _finish, device, kept)
        if device.type == "cuda":
            # The zeros must be in memory before peers write, and before kernels of other streams
            # run.
            torch.cuda.current_stream(device).synchronize()

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout of later calls."""
        self._fixed.timeout_ns = int(min(seconds * _DEVICE_TIMEOUTS, 1e8) * 1e9)

    def dispatch_send(
        self, indices: Tensor, weights: Tensor | None, tensors: Mapping[str, Tensor]
    ) -> None:
        """As :meth:`ThroughputAllToAll.dispatch_send`; waits for what made the indices."""
        with self._exclusive():
            self._on_device("indices", indices)
            experts = rows.indices(indices.cpu(), self._topk)
            weight = None
            if weights is not None:
                self._on_device("weights", weights)
                kept = weights.cpu()
                weight = rows.part(
                    "weights", kept, width=self._topk, dtype=torch.float32, rows=len(experts)
                )
            given(self._parts, tensors, len(experts), self._device)
            with self._at_work([tensors[p.name] for p in self._parts]):
                self._native.kernel_dispatch_send((experts.data_ptr(), experts.numel()), weight)
            self._tokens = len(experts)

    def dispatch_recv(self, multiple: int, stride: int | None, x: Tensor | None) -> Dispatched:
        """As :meth:`ThroughputAllToAll.dispatch_recv`."""
        with self._exclusive():
            with self._at_work():
                counts, starts, total = self._native.arriving(multiple=multiple, stride=stride)
            tensors, _ = room(self._parts, total, x, self._device)
            with self._at_work([tensors[p.name] for p in self._parts]):
                self._native.kernel_dispatch_recv(total)
            self._rows = total
            return Dispatched.on_host(tensors, total, counts, starts)

    def combine_send(self, y: Tensor) -> None:
        """As :meth:`ThroughputAllToAll.combine_send`."""
        with self._exclusive():
            check_rows(
                "answers",
                y,
                width=self._hidden,
                dtype=self._answer_dtype,
                rows=self._rows,
                device=self._device,
            )
            with self._at_work(answers=y):
                self._native.kernel_combine_send(len(y))

    def combine_recv(self, out: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """As :meth:`ThroughputAllToAll.combine_recv`."""
        with self._exclusive():
            shape = (self._tokens, self._hidden)
            out, _ = sums(out, dtype, self._answer_dtype, shape, self._device)
            with self._at_work():
                tokens = self._native.kernel_combine_recv()
            return out[:tokens].copy_(self._totals[:tokens])

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._caller.acquire(blocking=False):
            raise InvalidArgument(
                "another thread is in a call of this exchange; make one exchange for each"
            )
        try:
            yield
        finally:
            self._caller.release()

    @contextmanager
    def _at_work(
        self, parts: Sequence[Tensor] = (), answers: Tensor | None = None
    ) -> Iterator[None]:
        """Runs the kernel that carries out the jobs of one call."""
        arguments = structs.Work.from_buffer_copy(self._fixed)
        arguments.parts = len(parts)
        for i, part in enumerate(parts):
            arguments.part[i] = _part(part)
        if answers is not None:
            arguments.answers = _part(answers)
        arguments.call = call = self._native.begin_work()
        try:
            self._launcher.launch(_FILE, self._kernel, self._workers, _THREADS, arguments)
            yield
        except BaseException:
            # Workers may still use these tensors after the caller has released them.
            self._keep(parts if answers is None else (*parts, answers))
            raise
        finally:
            self._native.end_work(call)

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """Keeps torch from reusing their memory before the current stream is idle."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(stream)

    def _on_device(self, what: str, tensor: Tensor) -> None:
        if tensor.device != self._device:
            raise InvalidArgument(
                f"{what}: got a tensor on {tensor.device}, expected {self._device}"
            )


def _kernel(answer_dtype: torch.dtype) -> str:
    return f"work_{structs.FLOATS[str(answer_dtype).removeprefix('torch.')]}"


def _part(tensor: Tensor) -> structs.Part:
    """The rows of a checked tensor."""
    count, width = tensor.shape
    # The stride of a single row may be anything.
    stride = tensor.stride(0) if count > 1 else width
    size = tensor.element_size()
    return structs.Part(tensor.data_ptr(), stride * size, width * size)


def _finish(device: torch.device, kept: object) -> None:
    """Keeps memory of launched kernels until they have ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del kept
