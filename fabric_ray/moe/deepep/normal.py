"""DeepEP's normal calls: each token goes once to each rank that hosts one of its experts.

It is an exchange whose experts are the ranks; which of a rank's experts a token is for, and their
weights, go with it. Ranks sum up their experts' answers, and combine adds up ranks. On several
nodes it is one for high throughput: a token goes once to each node, and one sum comes back.

Tensors may lie on a GPU. How many rows come makes the shapes of results, so that a dispatch that
makes a handle waits for that, as DeepEP's does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fabric_ray.errors import (
    FabricError,
    HandshakeError,
    InvalidArgument,
    PeerLost,
    Unsupported,
)
from fabric_ray.kernels import Launcher
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.comm import AnyExchange, Comm, Exchanges, Gather, agree
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


def check_together(device: torch.device, *tensors: Tensor | None) -> None:
    """
    Raises:
        InvalidArgument: one lies on another device.
    """
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise InvalidArgument(f"a tensor lies on {tensor.device}; move it to {device}")


def layout_of(topk_idx: Tensor, experts: int, ranks: int) -> Layout:
    """Counts ``topk_idx``, integers ``[tokens, topk]``, -1 for none. An expert that a token names
    twice counts twice, as DeepEP counts it.

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
    gone: frozenset[int] = frozenset()
    """Ranks that took no part when it was made; all others' rows are there."""

    @property
    def tokens(self) -> int:
        return len(self.ranks_of)


