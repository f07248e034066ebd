"""DeepEP's low-latency calls: each expert's tokens in a part of their own, of fixed size."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Launcher
from fabric_ray.moe import cast
from fabric_ray.moe.all_to_all import AllToAll
from fabric_ray.moe.deepep.event import keep
from fabric_ray.moe.deepep.low_latency_form import BLOCK, Form, Statistics, check_tokens
from fabric_ray.moe.deepep.parcels import Tokens
from fabric_ray.moe.deepep.sizes import PRIVATE_ROWS
from fabric_ray.moe.exchanges import Exchanges
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.tokens import Outgoing, Room

ALIVE = 2
"""Dispatches whose routes lie ready, and hooks that may be waited for at a time."""

Handle: TypeAlias = tuple[Tensor, Tensor, int, int, int]
"""``src_info`` int32 ``[local experts, M * ranks]``: each row's token at its source;
``layout_range`` int64 ``[local experts, ranks]``: where a source's rows begin, in the upper 32
bits, and how many they are; ``M``; hidden; experts."""
_COUNT = (1 << 32) - 1
"""The lower bits of ``layout_range``."""
_HANDLE = ("src_info", "layout_range", "num_max_dispatch_tokens_per_rank", "hidden", "num_experts")
Hook: TypeAlias = Callable[[], None]


@dataclass
class Slot:
    """One of the exchanges that dispatches alternate between."""

    form: Form
    exchange: AllToAll
    origin: tuple[Tensor, Tensor]
    """int32 ``[max_tokens, 1]`` each: this rank, from 1, for rows of a rank that is lost on the way
    come as zeros; and the token's number."""
    handle: Handle | None = None
    pending: str | None = None
    """What the hook that was handed out last is for, until it is called."""

    def serves(self, handle: Handle) -> bool:
        """Whether the routes of a handle lie ready here."""
        return self.handle is not None and self.handle[0] is handle[0]

    def origin_of(self, tokens: int) -> dict[str, Tensor]:
        """The parts of that many tokens that say where they are from."""
        source, number = self.origin
        return {"source": source[:tokens], "number": number[:tokens]}

    @property
    def rows(self) -> int:
        """Rows of each expert."""
        return self.form.max_tokens * self.exchange.ranks

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.exchange.local_experts), self.rows, self.form.width


@dataclass(frozen=True)
class Received:
    """The results of a dispatch, filled when its hook has been called."""

    x: Tensor
    scales: Tensor | None
    counts: Tensor
    handle: Handle

    @property
    def memory(self) -> list[Tensor]:
        """All of its tensors."""
        found = [self.x, self.counts, *self.handle[:2]]
        return found if self.scales is None else [*found, self.scales]

    @property
    def tokens(self) -> Tokens:
        """As DeepEP gives them out: experts come last for tokens in four bits."""
        if self.scales is None:
            return self.x
        return (self.x.permute(1, 2, 0) if self.x.dtype == torch.uint8 else self.x), self.scales


@dataclass(frozen=True)
class _Routes:
    """A dispatch, as a handle stands for it."""

    form: Form
    indices: Tensor
    restored: int
    """How many times ranks had been taken back before it."""


Copies: TypeAlias = Callable[[Received], Hook]
"""Makes room for copies of a dispatch's results before anything is sent; the hook copies them when
they are filled, on the stream that fills them."""


