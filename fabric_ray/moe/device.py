"""The calls of an exchange on a device: kernels on the current stream, and no wait of the host.

Kernels say what they have done by commands in a FIFO, and wait for words that the host sets; what
the two share is native/moe's ``device.rs``. Every call does the same work in the same order,
whatever the tokens are, so that calls can be captured into a CUDA graph and replayed.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_ray._native import MoeExchange
from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import Cancelled, InvalidArgument
from fabric_ray.kernels import (
    Channel,
    Device,
    MoeKernels,
    MoeSizes,
    Placement,
    Routing,
    Words,
    channel,
    structs,
)
from fabric_ray.kernels.channel import add_command
from fabric_ray.kernels.launch import Launcher
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.tokens import Dispatched, RowPart, check_wanted, room_for_sums

_LINE = 128
#: How much longer a device waits than ranks may be apart: the host, which gives up who is late, is
#: to be the first. A device that waits for so long has lost its host.
_PATIENCE = 16
#: A command names its own rank in ten bits.
_MAX_RANKS = 1024


class _Word(enum.IntEnum):
    """What a device waits for, in the order in which words lie."""

    ABORT = 0
    OVER = 1
    ROUTES = 2
    ROWS = 3
    ROOM = 4
    ANSWERS = 5


class _Told(enum.IntEnum):
    """What a device has done: the slot of an atomic to its own rank."""

    BEGUN = 0
    PACKED = 1
    HANDED_OUT = 2
    ANSWERED = 3
    SUMMED = 4


class _Turn(enum.Enum):
    """What the caller has done last; its value is what comes next."""

    IDLE = "dispatch_send"
    DISPATCHED = "dispatch_recv"
    COLLECTED = "combine_send, or dispatch_send if every rank leaves combine out"
    ANSWERED = "combine_recv"


class DeviceSteps:
    """One rank's kernels of an exchange, and what they share with the host.

    Args:
        native: the exchange, whose rows lie in ``memory``.
        memory: uint8, on the device.
        parts: what a token is made of.
        answer_dtype: of what experts answer, ``hidden`` elements.
        launcher: launches on the device that ``memory`` is on.
        timeout: seconds that ranks may be apart.
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
    ) -> None:
        self._native, self._memory, self._sizes = native, memory, sizes
        self._device = device = memory.device
        self._parts, self._hidden, self._answer_dtype = tuple(parts), hidden, answer_dtype
        self._launcher = launcher
        self._kernels = MoeKernels(launcher, sizes)
        self._turn = _Turn.IDLE
        self._tokens = self._room = 0
        self._caller = threading.Lock()

        words, (row_turns, answer_turns) = native.device_words, native.device_turns
        commands = 2 * (3 + row_turns + answer_turns)
        capacity = max(32, 1 << (commands - 1).bit_length())
        # What the host writes and reads, in its memory, behind one another.
        host = _zeros(_LINE + 16 * capacity + 8 * words, device, on_host=True)
        completed, slots = host[:_LINE], host[_LINE : _LINE + 16 * capacity]
        self._shared = host[_LINE + 16 * capacity :].view(torch.int64)
        self._completed = completed.view(torch.int64)
        self._pushers = _zeros(_LINE, device).view(torch.int64)
        self._fifo = Words(
            slots.data_ptr(), self._pushers.data_ptr(), completed.data_ptr(), capacity
        )
        self._at = {name: self._shared[first : first + n] for name, first, n in native.device_areas}
        self._mirror = {name: torch.zeros_like(of, device=device) for name, of in self._at.items()}
        self._own, self._row_stride, self._back_stride = native.own_rows

        note = self._mirror["note"]
        self._now = note[1:2].view(torch.int32)[:1]
        self._given = torch.zeros(1, dtype=torch.int32, device=device)
        self._routing = dataclasses.replace(
            Routing.empty(sizes, device),
            fault=note[0:1],
            counts=note[2:].view(torch.int32)[: sizes.experts],
        )
        # What is read before it was ever routed, because a wait failed, is nobody's row.
        self._routing.row_of.fill_(-1)
        self._routing.first.fill_(0)
        self._placement = Placement.empty(sizes, device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        told = [add_command(rank, slot, 0) for slot in _Told]
        self._commands = _each(torch.tensor(told, dtype=torch.int64, device=device))
        self._command = torch.zeros_like(self._commands[0])
        # 1 until a wait ends without what it waited for, then 0 for good; and what that adds to the
        # words of a command.
        self._added = torch.tensor([[1, 0]], dtype=torch.int64, device=device)
        self._gate = self._added[0, :1]
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self._waited = torch.zeros(1, dtype=torch.int32, device=device)
        # Of each wait, the value that is waited for, and by how much it grows with each exchange;
        # one more for an exchange to be over if its answers are summed.
        values = [-2, 0, 0, *range(1, row_turns + 1), *range(1, answer_turns + 1)]
        grows = [2, 1, 1, *[row_turns] * row_turns, *[answer_turns] * answer_turns]
        self._values = torch.tensor(values, dtype=torch.int64, device=device)
        self._grows = torch.tensor(grows, dtype=torch.int64, device=device)
        each = _each(self._values)
        self._over, self._routed, self._answered = each[:3]
        self._lots, self._rooms = each[3 : 3 + row_turns], each[3 + row_turns :]

        self.set_timeout(timeout)
        self._warm_up()
        fifo = (self._fifo.slots, capacity, self._fifo.pushers, self._fifo.completed)
        native.serve(fifo, self._shared.data_ptr(), (host, self._pushers, memory))
        self._finalizer = weakref.finalize(
            self, _leave, native, device, (host, memory, self._mirror)
        )

    def _warm_up(self) -> None:
        """What torch launches in between is loaded: later that could wait for a kernel that
        waits."""
        self._values.add_(torch.zeros_like(self._grows))
        self._combined(False)
        self._over.add_(0)
        self._set_tokens(0)
        for name in self._at:
            self._fetch(name)
        self._at["note"].copy_(self._mirror["note"], non_blocking=True)
        self._placement.counts.to(torch.int64)
        torch.add(self._commands[0], self._added, out=self._command)
        self._single(self._missing(), 1)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def set_timeout(self, seconds: float) -> None:
        """For launches from now on."""
        abort = self._word(_Word.ABORT)
        self._timeout = seconds
        self._channel = Channel(
            self._launcher, self._fifo, abort=abort, timeout=min(seconds * _PATIENCE, 1e8)
        )

    def finish(self) -> None:
        """Waits until the device has done what was launched, and the host has heard of it; not
        at all for the host once the exchange was left.

        Raises:
            Cancelled: the host has not caught up in twice the timeout.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        pushed = int(self._pushers[0].item())
        end = time.monotonic() + 2 * self._timeout
        while int(self._completed[0]) < pushed or self._native.begins:
            if self._shared[_Word.ABORT]:
                return
            if time.monotonic() > end:
                raise Cancelled(
                    f"the host has not followed what the device did in {2 * self._timeout:g} s; "
                    "call it again, or raise the timeout"
                )
            time.sleep(50e-6)

    def left_out(self) -> tuple[int, ...]:
        """Whose answers are missing in the last sums; waits for them.

        Raises:
            FabricError: as :meth:`AllToAll.check`, for then nobody knows.
        """
        self.finish()
        self._native.check()
        return tuple(self._native.left_out)

    def dispatch_send(self, indices: Tensor, parts: Mapping[str, Tensor]) -> None:
        """As :meth:`AllToAll.dispatch_send`."""
        with self._turn_of("dispatch_send", _Turn.IDLE, _Turn.COLLECTED):
            tokens = self._check_tokens(indices, parts)
            indices = indices.to(torch.int64).contiguous()
            with self._launching():
                self._values.add_(self._grows)
                self._wait(_Word.OVER, self._over)
                self._combined(False)
                self._set_tokens(tokens)
                self._kernels.route(indices, self._now, self._routing)
                self._at["note"].copy_(self._mirror["note"], non_blocking=True)
                self._tell(_Told.BEGUN)
                own = self._rows(self._row_stride)
                given = [parts[p.name] for p in self._parts]
                self._kernels.pack(given, self._now, self._routing, own)
                self._tell(_Told.PACKED)
            self._tokens, self._turn = tokens, _Turn.DISPATCHED

    def dispatch_recv(self, multiple: int, stride: int | None, x: Tensor | None) -> Dispatched:
        """As :meth:`AllToAll.dispatch_recv`; nobody knows yet how many rows come, and there must be
        room for all that can."""
        with self._turn_of("dispatch_recv", _Turn.DISPATCHED):
            total = self._most_rows(multiple, stride)
            tensors = {}
            for p in self._parts:
                given = x if p.name == "x" else None
                if given is None:
                    given = torch.empty(total, p.width, dtype=p.dtype, device=self._device)
                self._check(p.name, given, p.width, p.dtype, rows=total)
                tensors[p.name] = given
            with self._launching():
                self._place(total, multiple, stride)
                for turn in self._lots:
                    self._wait(_Word.ROWS, turn)
                    chunks, count = self._chunks("lot")
                    into = [tensors[p.name] for p in self._parts]
                    self._kernels.hand_out(
                        self._placement, chunks, count, self._memory, self._row_stride, into
                    )
                    self._tell(_Told.HANDED_OUT)
                dispatched = Dispatched(
                    x=tensors.pop("x")[:total],
                    parts=tensors,
                    counts=self._placement.counts.to(torch.int64),
                    starts=self._placement.starts[:-1].to(torch.int64),
                )
            self._room, self._turn = total, _Turn.COLLECTED
            return dispatched

    def combine_send(self, y: Tensor) -> None:
        """As :meth:`AllToAll.combine_send`."""
        with self._turn_of("combine_send", _Turn.COLLECTED):
            self._check("answers", y, self._hidden, self._answer_dtype, rows=self._room)
            with self._launching():
                for turn in self._rooms:
                    self._wait(_Word.ROOM, turn)
                    chunks, count = self._chunks("answers")
                    self._kernels.pack_answers(
                        self._placement, chunks, count, y, self._memory, self._back_stride
                    )
                    self._tell(_Told.ANSWERED)
            self._turn = _Turn.ANSWERED

    def combine_answers(self) -> Tensor:
        """As :meth:`AllToAll.combine_answers`."""
        with self._turn_of("combine_answers", _Turn.ANSWERED), self._launching():
            self._wait(_Word.ANSWERS, self._answered)
            return self._single(self._missing(), self._tokens)

    def combine_recv(
        self,
        weights: Tensor | None,
        out: Tensor | None,
        dtype: torch.dtype | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`AllToAll.combine_recv`."""
        with self._turn_of("combine_recv", _Turn.ANSWERED):
            shape = (self._tokens, self._hidden)
            out = room_for_sums(out, self._answer_dtype, dtype, shape, self._device)
            self._check("sums", out, self._hidden, out.dtype, rows=self._tokens)
            if weights is not None:
                topk = self._sizes.topk
                self._check("weights", weights, topk, torch.float32, rows=self._tokens)
            if wanted is not None:
                check_wanted(wanted, (self._tokens, self._sizes.topk), self._device)
            with self._launching():
                self._wait(_Word.ANSWERS, self._answered)
                if wanted is not None:
                    # What is nobody's row is passed over.
                    self._routing.row_of[: self._tokens].masked_fill_(~wanted, -1)
                self._kernels.sum(
                    self._answers(),
                    self._given,
                    self._routing,
                    out[: self._tokens],
                    weights=weights,
                    missing=self._missing(),
                )
                self._tell(_Told.SUMMED)
                self._combined(True)
            self._turn = _Turn.IDLE
            return out[: self._tokens]

    @contextmanager
    def _turn_of(self, call: str, *turns: _Turn) -> Iterator[None]:
        if not self._caller.acquire(blocking=False):
            raise InvalidArgument(
                "another thread is in a call of this exchange; make one exchange for each"
            )
        try:
            self._check_earlier(call)
            if self._turn not in turns:
                raise InvalidArgument(f"{call} is not next; it is {self._turn.value}")
            yield
        finally:
            self._caller.release()

    def _check_earlier(self, call: str) -> None:
        try:
            self._native.check()
        except InvalidArgument as fault:
            raise InvalidArgument(
                f"{fault}; that was an earlier call, and nothing of this {call} was done: call it "
                "again"
            ) from fault

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Leaves the exchange if not everything of a call could be launched: what comes next would
        wait for the rest."""
        try:
            yield
        except BaseException:
            self._native.leave()
            raise

    def _check_tokens(self, indices: Tensor, parts: Mapping[str, Tensor]) -> int:
        """How many they are.

        Raises:
            InvalidArgument: what doesn't fit.
        """
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
        if {*parts} != {p.name for p in self._parts}:
            wanted = [p.name for p in self._parts]
            raise InvalidArgument(f"a token is made of {wanted}; {[*parts]} was given")
        for p in self._parts:
            self._check(p.name, parts[p.name], p.width, p.dtype)
            if len(parts[p.name]) != tokens:
                shape = tuple(parts[p.name].shape)
                raise InvalidArgument(
                    f"{p.name} of {shape} for {tokens} tokens; give one row for each"
                )
        return tokens

    def _set_tokens(self, tokens: int) -> None:
        """Of this exchange; none are packed over rows that may still be on their way (MR-1)."""
        self._given.fill_(tokens)
        self._now.fill_(tokens).mul_(self._gate)

    def _combined(self, summed: bool) -> None:
        """Whether the next exchange waits for the answers of this one to be summed."""
        if summed:
            self._over.add_(1)
        else:
            self._over.bitwise_and_(-2)

    def _place(self, room: int, multiple: int, stride: int | None) -> None:
        """Where the rows of each source go, once they are known."""
        self._wait(_Word.ROUTES, self._routed)
        incoming = self._fetch("incoming").view(torch.int32)
        ranks, local = self._sizes.ranks, self._sizes.local_experts
        self._kernels.place(
            incoming[: ranks * local].view(ranks, local),
            self._placement,
            room=room,
            multiple=multiple,
            stride=stride,
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

    def _most_rows(self, multiple: int, stride: int | None) -> int:
        """Rows that can come, those that fill up included.

        Raises:
            InvalidArgument: an expert may get more than its stride.
        """
        sizes = self._sizes
        each, local = sizes.ranks * sizes.max_tokens, sizes.local_experts
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

    def _missing(self) -> Tensor:
        # All are, once a wait failed.
        missing = self._fetch("missing").add_(self._gate - 1)
        return missing.view(torch.uint8)[: self._sizes.ranks]

    def _chunks(self, name: str) -> tuple[Tensor, Tensor]:
        table = self._fetch(name)
        return table[1:].view(-1, 3), table[:1].view(torch.int32)[:1]

    def _fetch(self, name: str) -> Tensor:
        """What the host has written down, on the device; zeros once a wait failed, for then it
        may be another exchange's (RS-1)."""
        return self._mirror[name].copy_(self._at[name], non_blocking=True).mul_(self._gate)

    def _word(self, word: _Word) -> int:
        return self._shared.data_ptr() + 8 * word

    def _wait(self, word: _Word, value: Tensor) -> None:
        self._channel.wait_word(self._word(word), value, self._waited, gate=self._gate)

    def _tell(self, told: _Told) -> None:
        torch.add(self._commands[told], self._added, out=self._command)
        self._channel.push(self._command, self._one, self._index, self._waited, at_once=False)


def check_sizes(ranks: int, parts: Sequence[RowPart]) -> None:
    """That a device can take part.

    Raises:
        InvalidArgument: more ranks, or more parts of a token, than it can.
    """
    if ranks > _MAX_RANKS:
        raise InvalidArgument(f"{ranks} ranks; on a device there are {_MAX_RANKS} at most")
    if len(parts) > structs.MAX_PARTS:
        raise InvalidArgument(
            f"a token of {len(parts)} parts; a device takes {structs.MAX_PARTS}, x among them"
        )


def room_on(engine: TransferEngine, nbytes: int, device: torch.device) -> tuple[Tensor, Region]:
    """Zero bytes on a device, registered with the engine; mappable for peers if on the host."""
    if device.type == "cpu":
        return engine.empty(nbytes, torch.uint8)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return memory, engine.register(memory)


def gpu(device: torch.device) -> Device:
    """Launches on a GPU, all kernels of an exchange loaded.

    Raises:
        ResourceError: there is no such GPU.
        CompileError: a kernel doesn't compile for it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    launcher = Device(index)
    for file, kernels in {**structs.ARGUMENTS, **channel.ARGUMENTS}.items():
        launcher.load(file, *kernels)
    return launcher


def _zeros(nbytes: int, device: torch.device, *, on_host: bool = False) -> Tensor:
    """Zero bytes from the beginning of a line, on the device or where the host sees them too."""
    where: dict[str, object] = {"device": device}
    if on_host:
        where = {"pin_memory": device.type == "cuda"}
    whole = torch.zeros(nbytes + _LINE, dtype=torch.uint8, **where)  # type: ignore[call-overload]
    begin = -whole.data_ptr() % _LINE
    found: Tensor = whole[begin : begin + nbytes]
    return found


def _each(tensor: Tensor) -> list[Tensor]:
    """Views of what it is made of, one by one."""
    return [tensor[i : i + 1] for i in range(len(tensor))]


def _leave(native: MoeExchange, device: torch.device, kept: object) -> None:
    """Ends the waits of kernels that were launched, and keeps what they use until then."""
    native.leave()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del kept
