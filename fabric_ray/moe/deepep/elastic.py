"""DeepEP's ``ElasticBuffer``: dispatch and combine of its second interface."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Launcher
from fabric_ray.moe.comm import comm_of
from fabric_ray.moe.deepep import normal, ways
from fabric_ray.moe.deepep.elastic_calls import ALIGNMENT, ElasticCalls
from fabric_ray.moe.deepep.elastic_memory import Engram, Ring, Sessions
from fabric_ray.moe.deepep.event import EventOverlap, Streams, behind
from fabric_ray.moe.deepep.layout import EPHandle, by_columns, slots_of
from fabric_ray.moe.deepep.parcels import Tokens, form_of, padded
from fabric_ray.moe.deepep.shared_calls import (
    Runtime,
    check_counted,
    ranks_of_a_node,
    wait_for,
)
from fabric_ray.moe.deepep.sizes import MAX_TOPK, exchange_nbytes, up
from fabric_ray.moe.exchanges import Exchanges
from fabric_ray.moe.rows import check_rows, check_statistics


class ElasticBuffer(ElasticCalls):
    """One rank's calls in the names of DeepEP's second interface, over the transfer engine.

    All ranks make the same calls in the same order. What a call does is what :class:`Buffer`'s
    normal ones do: a token goes once to each rank that hosts one of its experts, over nodes if
    ``allow_hybrid_mode`` and there are several; rows come in the order of ranks and their tokens,
    always. Calls run on torch's current stream, and a dispatch without a handle waits for the
    number of rows that come. No rank can be masked: once one is lost, calls raise
    :class:`~fabric_ray.errors.PeerLost`; on a GPU the loss that a call meets is raised by
    :meth:`check`, or by the next call.

    Args:
        group: a ``torch.distributed`` group.
        num_bytes: taken; buffers are made for ``num_max_tokens_per_rank`` (see :meth:`explain`).
        num_cpu_bytes: likewise; entries of Engram lie in host memory as large as they are.
        num_max_tokens_per_rank: tokens of a rank at most, unless a dispatch says so: buffers are
            as large as the largest of these.
        hidden: taken, and so are ``num_topk``, ``use_fp8_dispatch``, ``deterministic``,
            ``prefer_overlap_with_compute``, ``sl_idx``, ``num_allocated_qps``,
            ``num_cpu_timeout_secs`` and ``explicitly_destroy``.
        allow_hybrid_mode: a token goes once to each node, and one sum comes back, rounded.
        allow_multiple_reduction: sums of a rank's slots, and of a node, are rounded on the way;
            otherwise they go as float32, which is twice the bytes of bfloat16.
        num_gpu_timeout_secs: after which a silent rank is given up.
        comm: as for :class:`Buffer`, and so are the others.
    """

    def __init__(
        self,
        group: Any = None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        comm: Any = None,
        engine: TransferEngine | None = None,
        ranks_per_node: int | None = None,
        launcher: Launcher | None = None,
        workers: int = 24,
    ) -> None:
        super().__init__()
        found = comm_of(group, comm)
        self.group = group
        self.rank_idx, self.num_ranks = found.rank(), found.size()
        self.num_bytes = num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or 1
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.deterministic = deterministic
        self.explicitly_destroy = explicitly_destroy
        per_node = ranks_of_a_node(found, ranks_per_node)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.num_ranks // per_node, per_node
        if not allow_hybrid_mode:
            per_node = self.num_ranks
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.num_ranks // per_node, per_node
        self.scaleout_rank_idx = self.rank_idx // per_node
        self.scaleup_rank_idx = self.rank_idx % per_node
        self._exchanges = Exchanges(found, engine, float(num_gpu_timeout_secs))
        self.runtime: Runtime | None = Runtime(self.num_rdma_ranks)
        """``None`` once destroyed, as DeepEP's."""
        self._workers = workers
        self._normal = normal.Normal(
            self._exchanges, num_max_tokens_per_rank, per_node, launcher, workers
        )
        self._streams = Streams()

    # Sizes

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of one exchange of such tokens on one node, a multiple of 2 MiB; with slots, whose
        sums go as float32 unless ``allow_multiple_reduction``."""
        ranks = int(group.size())
        nbytes = exchange_nbytes(
            ranks=ranks,
            experts=ranks,
            topk=min(num_topk or MAX_TOPK, ranks),
            max_tokens=num_max_tokens_per_rank,
            row_nbytes=2 * hidden + (num_topk or MAX_TOPK) * 12,
            answer_nbytes=(2 if allow_multiple_reduction else 4) * hidden,
        )
        return up(nbytes, ALIGNMENT)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Thread blocks that move rows on a GPU; no tuning depends on it."""
        return self._workers

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """The engine chooses links."""
        return self.num_allocated_qps

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Nodes, and ranks of each."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Likewise, as tokens go: one node of all without ``allow_hybrid_mode``."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    # Devices and ends

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits for all ranks, and for this one's GPU.

        Raises:
            PeerLost: a rank was lost.
        """
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._normal.gather(b"")

    def check(self) -> None:
        """As :meth:`Buffer.check`.

        Raises:
            PeerLost: a rank was lost: its part is missing.
        """
        self._normal.check()

    def destroy(self) -> None:
        """As :meth:`Buffer.destroy`."""
        self._finish_memory(Engram, Ring, Sessions)
        self.runtime = None
        self._exchanges.close()

    # Tokens

    def dispatch(
        self,
        x: Tokens,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tokens, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to each rank that hosts one of its experts.

        Args:
            x: ``[tokens, hidden]``, or fp8 with scales; all tensors lie where it does.
            topk_idx: int64 ``[tokens, topk]``, -1 for none; ``None`` with a handle.
            topk_weights: float32 ``[tokens, topk]``.
            cumulative_local_expert_recv_stats: int32 ``[local experts]``; what comes is added.
            num_experts: of all ranks.
            num_max_tokens_per_rank: tokens of a rank at most, the same on all.
            expert_alignment: what the counts of experts are rounded up to.
            handle: of an earlier dispatch, to send other tokens the same way; another
                ``num_experts``, ``expert_alignment`` or layout is an error.
            do_cpu_sync: if false, results have room for all rows that can come; this call waits for
                a device all the same.
            do_expand: one slot for each expert of a token; what fills up is zero.
            use_tma_aligned_col_major_sf: scales lie by columns.

        Returns:
            The tokens; their experts, counted from 0 and -1 for others', int64 ``[rows, topk]``, or
            ``None`` with ``do_expand``; their weights, 0 for others' experts, ``[rows, topk]``, or
            ``[slots]`` with ``do_expand``, or ``None``; a handle; an event.

        Raises:
            InvalidArgument: what doesn't fit, before tokens are sent.
            Unsupported: a CUDA graph is captured, and there is no handle, or ``do_expand``.
            PeerLost: a rank was lost, then or before.
        """
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        if handle is None or do_expand:
            check_counted(tokens.device)
        wait_for(previous_event, previous_event_before_epilogue)
        stats = cumulative_local_expert_recv_stats
        experts = num_experts if handle is None else handle.num_experts
        if stats is not None and experts is not None:
            check_statistics(stats, experts // self.num_ranks, torch.int32, tokens.device)
        if handle is None:
            made, received, weights = self._first(
                (tokens, scales),
                topk_idx,
                topk_weights,
                (num_experts, num_max_tokens_per_rank, expert_alignment),
                (do_expand, do_cpu_sync is None or do_cpu_sync, do_handle_copy),
            )
            made.num_sms = num_sms or self._workers
        else:
            made = handle
            _check_handle(
                handle,
                topk_idx,
                do_cpu_sync,
                {
                    "num_experts": num_experts,
                    "num_max_tokens_per_rank": num_max_tokens_per_rank,
                    "expert_alignment": expert_alignment,
                    "do_expand": do_expand,
                },
            )
            received, weights = self._again((tokens, scales), topk_weights, handle)
        if stats is not None:
            stats.add_(made.slots.counts)
        if do_expand:
            received = _each(received, lambda t: made.slots.expand(t, made.num_expanded_tokens))
            if weights is not None:
                weights = made.slots.expand_each(weights, made.num_expanded_tokens)
        if isinstance(received, tuple) and use_tma_aligned_col_major_sf:
            received = (received[0], by_columns(received[1]))
        # The handle's own is what later dispatches go by.
        idx = None if do_expand else made.recv_topk_idx.clone()
        event = behind(async_with_compute_stream, tokens, scales, topk_idx, topk_weights)
        return received, idx, weights, made, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Adds up the ranks' answers, unweighted, and biases.

        Args:
            x: bfloat16, float16 or float32: an answer for each row, ``[rows, hidden]``, or with
                ``do_expand`` for each slot.
            topk_weights: float32, as dispatch returned them; added up likewise.
            bias: of this rank's tokens, one or two ``[tokens, hidden]``.

        Returns:
            ``[tokens, hidden]``; weights ``[tokens, topk]`` or ``None``; an event.

        Raises:
            PeerLost: a rank was lost, then or before.
        """
        wait_for(previous_event, previous_event_before_epilogue)
        rows = handle.num_expanded_tokens if handle.do_expand else handle.way.rows
        check_rows(
            "answers", x, width=x.shape[-1], dtype=x.dtype, rows=rows, device=handle.topk_idx.device
        )
        weights = topk_weights
        if weights is not None:
            wanted = (rows,) if handle.do_expand else (rows, handle.topk_idx.shape[1])
            if weights.dtype != torch.float32 or weights[:rows].shape != wanted:
                raise InvalidArgument(
                    f"weights are {weights.dtype} {tuple(weights.shape)}; give float32 {wanted}"
                )
            ways.check_together(x.device, weights)
        answers = x
        if handle.do_expand:
            answers = handle.slots.fold(x)
            weights = None if weights is None else handle.slots.fold_each(weights)
        answers = answers.to(torch.float32 if self._sends_float32(handle.do_expand) else x.dtype)
        sums = self._sums(handle.way, answers, bias).to(x.dtype)
        if weights is not None:
            weights = self._normal.receive(handle.way, weights.contiguous())
        biases = bias if isinstance(bias, tuple) else (bias,)
        return sums, weights, behind(async_with_compute_stream, x, topk_weights, *biases)

    def _sends_float32(self, do_expand: bool) -> bool:
        """Whether sums that are made before answers arrive aren't rounded."""
        return not self.allow_multiple_reduction and (do_expand or self.num_scaleout_ranks > 1)

    def _first(
        self,
        x: tuple[Tensor, Tensor | None],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        sizes: tuple[int | None, int | None, int | None],
        how: tuple[bool, bool, bool],
    ) -> tuple[EPHandle, Tokens, Tensor | None]:
        """A dispatch that makes a handle: that, tokens and weights in rows."""
        (tokens, scales), (do_expand, exact, copies) = x, how
        experts, most, alignment = sizes[0], sizes[1] or self.num_max_tokens_per_rank, sizes[2] or 1
        if topk_idx is None or experts is None or most < 1 or alignment < 1:
            raise InvalidArgument(
                "a dispatch takes topk_idx, num_experts and num_max_tokens_per_rank, or a handle"
            )
        ways.check_together(tokens.device, topk_idx, topk_weights, scales)
        layout = ways.layout_of(topk_idx, experts, self.num_ranks)
        if len(topk_idx) != len(tokens):
            raise InvalidArgument(f"{len(topk_idx)} rows of topk_idx for {len(tokens)} tokens")
        width = min(topk_idx.shape[1], self.num_ranks)
        wide = self._sends_float32(do_expand)
        form, parts = form_of(
            tokens, scales, width, topk_idx, topk_weights, origin=True, float32_answers=wide
        )
        if len(tokens) > most:
            raise InvalidArgument(
                f"{len(tokens)} tokens, and num_max_tokens_per_rank is {most}; raise it on all "
                "ranks, or send fewer at a time"
            )
        self._normal.grow(most)
        self._normal.reserve(len(tokens), form)
        first = self.rank_idx * most + 1
        end = first + len(tokens)
        numbers = torch.arange(first, end, dtype=torch.int32, device=tokens.device)
        parts["origin"] = numbers[:, None]
        got, way = self._normal.send(form, tokens, parts, ways.ranks_of(layout.in_rank, width))
        local = experts // self.num_ranks
        rows = way.rows if exact else most * self.num_ranks
        received, idx, weights = padded(got, rows, self.rank_idx * local, local)
        assert idx is not None
        slots = slots_of(idx, local, alignment)
        origin = got.parts["origin"][:, 0] - 1
        place = origin.clamp(min=0) // most % self.num_scaleup_ranks
        of_place = ways.tally(place, self.num_scaleup_ranks)
        starts = self._normal.read(slots.starts) if exact else []
        ends = slots.starts[:-1] + slots.counts if do_expand else slots.starts[1:]
        each = min(topk_idx.shape[1], local)
        can_come = rows * each + (alignment - 1) * local
        row = torch.arange(len(origin), dtype=torch.int64, device=origin.device)
        of = slots.of[: len(origin)] if do_expand else torch.full_like(idx[: len(origin)], -1)
        made = EPHandle(
            do_expand=do_expand,
            num_experts=experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=most,
            num_sms=0,
            topk_idx=topk_idx.clone() if copies else topk_idx,
            num_recv_tokens=rows,
            num_expanded_tokens=starts[-1] if exact else -(-can_come // alignment) * alignment,
            num_recv_tokens_per_expert_list=[end - at for at, end in pairwise(starts)],
            psum_num_recv_tokens_per_scaleup_rank=of_place.cumsum(0, dtype=torch.int32),
            psum_num_recv_tokens_per_expert=ends.to(torch.int32),
            num_unaligned_recv_tokens_per_expert=(
                slots.counts.to(torch.int32) if do_expand else None
            ),
            recv_src_metadata=torch.cat([origin[:, None], row[:, None], of], 1).to(torch.int32),
            way=way,
            recv_topk_idx=idx,
            slots=slots,
            rank_idx=self.rank_idx,
        )
        return made, received, weights

    def _again(
        self, x: tuple[Tensor, Tensor | None], topk_weights: Tensor | None, handle: EPHandle
    ) -> tuple[Tokens, Tensor | None]:
        """A dispatch by a handle: tokens and weights in rows."""
        tokens, scales = x
        ways.check_together(tokens.device, handle.topk_idx, topk_weights, scales)
        if len(tokens) != handle.way.tokens:
            raise InvalidArgument(
                f"{len(tokens)} tokens, and the handle is for {handle.way.tokens}"
            )
        width = handle.way.ranks_of.shape[1]
        idx = None if topk_weights is None else handle.topk_idx
        wide = self._sends_float32(handle.do_expand)
        form, parts = form_of(tokens, scales, width, idx, topk_weights, float32_answers=wide)
        got, _ = self._normal.send(form, tokens, parts, handle.way.ranks_of, handle.way)
        local = handle.num_experts // self.num_ranks
        received, _, weights = padded(got, handle.num_recv_tokens, self.rank_idx * local, local)
        return received, weights


def _check_handle(
    handle: EPHandle, topk_idx: Tensor | None, sync: bool | None, given: dict[str, Any]
) -> None:
    """
    Raises:
        InvalidArgument: a dispatch by it is given what the handle has otherwise.
    """
    if topk_idx is not None or sync:
        raise InvalidArgument("topk_idx is the handle's, and nothing is counted; leave them out")
    for name, value in given.items():
        if value is not None and value != getattr(handle, name):
            raise InvalidArgument(
                f"{name} is {value}, and the handle's is {getattr(handle, name)}; give the same"
            )


def _each(tokens: Tokens, work: Any) -> Tokens:
    return (work(tokens[0]), work(tokens[1])) if isinstance(tokens, tuple) else work(tokens)