class LowLatency:
    """One rank's low-latency calls. Dispatches alternate between two exchanges, as in DeepEP, so
    that two batches may overlap."""

    def __init__(self, exchanges: Exchanges, limit: int, launcher: Launcher | None = None) -> None:
        self._exchanges = exchanges
        self._limit = limit
        self._launcher = launcher
        self._slots: dict[Form, list[Slot]] = {}
        self._phase: dict[Form, int] = {}
        # By what tells a handle from others, for as long as the caller keeps that.
        self._routes: MutableMapping[Tensor, _Routes] = WeakIdKeyDictionary()
        self._answers: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        form: Form,
        stats: Statistics,
        *,
        powers_of_two: bool = False,
        global_scale: Tensor | None = None,
        copies: Copies | None = None,
    ) -> tuple[Received, Hook]:
        """Sends; the hook receives."""
        check_tokens(x, topk_idx, form)
        stats.check(self._exchanges.comm.size(), form, self._asynchronous(form))
        slot = self._next(form)
        self._join(slot)
        parts, fp8 = slot.origin_of(len(x)), None
        if form.four_bits and global_scale is not None:
            x, parts["scales"] = cast.to_nvfp4(x, global_scale)
        elif form.scales is not None:
            fp8 = cast.Fp8Form(BLOCK, form.scales, powers_of_two)
        kept = torch.empty(topk_idx.shape, dtype=torch.int64, device=topk_idx.device)
        received = _room(slot)
        copy = None if copies is None else copies(received)
        slot.exchange.dispatch(Outgoing(x, topk_idx, parts, fp8, kept))
        slot.handle = received.handle
        self._routes[received.handle[0]] = _Routes(form, kept, self._exchanges.restored)
        slot.pending = "low_latency_dispatch"
        self._phase[form] += 1

        def hook() -> None:
            if slot.serves(received.handle) and slot.pending == "low_latency_dispatch":
                slot.pending = None
                self._receive(slot, lambda: _receive(slot, received))
                keep(*received.memory)
                if copy is not None:
                    copy()
                stats.add(received.counts, slot.exchange)
            else:  # called before; what it raised then holds still
                self._exchanges.check_whole()

        return received, hook

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        *,
        zero_copy: bool,
        out: Tensor | None,
        waits: Tensor | None = None,
    ) -> tuple[Tensor, Hook]:
        """Sends the experts' answers; the hook receives."""
        routes = self._routes_of(handle)
        form, indices = routes.form, routes.indices
        slot = self._slot_of(handle)
        if slot is not None and slot.pending is not None:
            raise InvalidArgument(f"the hook of {slot.pending} wasn't called; call it first")
        if topk_idx.shape != indices.shape or topk_weights.shape != indices.shape:
            raise InvalidArgument(
                f"indices {tuple(topk_idx.shape)} and weights {tuple(topk_weights.shape)} aren't "
                f"those of the dispatch, {tuple(indices.shape)}"
            )
        where = form.device
        for tensor in (x, topk_idx, topk_weights):
            if tensor.device != where:
                raise InvalidArgument(f"a tensor lies on {tensor.device}; move it to {where}")
        # Comparing tensors of a device would wait for it.
        if not self._asynchronous(form):
            same = (topk_idx == indices) | (topk_idx < 0)
            if not same.all():
                raise InvalidArgument(
                    "the experts of tokens aren't those of the dispatch; give the same topk_idx"
                )
        if x.shape != self._shape(form) or x.dtype != torch.bfloat16:
            raise InvalidArgument(
                f"answers are {x.dtype} {tuple(x.shape)}; give torch.bfloat16 {self._shape(form)}"
            )
        if zero_copy:
            x = self._filled(handle)
        if topk_weights.dtype != torch.float32:
            raise InvalidArgument(f"weights are {topk_weights.dtype}; give float32")
        stats = Statistics(None, waits)
        stats.check(self._exchanges.comm.size(), form, self._asynchronous(form))
        combined = _sums(out, len(indices), form)
        weights, wanted = topk_weights.contiguous(), topk_idx.to(torch.int64).contiguous()
        if not self._asynchronous(form):
            kept = topk_idx >= 0
            weights, wanted = torch.where(kept, weights, 0.0), kept | (indices < 0)
        keep(indices, handle[1], x)
        if slot is None:
            slot, x = self._again(handle, routes, x)
        self._join(slot)
        slot.exchange.combine_send(x.flatten(0, 1))
        slot.pending = "low_latency_combine"

        def hook() -> None:
            if slot.serves(handle) and slot.pending == "low_latency_combine":
                slot.pending = slot.handle = None
                self._receive(
                    slot, lambda: slot.exchange.combine_recv(weights, out=combined, wanted=wanted)
                )
                stats.add(None, slot.exchange)
                keep(weights, wanted, combined)
            else:  # as in dispatch
                self._exchanges.check_whole()

        return combined, hook

    def _receive(self, slot: Slot, receive: Callable[[], object]) -> None:
        """The second half of a call, without the ranks that other exchanges lost.

        Raises:
            PeerLost: what was received lacks a rank's part.
        """
        self._exchanges.follow(slot.exchange, receives=True)
        receive()
        self._exchanges.check_whole(slot.exchange)

    def _again(self, handle: Handle, routes: _Routes, x: Tensor) -> tuple[Slot, Tensor]:
        """Makes the routes of a handle again, by a dispatch of zeros: it was combined already, or
        others have taken its place. Also the answers ``x`` in the places of the rows that came:
        those of a rank that was lost since the handle's dispatch don't come again.

        Raises:
            InvalidArgument: a rank was taken back since.
        """
        slot = self._next(routes.form)
        self._join(slot)
        zeros, parts = _nothing(slot, len(routes.indices))
        slot.exchange.dispatch_send(zeros, routes.indices, **parts)
        slot.handle = None
        self._phase[routes.form] += 1
        again = _room(slot)
        _receive(slot, again)
        self._exchanges.check_whole()
        before, now = handle[1], again.handle[1]
        # Comparing tensors of a device waits for it.
        compares = not slot.exchange.asynchronous or routes.restored < self._exchanges.restored
        if compares and (now & _COUNT > before & _COUNT).any():
            raise InvalidArgument(
                "a rank came back since the dispatch, and the handle has no rows of it; dispatch "
                "again"
            )
        slot.handle = handle
        return slot, _moved(x, before, now)

    def check(self) -> None:
        """As :meth:`AllToAll.check`, of all exchanges."""
        for slots in list(self._slots.values()):  # others may make more meanwhile
            for slot in slots:
                slot.exchange.check()
        self._exchanges.check_whole()

    def _join(self, slot: Slot) -> None:
        """Ranks that another exchange lost take no part in this one either.

        Raises:
            PeerLost: one was lost, and this buffer doesn't go on without.
        """
        self._exchanges.check_whole()
        self._exchanges.follow(slot.exchange)

    def restart(self) -> None:
        """Begins anew after ranks came back, on all ranks together, with the exchanges that there
        are still; handles are good still."""
        for form, slots in list(self._slots.items()):
            there = [self._exchanges.has(slot.exchange) for slot in slots]
            self._phase[form] = 0
            for slot in slots:
                slot.handle = slot.pending = None
            if not any(there):
                del self._slots[form]
                continue
            # CUDA graphs may have calls of the others.
            slots[:] = [s if has else self._made(form) for s, has in zip(slots, there, strict=True)]

    def next_buffer(self, handle: Handle) -> Tensor:
        """Where answers lie for ``zero_copy``: bfloat16 ``[local experts, M * ranks, hidden]``."""
        form = self._routes_of(handle).form
        answers = self._answers.get(handle[0])
        if answers is None:
            answers = torch.zeros(self._shape(form), dtype=torch.bfloat16, device=form.device)
            self._answers[handle[0]] = answers
        return answers

    def _filled(self, handle: Handle) -> Tensor:
        filled = self._answers.get(handle[0])
        if filled is None:
            raise InvalidArgument(
                "zero_copy takes the answers from get_next_low_latency_combine_buffer(handle); "
                "fill that first"
            )
        return filled

    def _shape(self, form: Form) -> tuple[int, int, int]:
        """Of the rows of all local experts."""
        ranks = self._exchanges.comm.size()
        return form.experts // ranks, form.max_tokens * ranks, form.hidden

    def _asynchronous(self, form: Form) -> bool:
        return self._launcher is not None or form.device.type != "cpu"

    def _routes_of(self, handle: Handle) -> _Routes:
        """A handle's dispatch.

        Raises:
            InvalidArgument: it is no handle of this buffer.
        """
        known = self._routes.get(handle[0]) if len(handle) == len(_HANDLE) else None
        if known is None:
            raise InvalidArgument(
                "the handle is not one of this buffer's low_latency_dispatch; give what that "
                f"returned: {', '.join(_HANDLE)}"
            )
        return known

    def _next(self, form: Form) -> Slot:
        if form not in self._slots:
            self._slots[form] = self._make(form)
            self._phase[form] = 0
        slot = self._slots[form][self._phase[form] % ALIVE]
        if slot.pending is not None:
            raise InvalidArgument(
                f"{ALIVE} results may be alive, and the hook of {slot.pending} of the one before "
                "them wasn't called; call it first"
            )
        return slot

    def _made(self, form: Form) -> Slot:
        exchange = self._exchanges.make(
            experts=form.experts,
            topk=form.topk,
            hidden=form.hidden,
            max_tokens=form.max_tokens,
            dtype=form.dtype,
            token_width=form.width,
            parts=form.parts,
            private_rows=PRIVATE_ROWS,
            device=form.device,
            launcher=self._launcher,
        )
        return Slot(form, exchange, _origin(form, exchange.rank))

    def _make(self, form: Form) -> list[Slot]:
        # Both at once: a rank that dies later can't take part in making the second one.
        slots: list[Slot] = []
        try:
            for _ in range(ALIVE):
                slots.append(self._made(form))
            needed = sum(slot.exchange.nbytes for slot in slots)
            if 0 < self._limit < needed:
                raise InvalidArgument(
                    f"low-latency calls for {form.max_tokens} tokens take {needed:,} bytes, and "
                    f"num_rdma_bytes is {self._limit:,}; see get_low_latency_rdma_size_hint"
                )
        except BaseException:
            self._exchanges.forget([slot.exchange for slot in slots])
            raise
        return slots

    def _slot_of(self, handle: Handle) -> Slot | None:
        """Where the routes of a handle lie ready."""
        for slots in list(self._slots.values()):
            for slot in slots:
                if slot.serves(handle):
                    return slot
        return None


