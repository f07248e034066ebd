"""One rank of an exchange for many tokens on many nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fabric_ray._native import MoeThroughput
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Launcher
from fabric_ray.moe import rows, tokens
from fabric_ray.moe.device import check_sizes
from fabric_ray.moe.tokens import SUMS, Dispatched, Lost, RowPart
from fabric_ray.moe.workers import Memory, WorkerSteps, workers_on


@dataclass(frozen=True)
class Traffic:
    """Rows that a rank has sent."""

    rail_tokens: int
    """Its tokens, to other nodes: each once to each node, or to each rank while one is missing."""
    node_tokens: int
    """Tokens, to ranks of its node: its own and those that it forwards."""
    node_answers: int
    """Answers, to ranks of its node."""
    rail_sums: int
    """Sums, to other nodes: one for each token that came from there."""


class ThroughputAllToAll:
    """One rank of a high-throughput exchange: the calls of :class:`~fabric_ray.moe.AllToAll`, in
    the same turns (uccl-ep §3 to §5).

    A token goes once to each node that has experts of it, to the rank there with its source's
    place, which forwards it; on the way back each node sends one sum for it. Tokens go in chunks,
    through rings.

    Ranks forward for one another while they are in a call. Between calls, as much moves as rings
    hold.

    A rank that dies or does nothing for ``timeout`` seconds while it is waited for is given up by
    all. What is under way ends with it: on each other rank one call, the one that it is in or its
    next, raises :class:`~fabric_ray.errors.PeerLost`, which names it; ranks of which it is known by
    then are named by one error together, others by the next. The next ``dispatch_send``
    goes on among the others, and nothing is made anew. Some ranks may have finished the exchange
    that others were in: begin again, everywhere, with a step that all have the input of.
    :attr:`lost` says who is missing, and :attr:`left_out` whose answers sums are without. While
    anybody is missing nobody forwards: a token goes to each rank of its experts, over one channel.

    No majority is needed to go on. If the network falls apart, the ranks of each part give up those
    of the others and go on alone, with sums that lack the others' answers: only :attr:`lost` and
    :attr:`left_out` say so. Whoever needs all answers looks there after each error, and stops.

    A process that takes a lost rank's place is a further ``life`` of it: all others :meth:`admit`
    it, and it all others, between the same two exchanges. A rank that others have given up can't
    go on: its calls raise ``PeerLost`` with its own name.

    With ``device``, rows stay there: each call launches a kernel on torch's current stream that
    moves and sums them. A call returns when its rows have been seen to, for which it waits for what
    is before the kernel on that stream, so calls can't be captured into a graph; the kernel itself
    ends soon after. Make all calls of an exchange on one stream: what they share has no other
    order. After a call that raises, kernels may be at the tensors that it was given until what is
    on the stream has ended; torch gives their memory to nobody before. Ranks with and without
    kernels are one exchange.

    Args:
        engine: what the engines of this exchange are like; it opens one for each proxy thread.
        rank: this one, from 0.
        ranks: how many there are.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``.
        experts: as for ``AllToAll``.
        topk: as for ``AllToAll``.
        hidden: as for ``AllToAll``.
        max_tokens: as for ``AllToAll``.
        dtype: as for ``AllToAll``.
        parts: as for ``AllToAll``.
        answer_dtype: as for ``AllToAll``.
        channels: rings of each pair of ranks, 1 to 3; each takes a part of the tokens.
        chunk: tokens that are sent, given back and summed together.
        ring_chunks: chunks that a ring holds, 2 at least.
        threads: proxy threads, ``channels`` at most.
        timeout: seconds, the same on all ranks; :meth:`set_timeout` changes it.
        life: how many processes have had this rank's place before.
        device: the GPU that tokens, indices, weights and answers lie on; the host if ``None``. Each
            rank on a GPU has a stream of its own.
        workers: thread blocks of the kernel that moves rows, no more than ``device`` runs at once.
        launcher: launches kernels on ``device``, in place of that GPU.

    Raises:
        InvalidArgument: sizes that don't go together; more workers than run at once.
        ResourceError: there is no such GPU.
        CompileError: a kernel doesn't compile for it.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        rank: int,
        ranks: int,
        ranks_per_node: int,
        experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        parts: Sequence[RowPart] = (),
        answer_dtype: torch.dtype = torch.bfloat16,
        channels: int = 2,
        chunk: int = 32,
        ring_chunks: int = 4,
        threads: int = 1,
        timeout: float = 30.0,
        life: int = 0,
        device: torch.device | str | None = None,
        workers: int = 16,
        launcher: Launcher | None = None,
    ) -> None:
        sizes = {"ranks": ranks, "experts": experts, "topk": topk, "hidden": hidden}
        rings = {"channels": channels, "chunk": chunk, "ring_chunks": ring_chunks}
        tokens.check_sizes(
            parts,
            answer_dtype,
            **sizes,
            **rings,
            max_tokens=max_tokens,
            ranks_per_node=ranks_per_node,
            threads=threads,
            workers=workers,
        )
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} of {ranks}: ranks count from 0")
        if not 0 <= life < 1 << 12:
            raise InvalidArgument(f"life {life}; lives count from 0 to 4095")
        self._parts = (RowPart("x", hidden, dtype), *parts)
        self._topk, self._hidden, self._ranks = topk, hidden, ranks
        self._local = experts // ranks
        self._rank = rank
        self._answers = answer_dtype
        self._tokens = 0
        self._rows = 0
        home = torch.device(device or "cpu")
        if home.type == "cuda" and home.index is None:
            home = torch.device("cuda", torch.cuda.current_device())
        self._home = home
        memory: Memory | None = None
        if launcher is not None or home.type != "cpu":
            check_sizes(ranks, self._parts)
            launcher = launcher or workers_on(home, workers, answer_dtype)
            memory = Memory(engine, home)
        self._native = MoeThroughput(
            engine,
            rank=rank,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            experts=experts,
            topk=topk,
            max_tokens=max_tokens,
            row_nbytes=sum(p.width * p.dtype.itemsize for p in self._parts),
            elements=hidden,
            dtype=SUMS[answer_dtype],
            channels=channels,
            chunk=chunk,
            ring_chunks=ring_chunks,
            threads=threads,
            timeout=timeout,
            life=life,
            far=None if memory is None else (workers, memory.allocate),
        )
        self._steps: WorkerSteps | None = None
        if memory is not None and launcher is not None:
            self._steps = WorkerSteps(
                self._native,
                memory,
                parts=self._parts,
                topk=topk,
                hidden=hidden,
                max_tokens=max_tokens,
                answer_dtype=answer_dtype,
                launcher=launcher,
                workers=workers,
                timeout=timeout,
            )

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._ranks

    @property
    def local_experts(self) -> range:
        """The experts that this rank hosts."""
        return range(self._rank * self._local, (self._rank + 1) * self._local)

    @property
    def device(self) -> torch.device:
        """What tokens and answers lie on."""
        return self._home

    @property
    def asynchronous(self) -> bool:
        """Never: calls return when their rows have been seen to, and how many come is known."""
        return False

    def check(self) -> None:
        """Nothing: calls raise what goes wrong in them, on a device too."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffers."""
        return sum(nbytes for _, _, nbytes in self._native.areas)

    def explain(self) -> str:
        """What the buffers are for, and what makes them as large as they are."""
        lines = [f"{nbytes:>16,}  {name}: {what}" for name, what, nbytes in self._native.areas]
        return "\n".join([*lines, f"{self.nbytes:>16,}  bytes in all"])

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far; while a call is under way, until it last had to wait."""
        return Traffic(*self._native.traffic)

    def card(self) -> bytes:
        """What the other ranks need to know of this one, and what it knows of them: for a rank that
        comes anew, make one after the last exchange."""
        return self._native.card()

    def admit(self, card: bytes) -> int:
        """Takes a rank in by its card, before the first dispatch, or in a lost one's place between
        two; returns its number.

        Raises:
            HandshakeError: it is of another shape; the text lists what differs.
            InvalidArgument: it is here already, an exchange is under way, or that life of it has
                ended.
            PeerLost: others go on without this one.
            NotQuiesced: the process before it may still write to this rank's memory, after the
                timeout: it is connected.
        """
        return self._native.admit(card)

    def connect(self, cards: Iterable[bytes | None]) -> None:
        """Takes all ranks in by their cards; ``None`` for one that is left out, by all, this one's
        is passed over."""
        for rank, card in enumerate(cards):
            if rank == self._rank:
                continue
            if card is None:
                self._native.leave_out(rank)
            else:
                self.admit(card)

    def set_timeout(self, seconds: float) -> None:
        """How long nothing may happen before a rank that is waited for, and is in no call, is given
        up; one that is in a call may take eight times as long, and one whose own kernels do nothing
        gives itself up after four times. Give all ranks the same: one with less than half a second
        hears too rarely of those that wait longer."""
        self._native.set_timeout(seconds)
        if self._steps is not None:
            self._steps.set_timeout(seconds)

    def mask(self, rank: int, cause: str = "it was masked") -> None:
        """Gives a rank up, on all ranks. On each, this one too, one call raises
        :class:`~fabric_ray.errors.PeerLost`: the one that it is in, for another thread may mask
        a rank while a call waits, or its next. Ranks that are masked together may be named by one
        error. Returns when all others have been told, after two seconds at most."""
        self._native.mask(rank, cause)

    @property
    def lost(self) -> tuple[Lost, ...]:
        """Ranks that were given up and have not come again, and this one if others go on without
        it."""
        lost = self._native.lost
        if (own := self._native.broken) is not None:
            lost.append(own)
        return tuple(Lost(rank, "the exchange", cause) for rank, cause in lost)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks whose answers are missing in the sums of the last :meth:`combine_recv`."""
        return tuple(self._native.left_out)

    @property
    def present(self) -> tuple[bool, ...]:
        """Whether each rank is here, as the last call left it."""
        return tuple(self._native.present)

    def dispatch_send(
        self, x: Tensor, indices: Tensor, *, weights: Tensor | None = None, **parts: Tensor
    ) -> None:
        """Sends tokens to the ranks of their experts.

        Args:
            x: ``[tokens, hidden]``.
            indices: ``[tokens, topk]``, the experts of each token; -1 for none.
            weights: float32 ``[tokens, topk]``, of the sums; one for each if ``None``. They go with
                the tokens, for sums are made where the experts are.
            parts: by name, ``[tokens, width]``.

        Raises:
            InvalidArgument: what doesn't fit, before anything is sent; or it isn't dispatch's turn.
            PeerLost: a rank was lost; or others go on without this one.
        """
        if self._steps is not None:
            self._steps.dispatch_send(indices, weights, {"x": x, **parts})
            return
        experts = rows.indices(indices, self._topk)
        given = tokens.given(self._parts, {"x": x, **parts}, len(experts))
        weight = None
        if weights is not None:
            weight = rows.part(
                "weights", weights, width=self._topk, dtype=torch.float32, rows=len(experts)
            )
        self._native.dispatch_send(given, (experts.data_ptr(), experts.numel()), weight)
        self._tokens = len(experts)

    def dispatch_recv(
        self, *, multiple: int = 1, stride: int | None = None, x: Tensor | None = None
    ) -> Dispatched:
        """Waits for the tokens of all ranks, and until those that pass through this one have gone
        on. Rows and arguments are as for ``AllToAll``.

        Raises:
            InvalidArgument: no room for as many rows; or it isn't dispatch_recv's turn.
            PeerLost: a rank was lost; or others go on without this one.
        """
        tokens.check_order(multiple, stride)
        if self._steps is not None:
            return self._steps.dispatch_recv(multiple, stride, x)
        counts, starts, total = self._native.arriving(multiple=multiple, stride=stride)
        tensors, room = tokens.room(self._parts, total, x)
        self._native.dispatch_recv(room)
        self._rows = total
        return Dispatched.on_host(tensors, total, counts, starts)

    def combine_send(self, y: Tensor) -> None:
        """Sends the experts' answers, ``[rows, hidden]``, each where its token was. Returns when
        those of this node are summed.

        Raises:
            InvalidArgument: what doesn't fit; or it isn't combine's turn.
            PeerLost: a rank was lost; or others go on without this one.
        """
        if self._steps is not None:
            self._steps.combine_send(y)
            return
        answers = rows.part("answers", y, width=self._hidden, dtype=self._answers, rows=self._rows)
        self._native.combine_send(answers)

    def combine_recv(
        self, *, out: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Waits for the sums of all nodes: for each token their sum, ``[tokens, hidden]``.

        Sums are made in float32: over a token's experts on a rank in their order, times their
        weights; over a node's ranks; over nodes. The first two are rounded to ``answer_dtype``. It
        is the same bits whatever arrives first. While a rank is missing each rank is a node of its
        own, so that there is one rounding less; its answers are left out.

        Args:
            out: where to put the sums.
            dtype: of the sums: ``answer_dtype`` if ``None``.

        Raises:
            InvalidArgument: what doesn't fit; or it isn't combine_recv's turn.
            PeerLost: a rank was lost; or others go on without this one.
        """
        if self._steps is not None:
            return self._steps.combine_recv(out, dtype)
        out, room = tokens.sums(out, dtype, self._answers, (self._tokens, self._hidden))
        self._native.combine_recv(room, SUMS[out.dtype])
        return out[: self._tokens]
