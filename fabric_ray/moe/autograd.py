"""Gradients through an exchange.

A dispatch copies tokens to their experts, so its gradient is a combine without weights. A combine
sums ``weight * answer``: the gradient of an answer is its weight times a dispatch of the sums'
gradients, and that of a weight is the product of the sum's gradient and the answer, which both lie
at the expert. Sums are all that answers come back as, so weights and their gradients take a narrow
exchange of their own, in the backward pass alone: a row of ``2 * topk`` words to each expert of a
token and one of ``topk`` words back, beside rows of the hidden dimension.

All of that holds for both modes. For high throughput weights are given to dispatch, since sums are
made on the way; backward passes dispatch without any, and multiply at the experts.

A pass backward costs what it costs forward, and the narrow exchange. Answers need not be kept where
they were summed up, ``topk`` of them for each token; they are kept at their experts, where autograd
has them anyway.

Gradients that lack a part are not gradients: a rank that is lost ends the pass with ``PeerLost``.
Where kernels make the exchange nothing waits for the device, and :meth:`Differentiable.check` says
so after the pass, before its gradients are used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import DecodeError, InvalidArgument, PeerLost
from fabric_ray.kernels import Launcher
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.throughput import ThroughputAllToAll
from fabric_ray.moe.tokens import Dispatched, RowPart

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class _Routing:
    """A dispatch: what its backward pass needs to go the same ways."""

    indices: Tensor
    tokens: int
    multiple: int
    expert_of_row: Tensor
    """int32 ``[rows]``; -1 for rows that fill up."""

    @property
    def filled(self) -> Tensor:
        return self.expert_of_row >= 0


@dataclass(frozen=True, eq=False)
class _Forward:
    """A dispatch whose answers are still to be summed up."""

    routing: _Routing
    weights: Tensor | None
    """Those that dispatch was given."""


class Differentiable:
    """One rank of an exchange for training: an :class:`AllToAll`, or with ``ranks_per_node`` a
    :class:`ThroughputAllToAll`, and a narrow one of the same kind for weights.

    All ranks run the same layers, forward and backward, whether they have tokens or not, and all
    or none of them need gradients of tokens and of weights. A rank whose graph ends before its
    dispatch (no token, no parameter that needs a gradient) leaves the others waiting.

    Args:
        engine: as for :class:`AllToAll`.
        rank: as for :class:`AllToAll`.
        ranks: as for :class:`AllToAll`.
        experts: as for :class:`AllToAll`.
        topk: as for :class:`AllToAll`.
        hidden: as for :class:`AllToAll`.
        max_tokens: as for :class:`AllToAll`.
        private_rows: as for :class:`AllToAll`.
        shared_rows: as for :class:`AllToAll`.
        timeout: as for :class:`AllToAll`.
        device: as for :class:`AllToAll`.
        launcher: as for :class:`AllToAll`.
        dtype: of tokens, answers and all gradients: float32, bfloat16 or float16.
        ranks_per_node: takes the high-throughput mode, with rank ``r`` on node
            ``r // ranks_per_node``; ``private_rows`` and ``shared_rows`` mean nothing then. Weights
            are given to :func:`dispatch`. Sums, those of gradients too, are made as
            :meth:`ThroughputAllToAll.combine_recv` says.
        channels: as for :class:`ThroughputAllToAll`, and so are the next three.
        chunk: of the rings.
        ring_chunks: of each ring.
        workers: thread blocks on ``device``.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        rank: int,
        ranks: int,
        experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        private_rows: int = 32,
        shared_rows: int | None = None,
        timeout: float = 30.0,
        device: torch.device | str | None = None,
        launcher: Launcher | None = None,
        ranks_per_node: int | None = None,
        channels: int = 2,
        chunk: int = 32,
        ring_chunks: int = 4,
        workers: int = 24,
    ) -> None:
        if dtype not in _SUMMED:
            raise InvalidArgument(f"gradients of {dtype} can't be summed; use one of {[*_SUMMED]}")
        sizes: dict[str, Any] = {
            "rank": rank,
            "ranks": ranks,
            "experts": experts,
            "topk": topk,
            "max_tokens": max_tokens,
            "timeout": timeout,
            "device": device,
            "launcher": launcher,
        }
        kind: type[AllToAll] | type[ThroughputAllToAll] = AllToAll
        if ranks_per_node is None:
            sizes |= {"private_rows": private_rows, "shared_rows": shared_rows}
        else:
            kind = ThroughputAllToAll
            rings = {"channels": channels, "chunk": chunk, "ring_chunks": ring_chunks}
            sizes |= {"ranks_per_node": ranks_per_node, "workers": workers, **rings}
        self.tokens = kind(engine, hidden=hidden, dtype=dtype, answer_dtype=dtype, **sizes)
        self.weights = kind(
            engine,
            hidden=topk,
            dtype=torch.float32,
            answer_dtype=torch.float32,
            parts=[RowPart("experts", topk, torch.int32)],
            **sizes,
        )
        self.dtype = dtype
        self._latest: _Forward | None = None
        self._open: _Routing | None = None
        self._open_weighted = False
        """Whether the exchange that is open multiplies answers by weights."""

    @property
    def local_experts(self) -> range:
        """The experts that this rank hosts."""
        return self.tokens.local_experts

    @property
    def device(self) -> torch.device:
        """What tokens and answers lie on."""
        return self.tokens.device

    def check(self) -> None:
        """Waits for what was launched on the device, and raises what went wrong there; without a
        device that is known already.

        Raises:
            PeerLost: a rank was lost: what was computed lacks its part.
            FabricError: as :meth:`AllToAll.check`.
        """
        self.tokens.check()
        self.weights.check()
        self._check_all_here()

    def mask(self, rank: int, cause: str = "it was masked") -> None:
        """Gives a rank up; the pass that is under way ends, and no further one begins."""
        self.tokens.mask(rank, cause)
        self.weights.mask(rank, cause)

    def descriptor(self) -> bytes:
        """What the other ranks need to know of this one."""
        first = self.tokens.descriptor()
        return _LENGTH.pack(len(first)) + first + self.weights.descriptor()

    def connect(self, descriptors: Iterable[bytes | None]) -> None:
        """Takes all ranks in by their descriptors.

        Raises:
            DecodeError: what isn't a descriptor.
            HandshakeError: a rank of another shape; the text lists what differs.
        """
        halves = [None if descriptor is None else _halves(descriptor) for descriptor in descriptors]
        self.tokens.connect([None if h is None else h[0] for h in halves])
        self.weights.connect([None if h is None else h[1] for h in halves])

    def _forward(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, multiple: int
    ) -> tuple[Dispatched, _Routing]:
        """A dispatch of a forward pass, zeros where rows fill up."""
        got = self._exchanged(x, indices, weights, multiple)
        local = got.experts()
        here = local + self.local_experts.start
        expert_of_row = torch.where(local < 0, -1, here).to(torch.int32)
        routing = _Routing(indices.clone(), len(x), multiple, expert_of_row)
        self._open, self._open_weighted = routing, weights is not None
        got.x.masked_fill_(~routing.filled[:, None], 0)
        return got, routing

    def _dispatch(self, x: Tensor, routing: _Routing) -> Tensor:
        """Rows for this rank's experts, zeros where they are filled up."""
        got = self._exchanged(x, routing.indices, None, routing.multiple)
        self._open, self._open_weighted = routing, False
        return got.x.masked_fill_(~routing.filled[:, None], 0)

    def _exchanged(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, multiple: int
    ) -> Dispatched:
        self._check_all_here()
        if isinstance(self.tokens, ThroughputAllToAll):
            self.tokens.dispatch_send(x.contiguous(), indices, weights=weights)
        else:
            self.tokens.dispatch_send(x.contiguous(), indices)
        got = self.tokens.dispatch_recv(multiple=multiple)
        self._check_all_here()
        return got

    def _combine(
        self, y: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Sums, by the weights that went with the tokens where they did."""
        self.tokens.combine_send(y.contiguous())
        self._open = None
        if isinstance(self.tokens, ThroughputAllToAll):
            sums = self.tokens.combine_recv(dtype=dtype)
        else:
            sums = self.tokens.combine_recv(weights, dtype=dtype)
        self._check_all_here()
        return sums

    def _check_weights(self, weights: Tensor, indices: Tensor) -> None:
        tokens, topk = indices.shape
        check_rows(
            "weights",
            weights,
            width=topk,
            dtype=torch.float32,
            rows=tokens,
            device=self.device,
        )

    def _check_all_here(self) -> None:
        for lost in (*self.tokens.lost, *self.weights.lost):
            raise PeerLost(
                f"rank {lost.rank} was lost at {lost.stage}: {lost.cause}; its part is missing, go "
                "back to a checkpoint and make the exchange anew",
                peer=f"rank {lost.rank}",
                transport="",
            )


def dispatch(
    exchange: Differentiable,
    x: Tensor,
    indices: Tensor,
    *,
    weights: Tensor | None = None,
    multiple: int = 1,
) -> Dispatched:
    """Tokens to the ranks of their experts; ``x`` of what is returned leads back to this one.

    Args:
        x: ``[tokens, hidden]``.
        indices: ``[tokens, topk]``, -1 for none.
        weights: float32 ``[tokens, topk]``, by which :func:`combine` sums answers up: given here or
            there, and for high throughput here.
        multiple: each expert's rows are filled up to a multiple, with zeros.

    Raises:
        InvalidArgument: what doesn't fit, before anything is sent.
        PeerLost: a rank was lost, then or before.
    """
    if weights is not None:
        if indices.ndim != 2:
            raise InvalidArgument(f"indices are {tuple(indices.shape)}; give [tokens, topk]")
        exchange._check_weights(weights, indices)
    _check_distinct(indices)
    parts: list[tuple[Dispatched, _Routing]] = []
    # What the caller does to them before combine is not what was sent.
    weights = None if weights is None else weights.clone()
    plain = None if weights is None else weights.detach()
    x_rows: Tensor = _Dispatch.apply(x, exchange, indices, plain, multiple, parts)
    got, routing = parts[0]
    exchange._latest = _Forward(routing, weights)
    return Dispatched(x=x_rows, parts=got.parts, counts=got.counts, starts=got.starts)


def combine(
    exchange: Differentiable,
    y: Tensor,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts' answers to the latest dispatch, summed up with weights: ``[tokens, hidden]``.

    Args:
        y: ``[rows, hidden]``, as dispatched.
        weights: float32 ``[tokens, topk]``; those of the dispatch, or one for each, if ``None``.
        dtype: of the sums; the exchange's if ``None``.

    Raises:
        InvalidArgument: what doesn't fit; or nothing was dispatched since the last combine.
        PeerLost: a rank was lost, then or before.
    """
    latest = exchange._latest
    if latest is None:
        raise InvalidArgument("nothing was dispatched since the last combine; dispatch first")
    if weights is not None:
        if latest.weights is not None:
            raise InvalidArgument("dispatch was given weights; leave them out here")
        if isinstance(exchange.tokens, ThroughputAllToAll):
            raise InvalidArgument(
                "sums are made on the way in the high-throughput mode; give weights to dispatch"
            )
        exchange._check_weights(weights, latest.routing.indices)
    # Gradients have as many rows as were dispatched.
    if y.ndim == 2 and len(y) > (rows := len(latest.routing.expert_of_row)):
        raise InvalidArgument(f"answers have {len(y)} rows, and {rows} were dispatched")
    by = latest.weights if weights is None else weights
    sums: Tensor = _Combine.apply(y, by, exchange, latest.routing, dtype)
    exchange._latest = None
    return sums


def _check_distinct(indices: Tensor) -> None:
    """An expert's row comes back once for each place that names it: its gradient would count twice
    (RS-1). A device refuses that itself.

    Raises:
        InvalidArgument: a token names an expert twice.
    """
    if indices.device.type != "cpu" or indices.ndim != 2:
        return
    ordered = indices.to(torch.int64).sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if again.any():
        token, place = again.nonzero()[0].tolist()
        raise InvalidArgument(
            f"token {token} goes to expert {int(ordered[token, place])} twice, which has no "
            "gradient; name each expert once"
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: Differentiable,
        indices: Tensor,
        weights: Tensor | None,
        multiple: int,
        parts: list[tuple[Dispatched, _Routing]],
    ) -> Tensor:
        got, routing = exchange._forward(x.detach(), indices, weights, multiple)
        ctx.exchange, ctx.routing = exchange, routing
        parts.append((got, routing))
        return got.x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, routing = ctx.exchange, ctx.routing
        if exchange._open is not routing or exchange._open_weighted:
            # Another dispatch came in between, or answers would be multiplied: the ways are gone
            # over again, with nothing.
            shape = routing.tokens, grads[0].shape[1]
            nothing = torch.zeros(shape, dtype=exchange.dtype, device=exchange.device)
            exchange._dispatch(nothing, routing)
        return exchange._combine(grads[0]), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weights: Tensor | None,
        exchange: Differentiable,
        routing: _Routing,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.exchange, ctx.routing = exchange, routing
        ctx.save_for_backward(y, weights)
        plain = None if weights is None else weights.detach()
        if exchange._open is not routing:
            raise InvalidArgument("a backward pass came between dispatch and combine")
        return exchange._combine(y.detach(), plain, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, routing = ctx.exchange, ctx.routing
        y, weights = ctx.saved_tensors
        of_sums = exchange._dispatch(grads[0].to(exchange.dtype), routing)
        if weights is None:
            return of_sums, None, None, None, None
        exchange.weights.dispatch_send(
            weights.contiguous(), routing.indices, experts=routing.indices.to(torch.int32)
        )
        got = exchange.weights.dispatch_recv(multiple=routing.multiple)
        # Which of its token's experts a row's is; nowhere in rows that fill up.
        place = (got.parts["experts"] == routing.expert_of_row[:, None]) & routing.filled[:, None]
        weight = torch.where(place, got.x, 0.0).sum(1, keepdim=True)
        of_weights = None
        if ctx.needs_input_grad[1]:
            # In one order everywhere: a GPU's own sum has other bits than the host's.
            products = _row_sums(of_sums.float() * y[: len(of_sums)].float())
            exchange.weights.combine_send(torch.where(place, products[:, None], 0.0))
            of_weights = exchange.weights.combine_recv()
        exchange._check_all_here()
        return (of_sums.float() * weight).to(y.dtype), of_weights, None, None, None


def _row_sums(x: Tensor) -> Tensor:
    """Sums of float32 ``[rows, width]`` over the width: its second half is added to its first until
    one is left, so that a row's bits depend on its numbers alone."""
    n = x.shape[1]
    while n > 1:
        half = 1 << ((n - 1).bit_length() - 1)
        added = x[:, : n - half] + x[:, half:n]
        x, n = torch.cat([added, x[:, n - half : half]], 1), half
    return x[:, 0]


def _halves(descriptor: bytes) -> tuple[bytes, bytes]:
    if len(descriptor) < _LENGTH.size:
        raise DecodeError(f"{len(descriptor)} bytes are no descriptor of an exchange for training")
    end = _LENGTH.size + int(_LENGTH.unpack_from(descriptor)[0])
    return descriptor[_LENGTH.size : end], descriptor[end:]
