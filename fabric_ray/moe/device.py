"""The calls of an exchange on a device: kernels on the current stream, and no wait of the host.

Kernels say what they have done by commands in a FIFO, and wait for words that the host sets, in a
:class:`~fabric_ray.moe.mailbox.Mailbox`. Every call does the same work in the same order,
whatever the tokens are, so that calls can be captured into a CUDA graph and replayed.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_ray._native import MoeExchange
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import (
    MoeKernels,
    MoeSizes,
    Placement,
    Routing,
    Steps,
)
from fabric_ray.kernels.launch import Launcher
from fabric_ray.kernels.steps import MEETING_WORDS
from fabric_ray.moe import device_waits
from fabric_ray.moe.device_memory import KernelResources, Turns, leave, settle
from fabric_ray.moe.mailbox import MAX_TICKET, DeviceEvent, Mailbox, Word
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.tokens import (
    Dispatched,
    Outgoing,
    Room,
    RowPart,
    check_wanted,
    given,
    room,
    room_by_columns,
    sums,
)

#: A device waits for so many timeouts: the host gives up a late rank after one. A device that waits
#: longer has lost its host.
_DEVICE_TIMEOUTS = 16


class _Phase(enum.Enum):
    """The phase of an exchange; the value names the call that comes next."""

    IDLE = "dispatch_send"
    DISPATCHED = "dispatch_recv"
    COLLECTED = "combine_send, or dispatch_send if every rank leaves combine out"
    ANSWERED = "combine_recv"


class DeviceSteps:
    """Launches one rank's kernels of an exchange.

    Args:
        native: the exchange, whose rows lie in ``memory``.
        memory: uint8, on the device.
        parts: the tensors of a token.
        answer_dtype: of answers, with ``hidden`` elements.
        launcher: launches on the device of ``memory``.
        timeout: seconds after which a rank that others wait for is given up.
        expert_rows: rows that an expert can get.
        direct: kernels store to the memory of peers that they can reach.
    """

    def __init__(
        self,
        native: MoeExchange,
        memory: Tensor,
        sizes: MoeSizes,
        rank: int,
        *,
        parts: Sequence[RowPart],
        hidden: int,
        answer_dtype: torch.dtype,
        launcher: Launcher,
        timeout: float,
        expert_rows: int,
        direct: bool,
    ) -> None:
        self._native, self._memory, self._sizes = native, memory, sizes
        self._device = device = memory.device
        self._parts, self._hidden, self._answer_dtype = tuple(parts), hidden, answer_dtype
        meeting = torch.zeros(MEETING_WORDS, dtype=torch.int64, device=device)
        self._launches = Steps(launcher, meeting, most=sizes.out_rows)
        self._kernels = MoeKernels(self._launches, sizes)
        self._phase = _Phase.IDLE
        self._fault: InvalidArgument | None = None
        self._tokens = self._room = 0
        self._ticket, self._tickets = 0, itertools.count()
        """Of the dispatch under way, 0 in a CUDA graph."""
        self._cast: tuple[Tensor, Tensor] | None = None
        self._caller, self._turns = threading.Lock(), Turns(device)
        self._direct, self._expert_rows = direct, expert_rows

        self._box = box = Mailbox(native, rank, device, launcher, self._launches)
        self._own, self._row_stride, self._back_stride = native.own_rows
        note = box.mirror["note"]
        self._now = note[1:2].view(torch.int32)[:1]
        self._given = torch.zeros(1, dtype=torch.int32, device=device)
        self._routing = dataclasses.replace(
            Routing.empty(sizes, device),
            fault=note[0:1],
            counts=note[2:].view(torch.int32)[: sizes.experts],
        )
        # A row that is read before routing, because a wait failed, belongs to no token.
        self._routing.row_of.fill_(-1)
        self._routing.first.fill_(0)
        self._placement = Placement.empty(sizes, device)
        self._placement.fault.fill_(-1)

        self.set_timeout(timeout)
        self._warm_up()
        fifo = (box.fifo.slots, box.fifo.capacity, box.fifo.pushers, box.fifo.completed)
        native.serve(fifo, box.words.data_ptr(), (box.host, box.pushers, memory), direct)
        used = (box, memory, meeting, self._given, self._routing, self._placement)
        self._used = KernelResources(device, used)
        self._finalizer = weakref.finalize(self, leave, native, self._used)

    @property
    def captured(self) -> bool:
        """As :attr:`AllToAll.captured`."""
        return self._used.by_graph

    def _warm_up(self) -> None:
        """Loads the torch kernels that are launched between ours: loading one later could wait for
        a kernel that waits itself."""
        missing = torch.zeros(self._sizes.ranks, dtype=torch.uint8, device=self._device)
        self._single(missing, 1)
        rows = self._sizes.local_experts
        parts = {p.name: torch.zeros(rows, p.width, dtype=p.dtype, device=self._device)
                 for p in self._parts}  # fmt: skip
        of_experts = torch.zeros(rows, dtype=torch.int64, device=self._device)
        came = Dispatched(x=parts["x"], parts=parts, counts=of_experts, starts=of_experts)
        for part in self._parts[1:]:
            by_columns = torch.zeros(part.width, rows, dtype=part.dtype, device=self._device).t()
            for into in (torch.zeros_like(parts[part.name]), by_columns):
                came.copy_part(part.name, into)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout of later launches."""
        self._timeout = seconds
        self._box.set_timeout(min(seconds * _DEVICE_TIMEOUTS, 1e8))

    def finish(self) -> None:
        """Waits until the device is idle and the host has processed its commands; doesn't wait for
        the host once the exchange was left.

        Raises:
            Cancelled: the host has not caught up in twice the timeout.
        """
        device_waits.finish(self._native, self._box, self._device, 2 * self._timeout)

    def check(self, wait: bool = True) -> None:
        """As :meth:`AllToAll.check`."""
        if wait:
            self.finish()
        self._record_fault()
        self._raise_fault()
        if wait:
            self._placement.check()

    def left_out(self) -> tuple[int, ...]:
        """Ranks whose answers are missing in the last sums; waits for the device.

        Raises:
            FabricError: as :meth:`AllToAll.check`; the state of the exchange is unknown then.
        """
        self.check()
        return tuple(self._native.left_out)

    def dispatch_send(self, out: Outgoing) -> None:
        """As :meth:`AllToAll.dispatch`."""
        with self._in_phase("dispatch_send", _Phase.IDLE, _Phase.COLLECTED):
            parts = {"x": out.x, **out.parts}
            if out.cast is not None:
                parts["x"], parts["scales"] = self._cast_room(out)
            tokens = self._check_tokens(out.indices, parts)
            indices = out.indices.to(torch.int64).contiguous()
            with self._launching() as captured:
                self._ticket = 0 if captured else next(self._tickets) % MAX_TICKET + 1
                box = self._box
                box.begin(tokens, self._given, self._now)
                self._kernels.count(indices, self._now, self._routing)
                # Peers wait for this event.
                box.tell(DeviceEvent.BEGUN, note=True, ticket=self._ticket)
                self._kernels.order(indices, self._now, self._routing, kept=out.kept)
                if out.cast is not None:
                    self._kernels.cast(
                        out.x,
                        (parts["x"], parts["scales"]),
                        block=out.cast.block,
                        powers_of_two=out.cast.powers_of_two,
                        beside=True,
                    )
                self._pack([parts[p.name] for p in self._parts])
            self._tokens, self._phase = tokens, _Phase.DISPATCHED

    def _cast_room(self, out: Outgoing) -> tuple[Tensor, Tensor]:
        """Where tokens are cast to, the same in each dispatch.

        Raises:
            InvalidArgument: the tokens can't be cast, or this exchange doesn't carry them so.
        """
        named = {part.name: part for part in self._parts}
        x, scales, cast = named["x"], named.get("scales"), out.cast
        self._check_indices(out.indices)
        if cast is None or scales is None or scales.dtype != cast.scales:
            raise InvalidArgument("this exchange carries no such scales; give it a part of them")
        self._check("tokens", out.x, x.width, torch.bfloat16)
        if self._cast is None:
            n = self._sizes.max_tokens
            self._cast = (
                torch.empty(n, x.width, dtype=x.dtype, device=self._device),
                torch.empty(n, scales.width, dtype=scales.dtype, device=self._device),
            )
            # A graph that is replayed when the exchange is gone casts still.
            self._used.what = (*self._used.what, self._cast)
        values, scaled = self._cast
        return values[: len(out.x)], scaled[: len(out.x)]

    def _pack(self, given: Sequence[Tensor]) -> None:
        """Packs rows into the send buffer, or directly into the memory of peers within reach."""
        box, own, ways = self._box, self._rows(self._row_stride), None
        if self._direct:
            ways = box.fetch("ways", Word.WAYS, box.ways, beside=True)
        self._kernels.pack(given, self._now, self._routing, own, ways=ways)
        box.tell(DeviceEvent.PACKED)

    def arriving(self) -> list[int]:
        """As :meth:`AllToAll.arriving`."""
        with self._in_phase("dispatch_recv", _Phase.DISPATCHED):
            limit = self._timeout * _DEVICE_TIMEOUTS
            return device_waits.arriving(self._native, self._ticket, self._device, limit)

    def dispatch_recv(
        self,
        multiple: int,
        stride: int | None,
        x: Tensor | None,
        into: Room | None = None,
        counts: Sequence[int] | None = None,
    ) -> Dispatched:
        """As :meth:`AllToAll.dispatch_recv`; without ``counts`` the number of rows is not yet
        known, and there must be room for all that can."""
        with self._in_phase("dispatch_recv", _Phase.DISPATCHED):
            total = self._most_rows(multiple, stride, counts)
            tensors = self._room_for(total, x, into)
            takes = {} if into is None else {"given": into.counts, "layout": into.layout}
            local = (self._sizes.local_experts,)
            came = torch.empty(local, dtype=torch.int64, device=self._device)
            starts = torch.empty(local, dtype=torch.int64, device=self._device)
            with self._launching():
                self._place(total, multiple, stride, counts=came, starts=starts, **takes)
                for turn in self._box.lots:
                    chunks, count = self._box.chunks("lot", Word.ROWS, turn)
                    self._kernels.hand_out(
                        self._placement,
                        chunks,
                        count,
                        self._memory,
                        self._row_stride,
                        [tensors[p.name] for p in self._parts],
                        layout=takes.get("layout"),
                        stride=stride,
                    )
                    self._box.tell(DeviceEvent.HANDED_OUT)
            self._room, self._phase = total, _Phase.COLLECTED
            return Dispatched(x=tensors.pop("x")[:total], parts=tensors, counts=came, starts=starts)

    def _room_for(self, total: int, x: Tensor | None, into: Room | None) -> dict[str, Tensor]:
        """A tensor for each part."""
        given = {} if into is None else into.tensors
        own = [part for part in self._parts if part.name == "x" or part.name not in given]
        tensors, _ = room(own, total, x, self._device)
        for part in self._parts:
            if part.name not in tensors:
                tensor = given[part.name]
                if tensor.ndim == 3:
                    room_by_columns(part, tensor, total, self._device)
                else:
                    self._check(part.name, tensor, part.width, part.dtype, rows=total)
                tensors[part.name] = tensor
        return tensors

    def combine_send(self, y: Tensor) -> None:
        """As :meth:`AllToAll.combine_send`."""
        with self._in_phase("combine_send", _Phase.COLLECTED):
            self._check("answers", y, self._hidden, self._answer_dtype, rows=self._room)
            with self._launching():
                if self._direct:
                    self._box.tell(DeviceEvent.COMBINING)
                for turn in self._box.rooms:
                    chunks, count = self._box.chunks("answers", Word.ROOM, turn)
                    self._kernels.pack_answers(
                        self._placement, chunks, count, y, self._memory, self._back_stride
                    )
                    self._box.tell(DeviceEvent.ANSWERED)
            self._phase = _Phase.ANSWERED

    def combine_answers(self) -> Tensor:
        """As :meth:`AllToAll.combine_answers`."""
        with self._in_phase("combine_answers", _Phase.ANSWERED):
            with self._launching():
                missing = self._box.missing(self._sizes.ranks)
            with self._turns.next():
                return self._single(missing, self._tokens)

    def combine_recv(
        self,
        weights: Tensor | None,
        out: Tensor | None,
        dtype: torch.dtype | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`AllToAll.combine_recv`."""
        with self._in_phase("combine_recv", _Phase.ANSWERED):
            shape = (self._tokens, self._hidden)
            out, _ = sums(out, dtype, self._answer_dtype, shape, self._device)
            if weights is not None:
                topk = self._sizes.topk
                self._check("weights", weights, topk, torch.float32, rows=self._tokens)
            if wanted is not None:
                wants = (self._tokens, self._sizes.topk)
                check_wanted(wanted, wants, self._device, experts=True)
                wanted = wanted.contiguous()
            with self._launching():
                missing = self._box.missing(self._sizes.ranks)
                self._kernels.sum(
                    self._answers(),
                    self._given,
                    self._routing,
                    out[: self._tokens],
                    weights=weights,
                    missing=missing,
                    wanted=wanted,
                )
                self._box.tell(DeviceEvent.SUMMED)
            self._phase = _Phase.IDLE
            return out[: self._tokens]

    @contextmanager
    def _in_phase(self, call: str, *turns: _Phase) -> Iterator[None]:
        if not self._caller.acquire(blocking=False):
            raise InvalidArgument(
                "another thread is in a call of this exchange; make one exchange for each"
            )
        try:
            self._check_earlier(call)
            if self._phase not in turns:
                raise InvalidArgument(f"{call} is not next; it is {self._phase.value}")
            yield
        finally:
            self._caller.release()

    def _check_earlier(self, call: str) -> None:
        """Holds back a fault in tokens until the next dispatch: peers and the caller rely on an
        exchange that has begun to go on."""
        self._record_fault()
        if call != "dispatch_send":
            return
        try:
            self._raise_fault()
        except InvalidArgument as fault:
            raise InvalidArgument(
                f"{fault}; that was an earlier call, and nothing of this {call} was done: call it "
                "again"
            ) from fault

    def _record_fault(self) -> None:
        """Keeps a fault, which the native side reports once, until it is raised.

        Raises:
            FabricError: the device has left the exchange, for good.
        """
        try:
            self._native.check()
        except InvalidArgument as fault:
            self._fault = self._fault or fault

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    @contextmanager
    def _launching(self) -> Iterator[bool]:
        """Whether a graph is captured. Leaves the exchange if a call was launched only in part:
        later calls would wait for the rest."""
        try:
            with self._turns.next() as captured, self._launches.together():
                self._used.by_graph |= captured
                yield captured
        except BaseException:
            if self._launches.launched:
                self._native.leave()
                settle(self._native, self._device)
            raise

    def _check_tokens(self, indices: Tensor, parts: Mapping[str, Tensor]) -> int:
        """The number of tokens.

        Raises:
            InvalidArgument: a tensor doesn't match.
        """
        tokens = self._check_indices(indices)
        given(self._parts, parts, tokens, self._device)
        return tokens

    def _check_indices(self, indices: Tensor) -> int:
        sizes = self._sizes
        if (
            indices.device != self._device
            or indices.ndim != 2
            or indices.shape[1] != sizes.topk
            or indices.dtype.is_floating_point
        ):
            raise InvalidArgument(
                f"indices are {indices.dtype} {tuple(indices.shape)} on {indices.device}; "
                f"give integers [tokens, {sizes.topk}] on {self._device}"
            )
        tokens = len(indices)
        if tokens > sizes.max_tokens:
            raise InvalidArgument(
                f"{tokens} tokens, and there is room for {sizes.max_tokens}; "
                "send fewer at a time, or raise max_tokens"
            )
        return tokens

    def _place(self, room: int, multiple: int, stride: int | None, **takes: Tensor | None) -> None:
        """Where the rows of each source go, once they are known; and what :meth:`MoeKernels.place`
        takes besides."""
        incoming = self._box.fetch("incoming", Word.ROUTES, self._box.routed).view(torch.int32)
        ranks, local = self._sizes.ranks, self._sizes.local_experts
        self._kernels.place(
            incoming[: ranks * local].view(ranks, local),
            self._placement,
            room=room,
            multiple=multiple,
            stride=stride,
            **takes,
        )

    def _single(self, missing: Tensor, tokens: int) -> Tensor:
        """Answers one by one: zeros for those that are missing, and for rows that there aren't."""
        row = self._routing.row_of[:tokens].to(torch.int64)
        rank = torch.searchsorted(self._routing.first[1:].to(torch.int64), row, right=True)
        there = (row >= 0) & (missing[rank.clamp(max=self._sizes.ranks - 1)] == 0)
        found = self._answers()[row.clamp(min=0)]
        return torch.where(there[..., None], found, torch.zeros_like(found))

    def _check(
        self, what: str, tensor: Tensor, width: int, dtype: torch.dtype, *, rows: int | None = None
    ) -> None:
        check_rows(what, tensor, width=width, dtype=dtype, rows=rows, device=self._device)

    def _most_rows(
        self, multiple: int, stride: int | None, counts: Sequence[int] | None = None
    ) -> int:
        """Rows that can come, or do by ``counts``; those that fill up included.

        Raises:
            InvalidArgument: an expert may get more than its stride.
        """
        sizes = self._sizes
        each, local = self._expert_rows, sizes.local_experts
        if counts is not None:
            if len(counts) != local:
                raise InvalidArgument(f"counts are of {len(counts)} experts; give {local}")
            each = max(counts)
            if stride is None:
                return sum(-(-n // multiple) * multiple for n in counts)
        if stride is None:
            filled = -(-each // multiple) * multiple
            return min(local * filled, sizes.ranks * sizes.pair_rows + local * (multiple - 1))
        if stride < each:
            raise InvalidArgument(
                f"stride is {stride}, and an expert may get {each} rows; give as many, for "
                "the host doesn't wait for a GPU to see how many come"
            )
        return local * stride

    def _rows(self, stride: int) -> Tensor:
        n = self._sizes.out_rows
        return self._memory[self._own : self._own + n * stride].view(n, stride)

    def _answers(self) -> Tensor:
        return self._rows(self._back_stride).view(self._answer_dtype)[:, : self._hidden]