def _origin(form: Form, rank: int) -> tuple[Tensor, Tensor]:
    n, where = form.max_tokens, form.device
    number = torch.arange(n, dtype=torch.int32, device=where)[:, None]
    return torch.full((n, 1), rank + 1, dtype=torch.int32, device=where), number


def _nothing(slot: Slot, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens of zeros, and what goes with them."""
    form, parts = slot.form, slot.origin_of(tokens)
    if form.scales is not None:
        width = form.hidden // form.block
        parts["scales"] = torch.zeros(tokens, width, dtype=form.scales, device=form.device)
    x = torch.zeros(tokens, form.width, dtype=torch.uint8, device=form.device)
    return x.to(form.dtype), parts


def _room(slot: Slot) -> Received:
    experts, room, _ = slot.shape
    form, where = slot.form, slot.form.device
    scales = None
    if form.scales is not None:
        width = form.hidden // form.block
        if form.four_bits:
            scales = cast.scale_tiles(experts, room, width, form.scales, where)
        else:
            # DeepEP's scales lie by columns, as grouped GEMMs load them.
            by_column = torch.empty(experts, width, room, dtype=form.scales, device=where)
            scales = by_column.transpose(1, 2)
    handle = (
        torch.empty(experts, room, dtype=torch.int32, device=where),
        torch.empty(experts, slot.exchange.ranks, dtype=torch.int64, device=where),
        form.max_tokens,
        form.hidden,
        form.experts,
    )
    x = torch.empty(slot.shape, dtype=form.dtype, device=where)
    counts = torch.empty(experts, dtype=torch.int32, device=where)
    return Received(x, scales, counts, handle)


def _receive(slot: Slot, received: Received) -> None:
    experts, rows, _ = slot.shape
    src_info, layout = received.handle[:2]
    scales, x = received.scales, received.x.flatten(0, 1)
    if slot.exchange.asynchronous:
        tensors = {"x": x, "number": src_info.view(-1, 1)}
        if scales is not None and not slot.form.four_bits:
            tensors["scales"] = scales
        got = slot.exchange.dispatch_recv_into(Room(tensors, received.counts, layout), rows)
    else:
        got = slot.exchange.dispatch_recv(stride=rows, x=x)
        received.counts.copy_(got.counts)
        source, number = (got.parts[name].view(experts, rows) for name in ("source", "number"))
        src_info.copy_(number)
        layout.copy_(_layout(source, got.counts, slot.exchange.ranks))
    if scales is None:
        return
    came = got.parts["scales"]
    if slot.form.four_bits:
        cast.fill_tiles(scales, came.view(experts, rows, -1))
    elif came is not scales:
        scales.copy_(came.view(experts, rows, -1))


def _layout(origin: Tensor, counts: Tensor, ranks: int) -> Tensor:
    """Where each source's rows of each expert begin, and how many they are: ``layout_range``.

    Args:
        origin: ``[local experts, rows]``, of each row its source from 1; of others anything, and
            so are rows beyond the counts.
        counts: ``[local experts]``.
    """
    row = torch.arange(origin.shape[1], dtype=torch.int64, device=origin.device)
    there = (row < counts[:, None]) & (origin > 0) & (origin <= ranks)
    source = torch.where(there, origin, 0).to(torch.int64)
    each = (len(origin), ranks + 1)
    rows_of = source.new_zeros(each).scatter_add_(1, source, torch.ones_like(source))
    begins = source.new_full(each, origin.shape[1])
    begins.scatter_reduce_(1, source, row.expand_as(source), "amin")
    return torch.where(rows_of > 0, begins << 32 | rows_of, 0)[:, 1:]


def _moved(x: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """Rows by one ``layout_range``, in the places that another one has for them."""
    if now.device.type == "cpu" and torch.equal(before, now):
        return x
    row = torch.arange(x.shape[1], dtype=torch.int64, device=now.device)
    begins, counts = (now >> 32)[..., None], (now & _COUNT)[..., None]
    here = (row >= begins) & (row < begins + counts)
    row_before = torch.where(here, (before >> 32)[..., None] + row - begins, 0).sum(1)
    return x.gather(1, row_before[..., None].expand_as(x))


def _sums(out: Tensor | None, tokens: int, form: Form) -> Tensor:
    hidden, where = form.hidden, form.device
    if out is None:
        return torch.empty(tokens, hidden, dtype=torch.bfloat16, device=where)
    if out.shape != (tokens, hidden) or out.dtype != torch.bfloat16:
        raise InvalidArgument(
            f"out is {out.dtype} {tuple(out.shape)}; give bfloat16 {(tokens, hidden)}"
        )
    check_rows("out", out, width=hidden, dtype=torch.bfloat16, device=where)
    return out
