"""How a layer's tokens go to their experts and come back as sums, over each kind of exchange."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from fabric_ray.errors import PeerLost
from fabric_ray.moe import autograd
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.autograd import Differentiable
from fabric_ray.moe.throughput import ThroughputAllToAll
from fabric_ray.moe.tokens import Dispatched

Exchange: TypeAlias = AllToAll | ThroughputAllToAll | Differentiable


def carrier(exchange: Exchange) -> AllToAll | ThroughputAllToAll:
    """What tokens go through."""
    return exchange.tokens if isinstance(exchange, Differentiable) else exchange


class Pass:
    """One exchange after the other, without gradients: calls ``send``, ``receive``, ``combine``.

    Answers of an ``AllToAll`` come back one by one, and are weighted where they are summed. Over
    nodes weights go with tokens, and sums are made on the way.

    Args:
        exchange: of the tokens.
        shrink: go on without lost ranks, through an ``AllToAll``.
    """

    strides = True
    """Whether each expert's rows can begin at a multiple of a stride."""

    def __init__(self, exchange: AllToAll | ThroughputAllToAll, *, shrink: bool = False) -> None:
        self._exchange = exchange
        self._shrink = shrink and isinstance(exchange, AllToAll)

    def send(self, x: Tensor, indices: Tensor, weights: Tensor) -> None:
        """Tokens ``[tokens, hidden]``, with experts and weights ``[tokens, topk]``."""
        self._check_whole()
        if isinstance(self._exchange, AllToAll):
            self._weights = weights
            self._exchange.dispatch_send(x.contiguous(), indices)
        else:
            self._exchange.dispatch_send(x.contiguous(), indices, weights=weights)

    def receive(self, stride: int | None) -> Dispatched:
        """What came; each expert's rows begin at a multiple of ``stride``."""
        return self._exchange.dispatch_recv(stride=stride)

    def combine(self, y: Tensor) -> Tensor:
        """The weighted sums of answers, float32 ``[tokens, hidden]``."""
        self._exchange.combine_send(y)
        if not isinstance(self._exchange, AllToAll):
            return self._exchange.combine_recv(dtype=torch.float32)
        sums = self._exchange.combine_recv(self._weights, dtype=torch.float32)
        self._check_whole()
        return sums

    def _check_whole(self) -> None:
        """That sums lack no rank's answers (RS-1). An exchange over nodes says once that it lost a
        rank and goes on; a layer, which has no place to say so, doesn't."""
        for lost in () if self._shrink else self._exchange.lost:
            raise PeerLost(
                f"rank {lost.rank} was lost: {lost.cause}; its experts are missing, admit its next "
                "incarnation or make the exchange anew",
                peer=f"rank {lost.rank}",
            )


class TrainedPass(Pass):
    """With gradients. Nothing runs while tokens are on their way: autograd takes a dispatch as one
    operation."""

    strides = False

    def __init__(self, exchange: Differentiable) -> None:
        self._with_gradients = exchange

    def send(self, x: Tensor, indices: Tensor, weights: Tensor) -> None:
        self._given = x, indices, weights

    def receive(self, stride: int | None) -> Dispatched:
        x, indices, weights = self._given
        return autograd.dispatch(self._with_gradients, x, indices, weights=weights)

    def combine(self, y: Tensor) -> Tensor:
        return autograd.combine(self._with_gradients, y, dtype=torch.float32)


def pass_over(exchange: Exchange, *, shrink: bool = False) -> Pass:
    """For an exchange of any kind."""
    if isinstance(exchange, Differentiable):
        return TrainedPass(exchange)
    return Pass(exchange, shrink=shrink)
