"""DeepEP's ``HybridEPBuffer``: dispatch and combine in Megatron-Core's names."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe.deepep.elastic import ElasticBuffer
from fabric_ray.moe.deepep.layout import EPHandle
from fabric_ray.moe.deepep.shared_calls import Runtime, check_counted

Handle: TypeAlias = tuple[Any, ...]
"""Of :meth:`HybridEPBuffer.dispatch` seven values, of ``dispatch_with_permute`` eleven, in DeepEP's
places: tokens that came, int32 ``[1]``, in the fourth; which local experts each is for, bool
``[rows, local experts]``, in the fifth; this rank's tokens and an :class:`EPHandle` for the number
of tokens and the configuration. Maps of kernels are ``None``. The eleventh is int32 ``[1]``: 1 if
rows were dropped."""
_WAY = {7: 6, 11: 9}
_WIDEST = struct.Struct("<qq")


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Routes by index as a map, bool ``[tokens, experts]``, and float32 weights likewise. An index
    of -1 is for none."""
    shape, where = (num_of_tokens, num_of_experts + 1), topk_idx.device
    at = topk_idx.to(torch.int64) % (num_of_experts + 1)
    routes = torch.zeros(shape, dtype=torch.bool, device=where).scatter_(1, at, True)
    probs = None
    if topk_weights is not None:
        probs = torch.zeros(shape, dtype=torch.float32, device=where)
        probs = probs.scatter(1, at, topk_weights.float())[:, :-1]
    return routes[:, :-1].contiguous(), probs


