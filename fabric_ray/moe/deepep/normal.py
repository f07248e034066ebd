"""DeepEP's normal calls: each token goes once to each rank that hosts one of its experts.

It is an exchange whose experts are the ranks; which of a rank's experts a token is for, and their
weights, go with it. Ranks sum up their experts' answers, and combine adds up ranks. On several
nodes it is one for high throughput: a token goes once to each node, and one sum comes back.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from fabric_ray.errors import (
    FabricError,
    HandshakeError,
    InvalidArgument,
    PeerLost,
    Unsupported,
)
from fabric_ray.moe.comm import AnyExchange, Comm, Exchanges, agree
from fabric_ray.moe.deepep.parcels import SUMMED, Form
from fabric_ray.moe.tokens import Dispatched

_LEAST_TOKENS = 128


@dataclass(frozen=True)
class Layout:
    """How many tokens go where."""

    tokens_per_rank: Tensor
    """int32 ``[ranks]``."""
    tokens_per_expert: Tensor
    """int32 ``[experts]``."""
    in_rank: Tensor
    """bool ``[tokens, ranks]``."""


def check_host(tensor: Tensor) -> None:
    """
    Raises:
        Unsupported: it lies on a device.
    """
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"normal calls take host tensors, and this one lies on {tensor.device}: how many rows "
            "come makes the shapes of results, and whoever waits for that waits for the device; "
            "move it to the CPU, or use low-latency calls"
        )


def layout_of(topk_idx: Tensor, experts: int, ranks: int) -> Layout:
    """Counts ``topk_idx``, integers ``[tokens, topk]``, -1 for none.

    Raises:
        InvalidArgument: experts that don't spread over ranks evenly, or that there aren't.
    """
    if experts < 1 or experts % ranks:
        raise InvalidArgument(f"{experts} experts can't be spread over {ranks} ranks evenly")
    if topk_idx.ndim != 2 or topk_idx.dtype.is_floating_point:
        shape = tuple(topk_idx.shape)
        raise InvalidArgument(f"indices are {topk_idx.dtype} {shape}; give integers [tokens, topk]")
    idx = topk_idx.to(torch.int64)
    if idx.numel() and not -1 <= int(idx.min()) <= int(idx.max()) < experts:
        raise InvalidArgument(
            f"experts {int(idx.min())} to {int(idx.max())} are named, and there are {experts}; "
            "-1 is for none"
        )
    chosen = torch.nn.functional.one_hot(idx + 1, experts + 1)[:, :, 1:].sum(1)
    in_rank = chosen.view(len(idx), ranks, experts // ranks).sum(2) > 0
    return Layout(
        tokens_per_rank=in_rank.sum(0).to(torch.int32),
        tokens_per_expert=chosen.sum(0).to(torch.int32),
        in_rank=in_rank,
    )


def checked_layout(
    x: Tensor,
    per_rank: Tensor | None,
    in_rank: Tensor | None,
    per_expert: Tensor | None,
    topk_idx: Tensor | None,
    ranks: int,
) -> Layout:
    """What :func:`layout_of` counted, as a dispatch of ``x`` is given it.

    Raises:
        Unsupported: experts that aren't named.
        InvalidArgument: a layout of other indices, or of other tokens.
    """
    if topk_idx is None:
        raise Unsupported("experts are counted from topk_idx here; give it, or a handle")
    if per_rank is None or in_rank is None or per_expert is None:
        raise InvalidArgument("a dispatch takes what get_dispatch_layout counted, or a handle")
    layout = layout_of(topk_idx, len(per_expert), ranks)
    if len(topk_idx) != len(x):
        raise InvalidArgument(f"{len(topk_idx)} rows of topk_idx for {len(x)} tokens")
    if not (
        torch.equal(layout.in_rank, in_rank)
        and torch.equal(layout.tokens_per_rank, per_rank.to(torch.int32))
        and torch.equal(layout.tokens_per_expert, per_expert.to(torch.int32))
    ):
        raise InvalidArgument("the layout isn't that of topk_idx; call get_dispatch_layout")
    return layout


@dataclass(frozen=True, eq=False)
class Handle:
    """Where the tokens of a dispatch went; later calls may use it any number of times."""

    ranks_of: Tensor
    """int64 ``[tokens, most ranks of a token]``; -1 for none."""
    rows: int
    """Rows that came here."""
    topk: int

    @property
    def tokens(self) -> int:
        return len(self.ranks_of)


@dataclass
class _Lane:
    """An exchange, and whose answers it can take."""

    exchange: AnyExchange
    handle: Handle | None = None
    taken: int = 0
    """When, counted in dispatches."""


class Normal:
    """One rank's normal calls.

    Ranks agree on how many tokens they have at most before each dispatch that makes a handle, and
    buffers grow with it; with ``max_tokens`` that is settled, and nothing is gathered.
    """

    def __init__(
        self, exchanges: Exchanges, max_tokens: int | None, ranks_per_node: int | None = None
    ) -> None:
        self._exchanges = exchanges
        self.ranks_per_node = ranks_per_node or exchanges.comm.size()
        """All, if they are on one node."""
        self._fixed = max_tokens
        self._room = max_tokens or 0
        self._lanes: dict[Form, list[_Lane]] = {}
        self._taken = 0

    @property
    def comm(self) -> Comm:
        return self._exchanges.comm

    def reserve(self, tokens: int | FabricError, form: Form | None) -> int:
        """Makes room for as many tokens as any rank has; how many may come here at most.

        Raises:
            InvalidArgument: more than ``max_tokens``.
            HandshakeError: another rank has tokens of another kind, or failed.
        """
        if self._fixed is not None:
            if isinstance(tokens, FabricError):
                raise tokens
            if tokens > self._fixed:
                raise InvalidArgument(
                    f"{tokens} tokens, and max_tokens is {self._fixed}; send fewer at a time"
                )
            return self._fixed * self.comm.size()
        mine = tokens if isinstance(tokens, FabricError) else _said(tokens, form)
        said = [_heard(one) for one in agree(self.comm, mine)]
        kinds = {kind for _, kind in said}
        if len(kinds) > 1:
            raise HandshakeError(f"ranks dispatch different tokens: {sorted(kinds)}", peer="")
        most = max(tokens for tokens, _ in said)
        if most > self._room:
            old = [lane.exchange for lanes in self._lanes.values() for lane in lanes]
            self._exchanges.forget(old)
            self._lanes.clear()
            self._room = max(_LEAST_TOKENS, 1 << (most - 1).bit_length())
        return sum(tokens for tokens, _ in said)

    def send(
        self,
        form: Form,
        x: Tensor,
        parts: dict[str, Tensor],
        ranks_of: Tensor,
        handle: Handle | None = None,
    ) -> tuple[Dispatched, Handle]:
        """Dispatches tokens, and keeps the exchange for their answers."""
        self._check_all_here()
        lane = self._lane(form)
        lane.exchange.dispatch_send(x, ranks_of, **parts)
        got = lane.exchange.dispatch_recv()
        lane.handle = handle or Handle(ranks_of, len(got.x), form.topk)
        return got, lane.handle

    def receive(self, handle: Handle, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Adds up the ranks' answers ``[rows, width]`` to a handle's tokens.

        Routes lie ready after a dispatch with the handle, once. Otherwise they are made again by a
        dispatch of zeros.
        """
        for form, lanes in self._lanes.items():
            for lane in lanes:
                if lane.handle is handle and (form.hidden, form.answers) == (y.shape[1], y.dtype):
                    lane.handle = None
                    return _answer(lane.exchange, y, dtype)
        if y.dtype not in SUMMED:
            raise InvalidArgument(f"answers of {y.dtype} can't be summed; use one of {[*SUMMED]}")
        form = Form(y.shape[1], y.dtype, handle.ranks_of.shape[1])
        self._check_all_here()
        lane = self._lane(form)
        lane.exchange.dispatch_send(
            torch.zeros(handle.tokens, y.shape[1], dtype=y.dtype), handle.ranks_of
        )
        lane.exchange.dispatch_recv()
        return _answer(lane.exchange, y, dtype)

    def _lane(self, form: Form) -> _Lane:
        """A free exchange, or a second one, or the one that was taken longer ago: every rank
        takes the same, for all make the same calls."""
        lanes = self._lanes.setdefault(form, [])
        lane = next((lane for lane in lanes if lane.handle is None), None)
        if lane is None and len(lanes) < 2:
            lane = _Lane(self._make(form))
            lanes.append(lane)
        lane = lane or min(lanes, key=lambda one: one.taken)
        self._taken += 1
        lane.taken, lane.handle = self._taken, None
        return lane

    def _check_all_here(self) -> None:
        # DeepEP's calls have no place to say whose answers sums over several nodes are without.
        if self.ranks_per_node < self.comm.size():
            for rank, cause in self._exchanges.masked.items():
                raise PeerLost(
                    f"rank {rank} takes no part any more: {cause}; make a new buffer of the ranks "
                    "that are left",
                    peer=f"rank {rank}",
                )

    def _make(self, form: Form) -> AnyExchange:
        shape = {
            "experts": self.comm.size(),
            "topk": form.width,
            "hidden": form.hidden,
            "max_tokens": self._room,
            "dtype": form.dtype,
            "parts": form.parts,
            "answer_dtype": form.answers,
        }
        if self.ranks_per_node == self.comm.size():
            return self._exchanges.make(**shape)
        return self._exchanges.make_throughput(ranks_per_node=self.ranks_per_node, **shape)


def _answer(exchange: AnyExchange, y: Tensor, dtype: torch.dtype | None) -> Tensor:
    exchange.combine_send(y)
    return exchange.combine_recv(dtype=dtype)


def ranks_of(in_rank: Tensor, width: int) -> Tensor:
    """The ranks of each token in ascending order, -1 behind them: int64 ``[tokens, width]``."""
    ranks = in_rank.shape[1]
    found = torch.where(in_rank, torch.arange(ranks), ranks).sort(1).values[:, :width]
    return torch.where(found < ranks, found, -1)


def _said(tokens: int, form: Form | None) -> bytes:
    return struct.pack("<q", tokens) + repr(form).encode()


def _heard(value: bytes) -> tuple[int, str]:
    if len(value) < 8:
        raise HandshakeError("a rank said nothing of its tokens; run the same release", peer="")
    return struct.unpack_from("<q", value)[0], value[8:].decode(errors="replace")
