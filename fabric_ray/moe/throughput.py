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
from fabric_ray.moe.device_memory import check_sizes
from fabric_ray.moe.exchange import RankExchange
from fabric_ray.moe.tokens import SUMS, RankLoss, RowPart
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


class ThroughputAllToAll(RankExchange):
    """One rank of a high-throughput exchange: the calls of :class:`~fabric_ray.moe.AllToAll`, in
    the same order (uccl-ep §3 to §5).

    A token is sent once to each node with experts of it: to the rank with the source's local
    number, which forwards it. Each node sends back one sum. Tokens move in chunks, through rings.

    Ranks forward for one another while they are in a call. Between calls, only as much moves as
    the rings hold.

    All ranks give up a rank that dies, or does nothing for ``timeout`` seconds while another waits
    for it. This ends the exchange: on each other rank the present or next call raises
    :class:`~fabric_ray.errors.PeerLost` once, with all lost ranks known by then. The next
    ``dispatch_send`` goes on with the remaining ranks; nothing is rebuilt. Some ranks may have
    finished the exchange that others were in: restart all ranks at a step of which all have the
    input. :attr:`lost` names the lost ranks, :attr:`left_out` the ranks whose answers are missing
    in sums. While a rank is missing, tokens are not forwarded: each is sent to every rank of its
    experts, over one channel.

    No majority is needed to go on. If the network is partitioned, the ranks of each part give up
    all others and go on with sums that lack their answers; only :attr:`lost` and :attr:`left_out`
    tell. A caller that needs all answers must check both after each error, and stop.

    A process that replaces a lost rank has the next ``incarnation``: all others :meth:`admit` it,
    and it all others, between the same two exchanges. A rank that others have given up can't go
    on: its calls raise ``PeerLost`` with its own name.

    With ``device``, rows stay there: each call launches a kernel on torch's current stream that
    moves and sums them. A call returns when its rows are done; it waits for earlier work of the
    stream, so that it can't be captured into a graph. Make all calls of an exchange on one stream:
    only the stream orders them. After a call that raises, kernels may use its tensors until the
    stream is idle; torch doesn't reuse their memory before. Ranks with and without kernels can
    share an exchange.

    Args:
        engine: the model for the exchange's own engines, one for each proxy thread.
        rank: the number of this rank, from 0.
        ranks: number of ranks.
        ranks_per_node: rank ``r`` is on node ``r // ranks_per_node``.
        experts: as for ``AllToAll``.
        topk: as for ``AllToAll``.
        hidden: as for ``AllToAll``.
        max_tokens: as for ``AllToAll``.
        dtype: as for ``AllToAll``.
        parts: as for ``AllToAll``.
        answer_dtype: as for ``AllToAll``.
        channels: rings of each pair of ranks, 1 to 3; each carries a part of the tokens.
        chunk: tokens that are sent, returned and summed together.
        ring_chunks: chunks of a ring, at least 2.
        threads: proxy threads, at most ``channels``.
        timeout: seconds, the same on all ranks; :meth:`set_timeout` changes it.
        incarnation: number of earlier processes with this rank, below 4096.
        device: the GPU that tokens, indices, weights and answers lie on; the host if ``None``. Each
            rank on a GPU has a stream of its own.
        workers: thread blocks of the kernel that moves rows, no more than ``device`` runs at once.
        launcher: launches kernels on ``device``, in place of that GPU.

    Raises:
        InvalidArgument: sizes that don't go together; more workers than run at once.
        ResourceError: there is no such GPU.
        CompileError: a kernel doesn't compile for it.
    """

    _native: MoeThroughput
    _steps: WorkerSteps | None

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
        incarnation: int = 0,
        device: torch.device | str | None = None,
        workers: int = 24,
        launcher: Launcher | None = None,
    ) -> None:
        sizes = {"ranks": ranks, "experts": experts, "topk": topk, "hidden": hidden}
        rings = {"channels": channels, "chunk": chunk, "ring_chunks": ring_chunks}
        tokens.check_sizes(
            parts,
            dtype,
            answer_dtype,
            **sizes,
            **rings,
            max_tokens=max_tokens,
            ranks_per_node=ranks_per_node,
            threads=threads,
            workers=workers,
        )
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} is out of range [0, {ranks})")
        if not 0 <= incarnation < 1 << 12:
            raise InvalidArgument(f"incarnation: got {incarnation}, expected 0 to 4095")
        super().__init__(
            rank=rank,
            ranks=ranks,
            experts=experts,
            topk=topk,
            hidden=hidden,
            dtype=dtype,
            parts=parts,
            answer_dtype=answer_dtype,
            device=device,
        )
        home = self._home
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
            incarnation=incarnation,
            kernels=None if memory is None else (workers, memory.allocate),
        )
        self._steps = None
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
    def asynchronous(self) -> bool:
        """Never: calls return when their rows have been seen to, and how many come is known."""
        return False

    def check(self) -> None:
        """Nothing: calls raise what goes wrong in them, on a device too."""

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far; while a call is under way, until it last had to wait."""
        return Traffic(*self._native.traffic)

    def descriptor(self) -> bytes:
        """What the other ranks need to know of this one, and what it knows of them: for a rank that
        comes anew, make one after the last exchange."""
        return self._native.descriptor()

    def admit(self, descriptor: bytes) -> int:
        """Admits a rank by its descriptor, before the first dispatch, or between two exchanges in
        place of a lost rank; returns its number.

        Raises:
            HandshakeError: its sizes differ; the text lists all differences.
            InvalidArgument: the rank is here already, an exchange is under way, or its incarnation
                has ended.
            PeerLost: the other ranks go on without this one.
            NotQuiesced: its predecessor may still write to this rank's memory after the timeout,
                for it is still connected.
        """
        return self._native.admit(descriptor)

    def connect(self, descriptors: Iterable[bytes | None]) -> None:
        """Admits all ranks by their descriptors; ``None`` for a rank that all ranks leave out. This
        rank's own descriptor is ignored."""
        for rank, descriptor in enumerate(descriptors):
            if rank == self._rank:
                continue
            if descriptor is None:
                self._native.leave_out(rank)
            else:
                self.admit(descriptor)

    def set_timeout(self, seconds: float) -> None:
        """Sets the seconds without progress after which other ranks give up a rank that they wait
        for. A rank that is in a call has eight times as long; a rank whose own kernels do nothing
        leaves after four times. Use one timeout on all ranks: a longer one sends heartbeats too
        rarely for ranks with less than half a second."""
        self._native.set_timeout(seconds)
        if self._steps is not None:
            self._steps.set_timeout(seconds)

    def mask(self, rank: int, cause: str = "it was masked") -> None:
        """Gives a rank up on all ranks. On each, including this one, the present or next call
        raises :class:`~fabric_ray.errors.PeerLost`. One error may name several ranks. Another
        thread may call this while a call waits. Returns when all ranks know, after at most two
        seconds."""
        self._native.mask(rank, cause)

    @property
    def is_whole(self) -> bool:
        """Whether no rank is lost, and the others go on with this one."""
        return not self.lost

    @property
    def lost(self) -> tuple[RankLoss, ...]:
        """Ranks that were lost and not replaced, and this one if the others go on without it."""
        lost = self._native.lost
        if (own := self._native.broken) is not None:
            lost.append(own)
        return tuple(RankLoss(rank, "the exchange", cause) for rank, cause in lost)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks whose answers are missing in the sums of the last :meth:`combine_recv`."""
        return tuple(self._native.left_out)

    def dispatch_send(
        self, x: Tensor, indices: Tensor, *, weights: Tensor | None = None, **parts: Tensor
    ) -> None:
        """Sends tokens to the ranks of their experts, once all ranks have admitted this one.

        Args:
            x: ``[tokens, hidden]``.
            indices: ``[tokens, topk]``, the experts of each token; -1 for none.
            weights: float32 ``[tokens, topk]``, of the sums; one for each if ``None``. They go with
                the tokens, for sums are made where the experts are.
            parts: by name, ``[tokens, width]``.

        Raises:
            InvalidArgument: a tensor doesn't match, or dispatch_send is not next; nothing was sent.
            PeerLost: a rank was lost; or others go on without this one.
        """
        if self._steps is not None:
            self._steps.dispatch_send(indices, weights, {"x": x, **parts})
            return
        experts = rows.indices(indices, self._topk)
        given = tokens.given(self._parts, {"x": x, **parts}, len(experts))
        weight = self._weights(weights, len(experts))
        self._native.dispatch_send(given, (experts.data_ptr(), experts.numel()), weight)
        self._tokens = len(experts)

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
            InvalidArgument: a tensor doesn't match, or combine_recv is not next.
            PeerLost: a rank was lost; or others go on without this one.
        """
        if self._steps is not None:
            return self._steps.combine_recv(out, dtype)
        out, room = tokens.sums(out, dtype, self._answers, (self._tokens, self._hidden))
        self._native.combine_recv(room, SUMS[out.dtype])
        return out[: self._tokens]
