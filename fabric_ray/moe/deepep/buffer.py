"""DeepEP's ``Buffer``: the calls that inference engines and trainers make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.kernels import Launcher
from fabric_ray.moe.comm import comm_of
from fabric_ray.moe.deepep import low_latency, normal
from fabric_ray.moe.deepep.event import EventHandle, EventOverlap, Streams, keep
from fabric_ray.moe.deepep.low_latency_form import Form, Statistics
from fabric_ray.moe.deepep.normal_calls import NormalCalls
from fabric_ray.moe.deepep.parcels import Tokens
from fabric_ray.moe.deepep.shared_calls import Runtime, ranks_of_a_node, wait_for_losses
from fabric_ray.moe.deepep.signals import Signals
from fabric_ray.moe.deepep.sizes import Config, low_latency_nbytes
from fabric_ray.moe.exchanges import Exchanges

Hook: TypeAlias = Callable[[], None]
_Result = TypeVar("_Result", low_latency.Received, Tensor)


class Buffer(NormalCalls):
    """One rank's calls in DeepEP's legacy names, over the transfer engine.

    All ranks make the same calls in the same order, as with DeepEP. Low-latency calls take tensors
    on a GPU, too: kernels do a rank's part there, counts stay there, and no call waits for it.
    They run on torch's current stream, with ``async_finish`` on :meth:`get_comm_stream`'s. What
    goes wrong on the device is raised by a later call, or by :meth:`check`. Normal calls take them
    as well, and wait for the number of rows that come, not for other streams. What can't be had
    raises :class:`~fabric_ray.errors.Unsupported` at the call.

    Args:
        group: a ``torch.distributed`` group; of a backend for GPUs alone (NCCL), each rank's
            current GPU is used for what ranks tell each other.
        num_nvl_bytes: taken; normal calls' buffers grow with the tokens (see :meth:`explain`).
        num_rdma_bytes: what low-latency calls of one shape may take; 0 for no limit.
        low_latency_mode: whether low-latency calls will be made.
        num_qps_per_rank: taken; the engine chooses links.
        allow_nvlink_for_low_latency_mode: likewise.
        allow_mnnvl: likewise.
        explicitly_destroy: taken; :meth:`destroy` may always be called.
        enable_shrink: go on without ranks that are lost: in all calls at once, as
            :meth:`low_latency_query_mask_buffer` and ``event.left_out`` say. A rank that the others
            left out raises :class:`~fabric_ray.errors.PeerLost`. Otherwise each call raises it once
            a rank is lost. The same on all ranks.
        comm: instead of a group: anything with ``rank()``, ``size()``, ``all_gather(bytes)``, or a
            communicator of mpi4py.
        use_fabric: taken, as the engine chooses how memory is shared.
        disable_nvlink_for_normal_mode: likewise.
        allow_nvlink_for_normal_mode: likewise, of DeepEP's ``hybrid-ep`` branch.
        is_intranode: of UCCL-EP: true if all ranks are on one node, which is an error otherwise.
        engine: this rank's; one of its own if ``None``.
        max_tokens: tokens of a rank in a normal dispatch, at most. Without it, ranks gather how
            many they have before each dispatch that makes a handle.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``; by the hosts' names if
            ``None``. With several nodes, normal calls send a token once to each node, and raise
            :class:`~fabric_ray.errors.PeerLost` once a rank is lost or masked.
        timeout: seconds after which a silent rank is given up; the same on all ranks, and longer
            than any rank is busy between two calls.
        launcher: launches the kernels of an exchange, in place of a GPU.
        workers: thread blocks that move the rows of normal calls over several nodes, on a GPU.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        disable_nvlink_for_normal_mode: bool = False,
        allow_nvlink_for_normal_mode: bool = True,
        is_intranode: bool | None = None,
        engine: TransferEngine | None = None,
        max_tokens: int | None = None,
        ranks_per_node: int | None = None,
        timeout: float = 30.0,
        launcher: Launcher | None = None,
        workers: int = 24,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise InvalidArgument(f"max_tokens is {max_tokens}; give at least 1")
        found = comm_of(group, comm)
        self.group = comm if group is None else group
        self.rank = found.rank()
        self.group_size = found.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._exchanges = Exchanges(found, engine, timeout, shrink=enable_shrink)
        ranks_per_node = ranks_of_a_node(found, ranks_per_node)
        if is_intranode and ranks_per_node < self.group_size:
            raise InvalidArgument(
                f"is_intranode is True, and nodes have {ranks_per_node} of {self.group_size} ranks "
                "each; leave it out"
            )
        self.runtime: Runtime | None = Runtime(self.group_size // ranks_per_node)
        """``None`` once destroyed, as DeepEP's."""
        self._normal = normal.Normal(self._exchanges, max_tokens, ranks_per_node, launcher, workers)
        self._low_latency = low_latency.LowLatency(self._exchanges, num_rdma_bytes, launcher)
        self._streams = Streams()
        self._own: Tensor | None = None
        """What :meth:`get_local_buffer_tensor` gives out of ``num_nvl_bytes``."""

    # What has no rank

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether fp8 tokens, low-latency calls and several nodes are supported, which is what
        callers take it for: yes, on the host and on any GPU."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept for :meth:`get_dispatch_config`; no SMs are used."""
        if new_num_sms < 0 or new_num_sms % 2:
            raise InvalidArgument(f"{new_num_sms} SMs; DeepEP takes even numbers")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that suffice for low-latency calls with up to 16 experts for each token."""
        return low_latency_nbytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP's tuning; the same for any number of ranks."""
        return _config(num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """As :meth:`get_dispatch_config`."""
        return _config(num_ranks)

    # Devices

    def check(self) -> None:
        """Waits for what was launched on the device, and raises what went wrong there; without a
        device that is known already.

        Raises:
            FabricError: as :meth:`fabric_ray.moe.AllToAll.check`.
        """
        self._low_latency.check()
        self._normal.check()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of ``num_nvl_bytes``, the same at each call, for the caller alone: on the GPU that
        is current at the first call, or on the host. Exchanges have memory of their own, and need
        no cleaning.

        Args:
            size: of the tensor; all elements there are if ``None``.
            offset: elements before it.
            use_rdma_buffer: ``num_rdma_bytes`` of zeros instead, which are allocated at each call
                and not kept: callers only clear them, to recover.

        Raises:
            InvalidArgument: ``size`` is beyond the end.
        """
        nbytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if use_rdma_buffer or (whole := self._own) is None:
            where = "cuda" if torch.cuda.is_available() else "cpu"
            whole = torch.zeros(nbytes, dtype=torch.uint8, device=where)
        if not use_rdma_buffer:
            self._own = whole
        usable = nbytes // dtype.itemsize * dtype.itemsize
        elements = whole[:usable].view(dtype)[offset:]
        if size is None:
            return elements
        if size.numel() > elements.numel():
            raise InvalidArgument(
                f"size is {tuple(size)} for {elements.numel()} elements of {dtype} behind offset "
                f"{offset}; make the buffer with more bytes"
            )
        return elements[: size.numel()].view(size)

    # Low-latency calls

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
        copies: low_latency.Copies | None = None,
    ) -> tuple[Tokens, Tensor, low_latency.Handle, EventOverlap, Hook | None]:
        """Sends each token to each of its experts; the hooks of two calls may be waited for.

        Args:
            x: bfloat16 ``[tokens, hidden]``.
            topk_idx: ``[tokens, topk]``, -1 for none; topk is the same on all ranks.
            num_max_dispatch_tokens_per_rank: ``M``, tokens of a rank at most.
            cumulative_local_expert_recv_stats: int32 ``[local experts]``; what comes is added.
            dispatch_wait_recv_cost_stats: int64 ``[ranks]``; nanoseconds that the receiving half
                waited for each rank's tokens are added (DeepEP: clock cycles). On the host alone.
            use_fp8: cast to e4m3 in blocks of 128 on the way.
            round_scale: scales are powers of two.
            use_ue8m0: and packed, four in an int32.
            return_recv_hook: send only; results are there when the hook has been called.
            topk_weights: unsupported: give them to combine.
            use_nvfp4: cast to e2m1 in blocks of 16 on the way, two values in a byte; with
                ``use_fp8=False``.
            x_global_scale: float32, with ``use_nvfp4``: what scales are multiplied by, the same on
                all ranks. The first element is used.
            use_ue8m0_for_sf: unsupported: scales of ``use_nvfp4`` are e4m3.
            copies: of NIXL-EP's ``Buffer``, which copies results.

        Returns:
            ``[local experts, M * ranks, hidden]``, with scales if ``use_fp8``: float32
            ``[.., hidden / 128]`` or int32 ``[.., hidden / 512]``, column-major; with
            ``use_nvfp4``: uint8 ``[M * ranks, hidden / 2, local experts]``, and e4m3 scales as
            :func:`fabric_ray.moe.cast.scale_tiles` has them; rows of each expert, int32
            ``[local experts]``; a handle; an event; the hook or ``None``.

        Raises:
            InvalidArgument: what doesn't fit; or the hook before the last was never called.
        """
        self._check_low_latency(async_finish, return_recv_hook)
        if topk_weights is not None:
            raise Unsupported("weights don't go with tokens; leave topk_weights out of dispatch")
        if use_nvfp4 and use_ue8m0_for_sf:
            raise Unsupported("scales of use_nvfp4 are e4m3; leave use_ue8m0_for_sf out")
        if use_nvfp4 and (use_fp8 or x_global_scale is None):
            raise InvalidArgument("use_nvfp4 goes with use_fp8=False and x_global_scale")
        if use_ue8m0 and not (use_fp8 and round_scale):
            raise InvalidArgument("use_ue8m0 goes with use_fp8 and round_scale")
        if x.ndim != 2 or topk_idx.ndim != 2:
            raise InvalidArgument("give tokens [tokens, hidden] and topk_idx [tokens, topk]")
        scales = torch.float8_e4m3fn if use_nvfp4 else None
        if use_fp8:
            scales = torch.int32 if use_ue8m0 else torch.float32
        form = Form(
            max_tokens=num_max_dispatch_tokens_per_rank,
            hidden=x.shape[1],
            experts=num_experts,
            topk=topk_idx.shape[1],
            scales=scales,
            device=x.device,
        )
        waits = dispatch_wait_recv_cost_stats
        stats = Statistics(cumulative_local_expert_recv_stats, waits)

        def sent() -> tuple[low_latency.Received, Hook]:
            return self._low_latency.dispatch(
                x, topk_idx, form, stats, powers_of_two=round_scale, global_scale=x_global_scale,
                copies=copies,
            )  # fmt: skip

        given = (x, topk_idx, stats.counts, x_global_scale)
        used = tuple(one for one in given if one is not None)
        got, event, hook = self._run(sent, used, async_finish, return_recv_hook)
        return got.tokens, got.counts, got.handle, event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: low_latency.Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Adds up the experts' answers with weights, in float32.

        Args:
            x: bfloat16 ``[local experts, M * ranks, hidden]``.
            topk_idx: that of the dispatch; -1 leaves more out.
            topk_weights: float32 ``[tokens, topk]``.
            handle: of a dispatch of this buffer, any number of times. A second combine, or one
                after two more dispatches, first sends zeros the dispatch's ways.
            use_logfmt: taken; answers go as bfloat16, without the loss.
            zero_copy: answers are in :meth:`get_next_low_latency_combine_buffer`'s tensor, and what
                ``x`` has is ignored. They are copied into the exchange all the same.
            overlap: waits until a GEMM's signals are there: ``comp_signal`` reaches ``threshold``
                for each block of ``block_m`` of the ``packed_recv_count`` rows of an expert, or
                ``src_signals`` of each expert reach ``src_signal_expect_value``. On the host alone.
            out: bfloat16 ``[tokens, hidden]`` for the sums.
            combine_wait_recv_cost_stats: as dispatch's, of each rank's answers.

        Returns:
            bfloat16 ``[tokens, hidden]``; an event; the hook or ``None``.
        """
        self._check_low_latency(async_finish, return_recv_hook)
        if use_logfmt and zero_copy:
            raise InvalidArgument("use_logfmt and zero_copy exclude each other")
        if overlap:
            signals = Signals.of(
                (comp_signal, packed_recv_count, block_m, threshold),
                (src_signals, src_signal_expect_value),
            )
            signals.wait(self._exchanges.timeout)

        def sent() -> tuple[Tensor, Hook]:
            return self._low_latency.combine(
                x, topk_idx, topk_weights, handle, zero_copy=zero_copy, out=out,
                waits=combine_wait_recv_cost_stats,
            )  # fmt: skip

        used = (x, topk_idx, topk_weights) if out is None else (x, topk_idx, topk_weights, out)
        return self._run(sent, used, async_finish, return_recv_hook)

    def get_next_low_latency_combine_buffer(self, handle: low_latency.Handle) -> Tensor:
        """Where answers lie for ``zero_copy``: bfloat16 ``[local experts, M * ranks, hidden]``."""
        return self._low_latency.next_buffer(handle)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Cleans nothing: normal and low-latency calls have buffers of their own, and neither
        leaves anything behind that the other would read. With ``enable_shrink`` it is a
        :meth:`barrier`, as DeepEP's is: a rank that doesn't come is masked."""
        if self.enable_shrink:
            self.barrier()

    def reset_rdma_buffer(self) -> None:
        """Nothing; of UCCL-EP."""

    def connect_atomic_buffer(self, proxy: Any) -> None:
        """Nothing: the engine has no proxies to be told of; of UCCL-EP."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Gives a rank up, in all calls; normal ones over several nodes raise from then on.

        Args:
            mask: if false, takes the rank back instead: all ranks make this call together, those
                that come back too, at a time when no hook is waited for. Low-latency exchanges and
                those of CUDA graphs stay; the others are made anew.

        Raises:
            InvalidArgument: there is no such rank; or it is this one, to be masked.
            Unsupported: CUDA graphs of a rank have calls of an exchange that another rank has left
                in the middle of a call. All ranks raise it.
            PeerLost: a rank that should come back doesn't answer.
        """
        if mask:
            self._exchanges.mask(rank_to_mask)
            return
        if not 0 <= rank_to_mask < self.group_size:
            raise InvalidArgument(f"rank {rank_to_mask} is out of range [0, {self.group_size})")
        self._restore(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Puts 1 for ranks that were masked or lost into int32 ``[ranks]``, 0 for others.

        Of a GPU, it waits for the calls before it on the current stream.

        Raises:
            InvalidArgument: it has another dtype or shape.
            Unsupported: a CUDA graph is captured.
        """
        if mask_status.shape != (self.group_size,) or mask_status.dtype != torch.int32:
            raise InvalidArgument(
                f"mask_status is {mask_status.dtype} {tuple(mask_status.shape)}; give int32 "
                f"[{self.group_size}]"
            )
        wait_for_losses(mask_status.device)
        masked = self._exchanges.masked
        ranks_to_evict = [int(r in masked) for r in range(self.group_size)]
        mask_status.copy_(torch.tensor(ranks_to_evict, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes all ranks back, as :meth:`low_latency_update_mask_buffer` takes one."""
        self._restore(None)

    # All calls

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs have calls of this buffer."""
        return self._exchanges.captured

    def barrier(self) -> None:
        """Waits for all ranks that take part.

        Raises:
            PeerLost: a rank was lost, and the buffer doesn't shrink.
        """
        self._normal.gather(b"")

    def leave(self) -> None:
        """Frees the buffers when other ranks have what this one has for them; they needn't be
        here."""
        self._exchanges.leave()
        self._low_latency.restart()
        self._own = self.runtime = None

    def destroy(self) -> None:
        """Frees the buffers when all ranks are here and their devices are done; a second call does
        nothing.

        Raises:
            FabricError: as :meth:`check`, when all is freed.
        """
        try:
            self._exchanges.close()
        finally:
            self._low_latency.restart()
            self._own = self.runtime = None

    def _run(
        self,
        sent: Callable[[], tuple[_Result, Hook]],
        used: tuple[Tensor, ...],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[_Result, EventOverlap, Hook | None]:
        """A low-latency call: its first half, and its second one unless that is for the caller."""
        device = used[0].device
        on_gpu = device.type == "cuda"
        if async_finish and on_gpu:
            with self._streams.run_beside(device, used) as event:
                result, hook = sent()
                hook()
            # Made beside, and let go of by the caller, who waits for the event on this stream.
            keep(*(result.memory if isinstance(result, low_latency.Received) else (result,)))
            return result, event.naming(self._given_up), None
        if on_gpu:
            self._streams.join(device)
        result, hook = sent()
        if return_recv_hook:
            event = EventOverlap().naming(self._given_up)
            return result, event, self._streams.behind(device, hook) if on_gpu else hook
        hook()
        event = EventOverlap(EventHandle() if async_finish else None)
        return result, event.naming(self._given_up), None

    def _given_up(self) -> list[int]:
        return [*self._exchanges.masked]

    def _restore(self, rank: int | None) -> None:
        if self._exchanges.restore(rank):
            self._low_latency.restart()
            self._normal.restart()

    def _check_low_latency(self, async_finish: bool, return_recv_hook: bool) -> None:
        if not self.low_latency_mode:
            raise InvalidArgument("this buffer has low_latency_mode=False; make it with True")
        if async_finish and return_recv_hook:
            raise InvalidArgument("async_finish and return_recv_hook exclude each other")


def _config(num_ranks: int) -> Config:
    if num_ranks < 1:
        raise InvalidArgument(f"{num_ranks} ranks; give at least 1")
    return Config(num_sms=Buffer.num_sms)
