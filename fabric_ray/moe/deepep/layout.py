"""The layout of received tokens by expert: ``ElasticBuffer``'s handle and expanded layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fabric_ray.moe.deepep import ways

ALIGNED_SCALES = 4


@dataclass(frozen=True, eq=False)
class Slots:
    """One slot for each expert of a token. The slots of an expert are contiguous, in the order of
    tokens, and begin at a multiple of the alignment."""

    counts: Tensor
    """Tokens of each local expert, int64 ``[local experts]``."""
    starts: Tensor
    """The first slot of each expert, then the number of slots, int64."""
    of: Tensor
    """The slot of each expert of a token, int64 ``[rows, topk]``; -1 for experts of other ranks."""

    def expand(self, rows: Tensor, total: int) -> Tensor:
        """Copies each row to its slots: ``[total, width]``; padding is zero."""
        token, place = (self.of >= 0).nonzero(as_tuple=True)
        # By bytes: torch can't index every dtype.
        plain = rows.contiguous().view(torch.uint8)
        out = plain.new_zeros(total, plain.shape[1])
        out[self.of[token, place]] = plain[token]
        return out.view(rows.dtype)

    def expand_each(self, each: Tensor, total: int) -> Tensor:
        """Moves a value for each expert of a token, ``[rows, topk]``, to slots ``[total]``."""
        there = self.of >= 0
        out = each.new_zeros(total)
        out[self.of[there]] = each[there]
        return out

    def fold(self, slots: Tensor) -> Tensor:
        """Sums each token's slots in float32, whatever torch's default dtype (RS-1), in the order
        of its experts: float32 ``[rows, width]``."""
        total = torch.zeros(len(self.of), slots.shape[1], dtype=torch.float32, device=slots.device)
        for slot in self.of.unbind(1):
            total += torch.where(slot[:, None] >= 0, slots[slot.clamp(min=0)].float(), 0.0)
        return total

    def fold_each(self, slots: Tensor) -> Tensor:
        """Moves slots ``[total]`` to the experts of tokens, ``[rows, topk]``; 0 for experts of
        other ranks."""
        return torch.where(self.of >= 0, slots[self.of.clamp(min=0)], 0.0)


@dataclass(eq=False)
class EPHandle:
    """The handle of a dispatch, with DeepEP's names."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    """int64 ``[tokens, topk]``, those of the dispatch."""
    num_recv_tokens: int
    """Rows of the tokens that came, those included that there is room for without a CPU sync."""
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    """Of each local expert, a multiple of the alignment; none without a CPU sync."""
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    """int32: tokens that came from the ranks of each place in a node, added up."""
    psum_num_recv_tokens_per_expert: Tensor
    """int32 ``[local experts]``: where each expert's tokens end, filled up; with ``do_expand``
    without what fills up the last ones."""
    num_unaligned_recv_tokens_per_expert: Tensor | None
    """int32 ``[local experts]``, with ``do_expand``."""
    recv_src_metadata: Tensor
    """int32 ``[tokens that came, 2 + topk]``: the token's number among all ranks' (its rank times
    ``num_max_tokens_per_rank`` before its own), its row, and the slots of its experts; -1 for
    none."""
    way: ways.Handle
    recv_topk_idx: Tensor
    """int64 ``[num_recv_tokens, topk]``, this rank's experts counted from 0."""
    slots: Slots
    rank_idx: int

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """int32 ``[tokens, topk]``: ``num_max_tokens_per_rank`` times this rank, plus the token's
        number among those that go from this rank to the expert's; -1 for none, and for all but the
        last of a token's experts on one rank. Unknown over several nodes
        (:class:`~fabric_ray.moe.deepep.ways.UnknownValue`)."""
        if (unknown := self._at_forward("dst_buffer_slot_idx")) is not None:
            return unknown
        ranks = self.topk_idx.div(len(self.slots.counts), rounding_mode="floor").to(torch.int64)
        sent = ways.heads_of(ranks, self._num_ranks).gather(1, ranks.clamp(min=0))
        again = (ranks[:, :, None] == ranks[:, None, :]).triu(1).any(2)
        first = self.rank_idx * self.num_max_tokens_per_rank
        return torch.where((ranks < 0) | again, -1, sent + first).to(torch.int32)

    @cached_property
    def token_metadata_at_forward(self) -> Tensor | None:
        """``None``; unknown over several nodes."""
        return self._at_forward("token_metadata_at_forward")

    @cached_property
    def channel_linked_list(self) -> Tensor | None:
        """``None``; unknown over several nodes."""
        return self._at_forward("channel_linked_list")

    @property
    def _num_ranks(self) -> int:
        return self.num_experts // len(self.slots.counts)

    def _at_forward(self, name: str) -> Tensor | None:
        """What only the ranks that forward tokens between nodes know; ``None`` on one node."""
        if len(self.psum_num_recv_tokens_per_scaleup_rank) == self._num_ranks:
            return None
        return ways.UnknownValue.of(name, "recv_src_metadata", self.topk_idx.device)


def slots_of(topk_idx: Tensor, local: int, alignment: int) -> Slots:
    """
    Args:
        topk_idx: the local experts of received tokens, ``[rows, topk]``; -1 for experts of other
            ranks.
        local: number of local experts.
        alignment: of each expert's slots.
    """
    experts = topk_idx.flatten()
    counts = ways.tally(experts, local)
    filled = (counts + alignment - 1) // alignment * alignment
    nothing = counts.new_zeros(1)
    starts = torch.cat([nothing, filled.cumsum(0)])
    before = torch.cat([nothing, counts.cumsum(0)])
    # Experts of other ranks are last.
    expert, order = torch.where(experts < 0, local, experts).sort(stable=True)
    number = torch.arange(len(order), dtype=torch.int64, device=experts.device)
    slots = torch.empty_like(experts)
    slots[order] = torch.where(expert < local, (starts - before)[expert] + number, -1)
    return Slots(counts, starts, slots.view(topk_idx.shape))


def by_columns(scales: Tensor) -> Tensor:
    """The same, by columns that are aligned to 16 bytes."""
    rows, width = scales.shape
    stride = -(-rows // ALIGNED_SCALES) * ALIGNED_SCALES
    out = torch.empty_strided((rows, width), (1, stride), dtype=scales.dtype, device=scales.device)
    return out.copy_(scales)