@dataclass
class _Lane:
    """An exchange, and the ranks whose answers it can take."""

    exchange: AnyExchange
    handle: Handle | None = None
    taken: int = 0
    """When, counted in dispatches."""
    room: int = 0
    """Rows that can come, where kernels make the exchange."""
    relied: Handle | None = None
    """By which rows were taken that a device didn't count yet."""

    @property
    def on_device(self) -> bool:
        return self.exchange.asynchronous

    def came(self, got: Dispatched, known: int | None) -> Dispatched:
        """Only the rows that there are; a device is waited for if their number isn't known."""
        if not self.on_device:
            return got
        self.room = len(got.x)
        if known is None:
            # What went wrong on the device makes no counts.
            self.exchange.check()
        rows = int(got.counts.sum()) if known is None else known
        # The rest of the room, for all that can come, is not to be kept with them.
        parts = {name: part[:rows].clone() for name, part in got.parts.items()}
        return replace(got, x=got.x[:rows].clone(), parts=parts)

    def answer(self, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The sums of answers ``[rows, width]``."""
        if self.on_device:
            room = y.new_empty(self.room, y.shape[1])
            room[: len(y)] = y
            y = room
        handle, self.handle = self.handle, None
        try:
            self.exchange.combine_send(y)
        except InvalidArgument:
            # Nothing was sent, and the routes are there still.
            self.handle = handle
            raise
        return self.exchange.combine_recv(dtype=dtype)


class Normal:
    """One rank's normal calls.

    Ranks agree on how many tokens they have at most before each dispatch that makes a handle, and
    buffers grow with it; with ``max_tokens`` that is settled, and nothing is gathered. All tensors
    lie on one device, for forms that differ are exchanges that all ranks make together. No call
    goes on without a rank that was lost unless exchanges shrink; over several nodes none does.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        max_tokens: int | None,
        ranks_per_node: int | None = None,
        launcher: Launcher | None = None,
        workers: int = 16,
    ) -> None:
        self._exchanges = exchanges
        self._launcher, self._workers = launcher, workers
        self.ranks_per_node = ranks_per_node or exchanges.comm.size()
        """All, if they are on one node."""
        self.gather = Gather(exchanges)
        self._fixed = max_tokens
        self._room = max_tokens or 0
        self._over_nodes = self.ranks_per_node < exchanges.comm.size()
        self._device: torch.device | None = None
        self._lanes: dict[Form, list[_Lane]] = {}
        self._taken = 0

    @property
    def comm(self) -> Comm:
        return self._exchanges.comm

    def reserve(self, tokens: int | FabricError, form: Form | None) -> int:
        """Makes room for as many tokens as any rank has; how many may come here at most.

        Raises:
            InvalidArgument: more than ``max_tokens``; or another device.
            HandshakeError: another rank has tokens of another kind, or failed.
        """
        if form is not None:
            tokens = self._elsewhere(form.device) or tokens
        if self._fixed is not None:
            if isinstance(tokens, FabricError):
                raise tokens
            if tokens > self._fixed:
                raise InvalidArgument(
                    f"{tokens} tokens, and max_tokens is {self._fixed}; send fewer at a time"
                )
            return self._fixed * self.comm.size()
        mine = tokens if isinstance(tokens, FabricError) else _said(tokens, form)
        said = [_heard(one) for one in agree(self.gather, mine) if one is not None]
        kinds = {kind for _, kind in said}
        if len(kinds) > 1:
            raise HandshakeError(f"ranks dispatch different tokens: {sorted(kinds)}", peer="")
        most = max(tokens for tokens, _ in said)
        # Also for a first dispatch in which no rank has tokens.
        if most > self._room or not self._room:
            self._renew(max(_LEAST_TOKENS, 1 << (most - 1).bit_length()))
        return sum(tokens for tokens, _ in said)

    def grow(self, max_tokens: int) -> None:
        """Raises ``max_tokens``, on all ranks together."""
        if max_tokens > self._room:
            self._renew(max_tokens)
            self._fixed = max_tokens

    def _renew(self, room: int) -> None:
        """Room for so many tokens of a rank, in other exchanges."""
        old = [lane.exchange for lanes in self._lanes.values() for lane in lanes]
        self._exchanges.forget(old)
        self._lanes.clear()
        self._room = room

    def send(
        self,
        form: Form,
        x: Tensor,
        parts: dict[str, Tensor],
        ranks_of: Tensor,
        handle: Handle | None = None,
    ) -> tuple[Dispatched, Handle]:
        """Dispatches tokens, and keeps the exchange for their answers.

        Raises:
            PeerLost: a rank was lost that was here when the handle was made. The exchange is over
                by then, so that ranks which hear of the loss later stay in step.
        """
        lane = self._lane(form)
        gone = self._follow(lane)
        lane.exchange.dispatch_send(x, ranks_of, **parts)
        got = lane.exchange.dispatch_recv()
        got = lane.came(got, None if handle is None else handle.rows)
        self._check_none_lost()
        if handle is not None:
            self._check_ways(handle, lane, len(got.x))
        lane.handle = handle or Handle(ranks_of, len(got.x), form.topk, gone)
        return got, lane.handle

    def receive(self, handle: Handle, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Adds up the ranks' answers ``[rows, width]`` to a handle's tokens.

        Routes lie ready after a dispatch with the handle, once. Otherwise they are made again by a
        dispatch of zeros.

        Raises:
            PeerLost: as :meth:`send`, when ways are made again.
        """
        for form, lanes in list(self._lanes.items()):
            for lane in lanes:
                if lane.handle is handle and (form.hidden, form.answers) == (y.shape[1], y.dtype):
                    return self._answered(lane, y[: handle.rows], dtype)
        if y.dtype not in SUMMED:
            raise InvalidArgument(f"answers of {y.dtype} can't be summed; use one of {[*SUMMED]}")
        form = Form(y.shape[1], y.dtype, handle.ranks_of.shape[1], device=y.device)
        nothing = y.new_zeros(handle.tokens, y.shape[1])
        lane = self._lane(form)
        self._follow(lane)
        lane.exchange.dispatch_send(nothing, handle.ranks_of)
        lane.room = len(lane.exchange.dispatch_recv().x)
        self._check_ways(handle, lane, handle.rows if lane.on_device else lane.room)
        return self._answered(lane, y[: handle.rows], dtype)

    def _answered(self, lane: _Lane, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        sums = lane.answer(y, dtype)
        self._check_none_lost()
        return sums

    def check(self) -> None:
        """As :meth:`AllToAll.check`, of all exchanges.

        Raises:
            PeerLost: a rank was lost without which sums are incomplete, or in whose place a handle
                has rows.
        """
        for lanes in list(self._lanes.values()):  # others may make more meanwhile
            for lane in lanes:
                lane.exchange.check()
                relied, lane.relied = lane.relied, None
                if relied is not None:
                    self._check_here_with(relied)
        self._check_none_lost()

    def _lane(self, form: Form) -> _Lane:
        """A free exchange, or a second one, or the one that was taken longer ago: every rank
        takes the same, for all make the same calls."""
        if (wrong := self._elsewhere(form.device)) is not None:
            raise wrong
        if self._over_nodes:
            self._check_all_here()
        self._check_none_lost()
        self._device = form.device
        lanes = self._lanes.setdefault(form, [])
        lane = next((lane for lane in lanes if lane.handle is None), None)
        if lane is None and len(lanes) < 2:
            lane = _Lane(self._make(form))
            lanes.append(lane)
        lane = lane or min(lanes, key=lambda one: one.taken)
        self._taken += 1
        lane.taken, lane.handle = self._taken, None
        return lane

    def _elsewhere(self, device: torch.device) -> InvalidArgument | None:
        if self._device in (None, device):
            return None
        return InvalidArgument(
            f"tensors lie on {device}, and those of earlier calls on {self._device}; move them "
            "there, or make another buffer on all ranks"
        )

    def _follow(self, lane: _Lane) -> frozenset[int]:
        """Ranks that take no part any more. A rank that one exchange lost is masked in all others,
        so that their rows have the same places."""
        if isinstance(lane.exchange, AllToAll):
            return self._exchanges.follow(lane.exchange)
        return frozenset(self._exchanges.masked)

    def _check_ways(self, handle: Handle, lane: _Lane, rows: int) -> None:
        """That what came lies where a handle has it; a device says so later."""
        self._check_here_with(handle)
        if lane.on_device:
            lane.relied = handle
        elif rows != handle.rows:
            raise InvalidArgument(
                f"{rows} rows came, and the handle has {handle.rows}; give the same dispatch's "
                "handle on all ranks"
            )

    def _check_here_with(self, handle: Handle) -> None:
        for rank, cause in self._exchanges.masked.items():
            if rank not in handle.gone:
                raise PeerLost(
                    f"rank {rank} was here when the handle was made, and takes no part any more: "
                    f"{cause}; its rows are missing, dispatch without the handle",
                    peer=f"rank {rank}",
                )

    def _check_none_lost(self) -> None:
        self._exchanges.check_whole()

    def _check_all_here(self) -> None:
        # DeepEP's calls have no place to say whose answers sums over several nodes are without.
        for rank, cause in self._exchanges.masked.items():
            raise PeerLost(
                f"rank {rank} takes no part any more: {cause}; make a new buffer of the ranks "
                "that are left",
                peer=f"rank {rank}",
            )

    def _make(self, form: Form) -> AnyExchange:
        shape: dict[str, Any] = {
            "experts": self.comm.size(),
            "topk": form.width,
            "hidden": form.hidden,
            "max_tokens": self._room,
            "dtype": form.dtype,
            "parts": form.parts,
            "answer_dtype": form.answers,
            "device": form.device,
            "launcher": self._launcher,
        }
        if self.ranks_per_node == self.comm.size():
            return self._exchanges.make(**shape)
        return self._exchanges.make_throughput(
            ranks_per_node=self.ranks_per_node, workers=self._workers, **shape
        )


def ranks_of(in_rank: Tensor, width: int) -> Tensor:
    """The ranks of each token in ascending order, -1 behind them: int64 ``[tokens, width]``."""
    ranks = in_rank.shape[1]
    numbers = torch.arange(ranks, dtype=torch.int64, device=in_rank.device)
    found = torch.where(in_rank, numbers, ranks).sort(1).values[:, :width]
    return torch.where(found < ranks, found, -1)


def _said(tokens: int, form: Form | None) -> bytes:
    return struct.pack("<q", tokens) + repr(form).encode()


def _heard(value: bytes) -> tuple[int, str]:
    if len(value) < 8:
        raise HandshakeError("a rank said nothing of its tokens; run the same release", peer="")
    return struct.unpack_from("<q", value)[0], value[8:].decode(errors="replace")
