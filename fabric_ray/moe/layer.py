"""The experts of a layer, divided among the ranks of an exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fabric_ray.errors import PeerLost
from fabric_ray.moe import autograd
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.autograd import Differentiable
from fabric_ray.moe.throughput import ThroughputAllToAll
from fabric_ray.moe.tokens import Dispatched

Exchange: TypeAlias = AllToAll | ThroughputAllToAll | Differentiable


class ParallelExperts(nn.ModuleDict):
    """The experts that this rank hosts, by number, and the way to all others. Routers and shared
    experts stay outside. All ranks call it together; layers may share an exchange.

    Once a rank is lost or masked, passes raise ``PeerLost``. With ``shrink`` and an ``AllToAll``
    they leave that rank's experts out: :attr:`AllToAll.lost` names it. On a device the pass after
    the loss raises. Through a :class:`~fabric_ray.moe.autograd.Differentiable` gradients flow.

    Where kernels make the exchange (``AllToAll(device=...)``), nothing waits for the device: each
    expert computes as many rows as it could get, and a pass can be captured into a CUDA graph.
    Call :meth:`AllToAll.check` before relying on what came of it.

    Args:
        exchange: of the layer's sizes; its tokens and answers have one dtype, ``parts`` none.
        make: makes the expert of a number: ``[rows, hidden]`` to the same, each row by itself.
        max_tokens: that the exchange takes at a time.
        shrink: go on without the experts of lost ranks, through an ``AllToAll``.
    """

    def __init__(
        self,
        exchange: Exchange,
        make: Callable[[int], nn.Module],
        *,
        max_tokens: int,
        shrink: bool = False,
    ) -> None:
        super().__init__({str(number): make(number) for number in exchange.local_experts})
        self.exchange, self.max_tokens = exchange, max_tokens
        self._shrink = shrink and isinstance(exchange, AllToAll)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums of experts' answers, ``[tokens, hidden]``, made in float32.

        Args:
            tokens: ``[tokens, hidden]``, at most ``max_tokens``; none are fine.
            chosen: int64 ``[tokens, topk]``, the experts of each token; -1 for none.
            weights: ``[tokens, topk]``.

        Raises:
            InvalidArgument: sizes that the exchange doesn't take; nothing was sent.
            PeerLost: a rank was lost, then or before.
        """
        weights = weights.float()
        if isinstance(self.exchange, Differentiable):
            got = autograd.dispatch(self.exchange, tokens, chosen, weights=weights)
            sums = autograd.combine(self.exchange, self._answers(got), dtype=torch.float32)
        else:
            sums = self._exchanged(self.exchange, tokens.contiguous(), chosen, weights)
        return sums.to(tokens.dtype)

    def _exchanged(
        self,
        exchange: AllToAll | ThroughputAllToAll,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
    ) -> Tensor:
        self._check_whole(exchange)
        # Where it isn't known how many rows come there is room for all, and all are computed.
        stride = exchange.ranks * self.max_tokens if exchange.asynchronous else None
        if isinstance(exchange, AllToAll):
            exchange.dispatch_send(tokens, chosen)
            exchange.combine_send(self._answers(exchange.dispatch_recv(stride=stride), stride))
            sums = exchange.combine_recv(weights, dtype=torch.float32)
            self._check_whole(exchange)
            return sums
        exchange.dispatch_send(tokens, chosen, weights=weights)
        exchange.combine_send(self._answers(exchange.dispatch_recv(stride=stride), stride))
        return exchange.combine_recv(dtype=torch.float32)

    def _answers(self, got: Dispatched, stride: int | None = None) -> Tensor:
        answers = torch.empty(got.x.shape, dtype=got.x.dtype, device=got.x.device)
        for here, expert in enumerate(self.values()):
            of = got.of(here) if stride is None else slice(here * stride, (here + 1) * stride)
            answers[of] = expert(got.x[of])
        return answers

    def _check_whole(self, exchange: AllToAll | ThroughputAllToAll) -> None:
        """That sums lack no rank's answers (RS-1). An exchange over nodes says once that it lost a
        rank and goes on; a layer, which has no place to say so, doesn't."""
        for lost in () if self._shrink else exchange.lost:
            raise PeerLost(
                f"rank {lost.rank} was lost: {lost.cause}; its experts are missing, admit its next "
                "incarnation or make the exchange anew",
                peer=f"rank {lost.rank}",
            )
