"""How a layer's tokens go to their experts and come back as sums, over each kind of exchange."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fabric_ray.errors import PeerLost
from fabric_ray.moe import autograd
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.autograd import Differentiable
from fabric_ray.moe.throughput import ThroughputAllToAll
from fabric_ray.moe.tokens import Dispatched, RankLoss

Exchange: TypeAlias = AllToAll | ThroughputAllToAll | Differentiable


class Pass(Protocol):
    """One exchange after the other; calls in this order."""

    @property
    def strides(self) -> bool:
        """Whether each expert's rows can begin at a multiple of a stride."""

    def send(self, x: Tensor, indices: Tensor, weights: Tensor) -> None:
        """Tokens ``[tokens, hidden]``, with experts and weights ``[tokens, topk]``."""

    def receive(self, stride: int | None) -> Dispatched:
        """What came; each expert's rows begin at a multiple of ``stride``."""

    def combine(self, y: Tensor) -> Tensor:
        """The weighted sums of answers, float32 ``[tokens, hidden]``."""


def carrier(exchange: Exchange) -> AllToAll | ThroughputAllToAll:
    """What tokens go through."""
    return exchange.tokens if isinstance(exchange, Differentiable) else exchange


def pass_over(exchange: Exchange, *, shrink: bool = False) -> Pass:
    """For an exchange of any kind; with ``shrink`` an ``AllToAll`` goes on without lost ranks."""
    if isinstance(exchange, Differentiable):
        return _Trained(exchange)
    if isinstance(exchange, ThroughputAllToAll):
        return _Hierarchical(exchange)
    return _Direct(exchange, shrink)


def _lost(lost: RankLoss) -> PeerLost:
    return PeerLost(
        f"rank {lost.rank} was lost: {lost.cause}; its experts are missing, admit its next "
        "incarnation or make the exchange anew",
        peer=f"rank {lost.rank}",
    )


class _Direct:
    """Answers come back one by one, and are weighted where they are summed."""

    strides = True

    def __init__(self, exchange: AllToAll, shrink: bool) -> None:
        self._exchange, self._shrink = exchange, shrink

    def _check_whole(self) -> None:
        """That sums lack no rank's answers (RS-1)."""
        for lost in () if self._shrink else self._exchange.lost:
            raise _lost(lost)

    def send(self, x: Tensor, indices: Tensor, weights: Tensor) -> None:
        self._check_whole()
        self._weights = weights
        self._exchange.dispatch_send(x.contiguous(), indices)

    def receive(self, stride: int | None) -> Dispatched:
        return self._exchange.dispatch_recv(stride=stride)

    def combine(self, y: Tensor) -> Tensor:
        self._exchange.combine_send(y)
        sums = self._exchange.combine_recv(self._weights, dtype=torch.float32)
        self._check_whole()
        return sums


class _Hierarchical:
    """Weights go with tokens, and sums are made on the way. The exchange says once that it lost a
    rank and goes on; a layer, which has no place to say so, doesn't."""

    strides = True

    def __init__(self, exchange: ThroughputAllToAll) -> None:
        self._exchange = exchange

    def send(self, x: Tensor, indices: Tensor, weights: Tensor) -> None:
        for lost in self._exchange.lost:
            raise _lost(lost)
        self._exchange.dispatch_send(x.contiguous(), indices, weights=weights)

    def receive(self, stride: int | None) -> Dispatched:
        return self._exchange.dispatch_recv(stride=stride)

    def combine(self, y: Tensor) -> Tensor:
        self._exchange.combine_send(y)
        return self._exchange.combine_recv(dtype=torch.float32)


class _Trained:
    """With gradients. Nothing runs while tokens are on their way: autograd takes a dispatch as one
    operation."""

    strides = False

    def __init__(self, exchange: Differentiable) -> None:
        self._exchange = exchange

    def send(self, x: Tensor, indices: Tensor, weights: Tensor) -> None:
        self._given = x, indices, weights

    def receive(self, stride: int | None) -> Dispatched:
        x, indices, weights = self._given
        return autograd.dispatch(self._exchange, x, indices, weights=weights)

    def combine(self, y: Tensor) -> Tensor:
        return autograd.combine(self._exchange, y, dtype=torch.float32)