@dataclass(frozen=True)
class BufferConfig:
    """The sizes that a :class:`HybridEPBuffer` was made for, in DeepEP's names."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int


class HybridEPBuffer:
    """One rank's calls in the names of DeepEP's ``HybridEPBuffer``, over :class:`ElasticBuffer`.

    All ranks make the same calls in the same order. Rows come in the order of ranks and tokens;
    with ``permute`` those of an expert behind one another, filled up with zeros to a multiple of
    ``pad_multiple``. Sums are unweighted. Once a rank is lost, each call raises
    :class:`~fabric_ray.errors.PeerLost`.

    Args:
        group: a ``torch.distributed`` group.
        hidden_dim: taken, and so are ``use_fp8``, numbers of SMs and blocks, and what kernels use.
        max_num_of_tokens_per_rank: tokens of a rank; more make the buffers larger.
        num_local_experts: of each rank.
        options: of :class:`ElasticBuffer`: ``engine``, ``ranks_per_node``, ``launcher``,
            ``workers``, ``num_gpu_timeout_secs``.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        **options: Any,
    ) -> None:
        self._buffer = ElasticBuffer(
            group, num_max_tokens_per_rank=max(max_num_of_tokens_per_rank, 1), **options
        )
        self.group = group
        self.rank, self.group_size = self._buffer.rank_idx, self._buffer.num_ranks
        per_node = self._buffer.num_nvlink_ranks
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = per_node
        self.local_rank, self.node_rank = self.rank % per_node, self.rank // per_node
        self.num_of_nodes = self.group_size // per_node
        self._local = num_local_experts
        self.configurer = SimpleNamespace(
            buffer_config=BufferConfig(hidden_dim, max_num_of_tokens_per_rank, num_local_experts)
        )
        """Callers read the sizes in its ``buffer_config``, to see whether this buffer suffices."""
        self.config = self.configurer.buffer_config
        """Likewise, of DeepEP before 2026-04."""

    @property
    def runtime(self) -> Runtime | None:
        """``None`` once destroyed."""
        return self._buffer.runtime

    def empty_jit_cache(self) -> None:
        """Nothing: kernels are compiled where they run."""

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Handle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Handle]:
        """Sends each token once to each rank that hosts one of its experts.

        Args:
            hidden: ``[tokens, hidden]``; with ``scaling_factor``, float32 ``[tokens, blocks]``.
            topk_idx: the experts of tokens with ``num_of_experts``, or ``routing_map``: bool
                ``[tokens, experts]``.
            topk_weights: float32, likewise, or ``probs``: ``[tokens, experts]``.
            handle: of an earlier dispatch, to send other tokens the same way.

        Returns:
            The tokens; their weights of the node's experts, float32 ``[rows, experts of a node]``,
            0 but for this rank's, or ``None``; their scales or ``None``; a handle.
        """
        routes = self._routes(topk_idx, topk_weights, num_of_experts, routing_map, probs)
        found, weights, way = self._send(hidden, scaling_factor, routes, handle, 1, False)
        received, scales = found
        if weights is not None:
            weights = self._spread(weights, way)
        if handle is None:
            rows = torch.tensor([way.num_recv_tokens], dtype=torch.int32, device=hidden.device)
            here = _of_experts(way.recv_topk_idx, self._local)
            handle = (None, None, None, rows, here, len(hidden), way)
        return received, weights, scales, handle

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: Handle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Adds up the ranks' answers, ``[rows, hidden]``, and their weights as dispatch returned
        them: ``[tokens, hidden]``, and ``[tokens, experts]`` or ``None``."""
        way = _way_of(handle, 7)
        weights = None
        if probs is not None:
            first = self.local_rank * self._local
            of_experts = probs[:, first : first + self._local]
            experts = way.recv_topk_idx
            weights = of_experts.gather(1, experts.clamp(min=0))
            weights = torch.where(experts >= 0, weights, 0.0)
        sums, weights, _ = self._buffer.combine(hidden, way, weights)
        return sums, self._dense(weights, way)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Handle]:
        """As :meth:`dispatch`, with a row for each local expert of a token.

        Args:
            num_permuted_tokens: rows of the results, at least those that come; these if ``None``.
                With a handle, at least those that its dispatch kept.
            pad_multiple: what each expert's rows are filled up to.
            non_blocking: the counts stay on the device, though this call waits for it; takes
                ``num_permuted_tokens``.
            fuse_permute_dispatch: with ``non_blocking``, drops rows beyond ``num_permuted_tokens``:
                those of the last experts. They are not in the counts, and no part of sums, and the
                handle's last value, int32 ``[1]``, is 1.

        Returns:
            The tokens, ``[rows, hidden]``; their weights ``[rows]`` or ``None``; their scales or
            ``None``; rows of each local expert, int64 on the host; a handle.

        Raises:
            InvalidArgument: more rows come than ``num_permuted_tokens``, and none may be dropped.
        """
        if non_blocking and num_permuted_tokens is None:
            raise InvalidArgument("non_blocking takes num_permuted_tokens; give it")
        budget = None if num_permuted_tokens is None else int(num_permuted_tokens)
        if budget is not None and budget < 0:
            raise InvalidArgument(f"num_permuted_tokens is {budget}; give at least 0")
        routes = self._routes(topk_idx, topk_weights, num_of_experts, routing_map, probs)
        found, weights, way = self._send(
            hidden, scaling_factor, routes, handle, max(pad_multiple or 1, 1), True
        )
        rows = way.num_expanded_tokens
        kept = rows if handle is None else _kept(handle, rows)
        total = kept if budget is None else budget
        if handle is None and fuse_permute_dispatch and non_blocking:
            kept = min(rows, total)
        if total < kept:
            raise InvalidArgument(
                f"{kept} rows came, and num_permuted_tokens is {total}; raise it on this rank"
            )
        received, scales, weights = (_filled(one, kept, total) for one in (*found, weights))
        assert received is not None
        each, room = list[int](), kept
        for came in way.num_recv_tokens_per_expert_list:
            each.append(min(came, room))
            room -= each[-1]
        counts = torch.tensor(
            each, dtype=torch.int64, device=hidden.device if non_blocking else "cpu"
        )
        if handle is None:
            number = torch.tensor([way.num_recv_tokens], dtype=torch.int32, device=hidden.device)
            over = torch.full((1,), kept < rows, dtype=torch.int32, device=hidden.device)
            here = _of_experts(way.recv_topk_idx, self._local)
            handle = (
                None, None, None, number, here, None, None, counts.clone(), len(hidden), way, over,
            )  # fmt: skip
        return received, weights, scales, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`combine`, of rows and weights as :meth:`dispatch_with_permute` returned
        them."""
        way = _way_of(handle, 11)
        rows = way.num_expanded_tokens
        kept = _kept(handle, rows)
        if len(hidden) < kept or (probs is not None and len(probs) < kept):
            raise InvalidArgument(f"{len(hidden)} rows of answers; give the dispatch's {kept}")
        if kept < rows:
            hidden, probs = _filled(hidden, kept, rows), _filled(probs, kept, rows)
        weights = None if probs is None else probs[:rows].contiguous()
        sums, weights, _ = self._buffer.combine(hidden[:rows].contiguous(), way, weights)
        return sums, self._dense(weights, way)

    def check(self) -> None:
        """As :meth:`Buffer.check`."""
        self._buffer.check()

    def destroy(self) -> None:
        """As :meth:`Buffer.destroy`."""
        self._buffer.destroy()

    def _routes(
        self,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        experts: int | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which experts tokens go to, and weights, ``[tokens, experts]``."""
        if routing_map is None and topk_idx is not None:
            if experts is None:
                raise InvalidArgument("topk_idx takes num_of_experts; give it")
            return indices_to_map(topk_idx, topk_weights, len(topk_idx), experts)
        if routing_map is not None and routing_map.dtype != torch.bool:
            raise InvalidArgument(f"routing_map is {routing_map.dtype}; give bool")
        return routing_map, probs

    def _send(
        self,
        hidden: Tensor,
        scales: Tensor | None,
        routes: tuple[Tensor | None, Tensor | None],
        handle: Handle | None,
        multiple: int,
        permute: bool,
    ) -> tuple[tuple[Tensor, Tensor | None], Tensor | None, EPHandle]:
        """Tokens and scales that came, weights as they came, and where they went."""
        x = hidden if scales is None else (hidden, scales)
        routing_map, probs = routes
        if handle is not None:
            known = _way_of(handle, 11 if permute else 7)
            weights = None
            if probs is not None:
                weights = probs.float().gather(1, known.topk_idx.clamp(min=0))
                weights = torch.where(known.topk_idx >= 0, weights, 0.0)
            got, _, came, way, _ = self._buffer.dispatch(
                x, None, weights, handle=known, do_expand=permute
            )
        else:
            if routing_map is None or routing_map.shape != (
                len(hidden),
                self._local * self.group_size,
            ):
                given = None if routing_map is None else tuple(routing_map.shape)
                raise InvalidArgument(
                    f"routing_map is {given}; give bool "
                    f"[{len(hidden)}, {self._local * self.group_size}], or a handle"
                )
            check_counted(hidden.device)
            width, most = self._agreed(routing_map)
            idx, weights = _indices(routing_map, probs, width)
            got, _, came, way, _ = self._buffer.dispatch(
                x, idx, weights,
                num_experts=routing_map.shape[1], num_max_tokens_per_rank=most,
                expert_alignment=multiple, do_expand=permute,
            )  # fmt: skip
        found = got if isinstance(got, tuple) else (got, None)
        return found, came, way

    def _agreed(self, routing_map: Tensor) -> tuple[int, int]:
        """Most experts of a token, and most tokens, of any rank."""
        widest = int(routing_map.sum(1).max()) if len(routing_map) else 0
        said = self._buffer.gather(_WIDEST.pack(widest, len(routing_map)))
        found = [_WIDEST.unpack(one) for one in said]
        most = max(tokens for _, tokens in found)
        return max(1, *(width for width, _ in found)), max(
            most, self._buffer.num_max_tokens_per_rank
        )

    def _spread(self, weights: Tensor, way: EPHandle) -> Tensor:
        """Weights of tokens' experts here ``[rows, topk]``, by the experts of the node."""
        each = _of_experts(way.recv_topk_idx, self._local, weights)
        node = weights.new_zeros(
            len(weights), self._local * self.num_of_hybrid_ep_ranks_per_nvlink_domain
        )
        first = self.local_rank * self._local
        node[:, first : first + self._local] = each
        return node

    def _dense(self, weights: Tensor | None, way: EPHandle) -> Tensor | None:
        """Weights ``[tokens, topk]``, by experts."""
        if weights is None:
            return None
        return _of_experts(way.topk_idx, way.num_experts, weights)


def _way_of(handle: Handle | None, places: int) -> EPHandle:
    """
    Raises:
        InvalidArgument: it isn't what the dispatch of this kind returned.
    """
    if not isinstance(handle, tuple) or len(handle) != places:
        raise InvalidArgument(f"the handle has not {places} values; give the dispatch's")
    way = handle[_WAY[places]]
    if not isinstance(way, EPHandle):
        raise InvalidArgument("the handle is not of this buffer; give the dispatch's")
    return way


def _kept(handle: Handle | None, rows: int) -> int:
    """How many of the rows that came a ``dispatch_with_permute`` kept; waits for a device."""
    return int(handle[7].sum()) if handle is not None and bool(handle[-1]) else rows


def _indices(routing_map: Tensor, probs: Tensor | None, width: int) -> tuple[Tensor, Tensor | None]:
    """The experts of each token in ascending order, -1 behind them, and their weights."""
    experts = routing_map.shape[1]
    numbers = torch.arange(experts, dtype=torch.int64, device=routing_map.device)
    idx = torch.where(routing_map, numbers, experts).sort(1).values[:, :width]
    weights = None
    if probs is not None:
        weights = probs.float().gather(1, idx.clamp(max=experts - 1))
        weights = torch.where(idx < experts, weights, 0.0)
    return torch.where(idx < experts, idx, -1), weights


def _of_experts(idx: Tensor, experts: int, weights: Tensor | None = None) -> Tensor:
    """Whether each row is for each expert, or its weight: ``[rows, experts]``."""
    routes, probs = indices_to_map(idx, weights, len(idx), experts)
    return routes if probs is None else probs


@overload
def _filled(tensor: Tensor, kept: int, total: int) -> Tensor: ...
@overload
def _filled(tensor: Tensor | None, kept: int, total: int) -> Tensor | None: ...
def _filled(tensor: Tensor | None, kept: int, total: int) -> Tensor | None:
    """``total`` rows: the first ``kept`` ones, and zeros behind them."""
    if tensor is None or len(tensor) == kept == total:
        return tensor
    out = tensor.new_zeros((total, *tensor.shape[1:]))
    out[:kept] = tensor[:kept]
    return out
