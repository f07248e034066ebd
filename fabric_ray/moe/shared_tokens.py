"""Ranks that share tokens, as those of a data-parallel group do in pplx's interfaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe.exchanges import Exchanges
from fabric_ray.moe.tokens import RowPart


class SharedTokens:
    """Neighbouring ranks that are given the same tokens: each dispatches some of them, and all get
    the sums of all. All ranks make it together.

    Args:
        ranks: how many share tokens.
        max_tokens: of such a group, at most.
        hidden: elements of a sum.
        options: ``device`` and ``launcher``, as for :class:`fabric_ray.moe.AllToAll`.

    Raises:
        InvalidArgument: they don't divide the ranks of all.
    """

    def __init__(
        self, exchanges: Exchanges, ranks: int, *, max_tokens: int, hidden: int, **options: Any
    ) -> None:
        size, rank = exchanges.comm.size(), exchanges.comm.rank()
        if ranks < 1 or size % ranks:
            raise InvalidArgument(f"dp_size is {ranks}, and there are {size} ranks; divide them")
        self._exchanges = exchanges
        self._ranks, self._place = ranks, rank % ranks
        self.most = -(-max_tokens // ranks)
        """Tokens that one of them dispatches, at most."""
        self.of_all = size // ranks * max_tokens
        """Tokens that all ranks dispatch, at most."""
        self._max_tokens = max_tokens
        if ranks > 1:
            self._exchange = exchanges.make(
                experts=size,
                topk=ranks,
                hidden=hidden,
                max_tokens=self.most,
                dtype=torch.float32,
                parts=[RowPart("number", 1, torch.int32)],
                **options,
            )
            where = self._exchange.device
            first = rank - self._place
            self._group = torch.arange(first, first + ranks, dtype=torch.int64, device=where)

    @property
    def alone(self) -> bool:
        """Whether each rank has tokens of its own."""
        return self._ranks == 1

    def check(self, tokens: int) -> None:
        """
        Raises:
            InvalidArgument: more tokens than ``max_tokens``: other ranks have no room for them.
        """
        if tokens > self._max_tokens:
            raise InvalidArgument(
                f"{tokens} tokens, and max_num_tokens is {self._max_tokens}; send fewer at a time"
            )

    def mine(self, tensor: Tensor) -> Tensor:
        """The rows of tokens that this rank dispatches."""
        return tensor if self.alone else tensor[self._place :: self._ranks].contiguous()

    def share(self, sums: Tensor, tokens: int) -> Tensor:
        """The sums of all ``tokens``, from those of :meth:`mine`: float32 ``[tokens, hidden]``.

        Raises:
            PeerLost: a rank was lost.
        """
        where = sums.device
        count = len(range(self._place, tokens, self._ranks))
        numbers = torch.arange(1, tokens + 1, dtype=torch.int32, device=where)
        self._exchanges.check_whole()
        self._exchanges.follow(self._exchange)
        to_all = self._group.expand(count, self._ranks).contiguous()
        number = self.mine(numbers)[:, None]
        self._exchange.dispatch_send(sums[:count].contiguous(), to_all, number=number)
        got = self._exchange.dispatch_recv()
        self._exchanges.check_whole()
        row = torch.arange(len(got.x), dtype=torch.int64, device=where)
        # From 1, and rows that nothing came for go behind all others.
        number = got.parts["number"][:, 0].to(torch.int64)
        there = (row < got.counts[:1]) & (number > 0) & (number <= tokens)
        out = sums.new_zeros(tokens + 1, sums.shape[1])
        out[torch.where(there, number - 1, tokens)] = got.x
        return out[:tokens]


def bound(bound_m: Tensor | None, tokens: int, asynchronous: bool) -> int:
    """How many of the tokens there are: those of ``bound_m``, or all where a device has it, whose
    number isn't read.

    Raises:
        InvalidArgument: there are not as many.
    """
    if bound_m is not None and bound_m.numel() != 1:
        raise InvalidArgument(f"bound_m has {bound_m.numel()} elements; give one")
    if bound_m is None or asynchronous:
        return tokens
    found = int(bound_m)
    if not 0 <= found <= tokens:
        raise InvalidArgument(f"bound_m is {found}, and there are {tokens} tokens")
    return found


def experts_within(bound_m: Tensor | None, indices: Tensor, asynchronous: bool) -> Tensor:
    """The experts of the tokens that there are, int64; -1 of those beyond on a device."""
    experts = indices[: bound(bound_m, len(indices), asynchronous)].to(torch.int64)
    if bound_m is None or not asynchronous:
        return experts
    number = torch.arange(len(experts), dtype=torch.int64, device=experts.device)
    return torch.where(number[:, None] < bound_m.to(torch.int64), experts, -1)
