"""The normal calls of DeepEP's ``Buffer``."""

from __future__ import annotations

import torch
from torch import Tensor

from fabric_ray.errors import FabricError, InvalidArgument
from fabric_ray.moe import rows
from fabric_ray.moe.deepep import ways
from fabric_ray.moe.deepep.event import EventOverlap, behind
from fabric_ray.moe.deepep.parcels import AnyTokens, form_of, padded, pair_of
from fabric_ray.moe.deepep.shared_calls import SharedCalls, wait_for
from fabric_ray.moe.deepep.sizes import Config
from fabric_ray.moe.deepep.ways import Handle


class NormalCalls(SharedCalls):
    """What :class:`Buffer` does of them."""

    rank: int
    group_size: int

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts where tokens go.

        Returns:
            int32 tokens for each rank ``[ranks]``; for each node ``[nodes]``, ``None`` if there is
            one; for each expert ``[experts]``; whether each token goes to each rank, bool
            ``[tokens, ranks]``; an event.
        """
        wait_for(previous_event)
        layout = ways.layout_of(topk_idx, num_experts, self.group_size)
        per_node = self._normal.ranks_per_node
        of_nodes = None
        if per_node < self.group_size:
            nodes = self.group_size // per_node
            in_node = layout.in_rank.view(len(layout.in_rank), nodes, per_node).any(2)
            of_nodes = in_node.sum(0).to(torch.int32)
        return (
            layout.tokens_per_rank,
            of_nodes,
            layout.tokens_per_expert,
            layout.in_rank,
            self._behind(async_finish, topk_idx),
        )

    def dispatch(
        self,
        x: AnyTokens,
        handle: Handle | tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        AnyTokens, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap
    ]:
        """Sends each token once to each rank that hosts one of its experts.

        On a GPU it runs on torch's current stream. On one node the host waits until all ranks have
        said how many rows they send, not for other streams, and with ``topk_idx`` for the rows of
        this call, whose experts are counted unless there is ``num_worst_tokens``. With a handle it
        waits for nothing; a loss is raised by the next call or by :meth:`check` then.

        Args:
            x: ``[tokens, hidden]``, or fp8 with scales; or four bits, as of DeepEP's ``hybrid-ep``
                branch: int32 ``[tokens, hidden / 8]``, int32 scales ``[tokens, hidden / 64]``, and
                float32 ``[tokens, ...]``. All tensors lie where it does.
            handle: of an earlier dispatch, to send other tokens the same way; then none of the
                layout, ``topk_idx`` and ``topk_weights`` is given.
            topk_idx: int64 ``[tokens, topk]``, -1 for none; without it tokens go by the layout.
            topk_weights: float32 ``[tokens, topk]``.
            expert_alignment: what the counts of experts are rounded up to.
            num_worst_tokens: rows of the results, whatever comes; further rows have no experts.

        Returns:
            The tokens in the order of their ranks, and of the tokens there; int64
            ``[rows, topk]``, this rank's experts counted from 0 and -1 for others'; their weights,
            0 for others'; the tokens of each local expert; a handle; an event. With a handle, all
            but tokens and event are ``None``.

        Raises:
            InvalidArgument: what doesn't fit, before tokens are sent.
        """
        wait_for(previous_event)
        if handle is not None:
            tokens, scales, shaped = pair_of(x)
            handle = Handle.of(handle)
            ways.check_together(tokens.device, handle.ranks_of, scales)
            if topk_idx is not None or topk_weights is not None:
                raise InvalidArgument("topk_idx and topk_weights are the handle's; leave them out")
            if len(tokens) != handle.tokens:
                raise InvalidArgument(
                    f"{len(tokens)} tokens, and the handle is for {handle.tokens}"
                )
            if 0 < num_worst_tokens < handle.rows:
                raise InvalidArgument(
                    f"{handle.rows} rows come, and num_worst_tokens is {num_worst_tokens}; raise it"
                )
            form, parts = form_of(tokens, scales, handle.ranks_of.shape[1])
            got, _ = self._normal.send(form, tokens, parts, handle.ranks_of, handle)
            received, _, _ = padded(got, num_worst_tokens or handle.rows, 0, 0)
            event = self._behind(async_finish, tokens, scales)
            return shaped(received), None, None, None, None, event

        try:
            tokens, scales, shaped = pair_of(x)
            ways.check_together(
                tokens.device,
                scales,
                topk_idx,
                topk_weights,
                num_tokens_per_rank,
                is_token_in_rank,
                num_tokens_per_expert,
            )
            layout = ways.checked_layout(
                tokens,
                num_tokens_per_rank,
                is_token_in_rank,
                num_tokens_per_expert,
                topk_idx,
                self.group_size,
            )
            if expert_alignment < 1:
                raise InvalidArgument(f"expert_alignment is {expert_alignment}; give at least 1")
            width = self.group_size if topk_idx is None else topk_idx.shape[1]
            width = min(width, self.group_size)
            form, parts = form_of(tokens, scales, width, topk_idx, topk_weights, origin=True)
            size: int | FabricError = len(tokens)
        except FabricError as error:
            self._normal.reserve(error, None)
            raise
        most = self._normal.reserve(size, form)
        if 0 < num_worst_tokens < most:
            raise InvalidArgument(
                f"{most} rows may come, and num_worst_tokens is {num_worst_tokens}; raise it"
            )
        parts["origin"] = self._normal.number(len(tokens), tokens.device)
        ranks_of = ways.ranks_of(layout.in_rank, width)
        got, made = self._normal.send(form, tokens, parts, ranks_of, in_rank=layout.in_rank)
        local = len(layout.tokens_per_expert) // self.group_size
        received, idx, weights = padded(
            got, num_worst_tokens or made.rows, self.rank * local, local
        )
        counts: list[int] = []
        if idx is None:
            found = self._normal.counted(layout.tokens_per_expert)
        elif not num_worst_tokens:
            found = self._normal.read(ways.tally(idx, local))
        if not num_worst_tokens:
            counts = [-(-n // expert_alignment) * expert_alignment for n in found]
        used = (scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)
        event = self._behind(async_finish, tokens, *used)
        return shaped(received), idx, weights, counts, made, event

    def combine(
        self,
        x: Tensor,
        handle: Handle | tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Adds up the ranks' answers, unweighted, and biases.

        Args:
            x: a rank's answer for each row of its dispatch, ``[rows, hidden]``; bfloat16, float16
                or float32.
            topk_weights: float32 ``[rows, topk]``, added up likewise by an exchange of their own.
            bias: of this rank's tokens, one or two ``[tokens, hidden]``.

        Returns:
            ``[tokens, hidden]``, added up in float32 and rounded once, but on several nodes each
            node's sum is rounded to the type of ``x`` as well; the weights or ``None``; an event.
        """
        wait_for(previous_event)
        handle = Handle.of(handle, 0 if topk_weights is None else topk_weights.shape[-1])
        where = x.device
        ways.check_together(where, handle.ranks_of)
        rows.check_rows(
            "answers", x, width=x.shape[-1], dtype=x.dtype, rows=handle.rows, device=where
        )
        if topk_weights is not None:
            rows.check_rows(
                "weights",
                topk_weights,
                width=handle.topk,
                dtype=torch.float32,
                rows=handle.rows,
                device=where,
            )
        sums, weights = self._sums(handle, x, bias), None
        if topk_weights is not None:
            weights = self._normal.receive(handle, topk_weights)
        biases = bias if isinstance(bias, tuple) else (bias,)
        return sums, weights, self._behind(async_finish, x, topk_weights, *biases)

    def _given_up(self) -> list[int]:
        """Ranks that take no part any more."""
        raise NotImplementedError

    def _behind(self, asynchronous: bool, first: Tensor, *others: Tensor | None) -> EventOverlap:
        """An event behind the call that read the tensors."""
        return behind(asynchronous, first, *others).naming(self._given_up)
