"""One rank of an exchange of tokens between experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fabric_ray._native import MoeExchange
from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import Cancelled, InvalidArgument, Unsupported
from fabric_ray.kernels import Launcher, MoeSizes
from fabric_ray.moe import rows, tokens
from fabric_ray.moe.device import DeviceSteps
from fabric_ray.moe.device_memory import check_sizes, gpu, room_on
from fabric_ray.moe.exchange import RankExchange
from fabric_ray.moe.tokens import SUMS, Dispatched, Outgoing, RankLoss, Room, RowPart


class AllToAll(RankExchange):
    """One rank of an exchange: ``dispatch_send``, ``dispatch_recv``, ``combine_send``,
    ``combine_recv``, in this order (fabric-lib §6).

    The sending calls return when their tensors may be used again. Bytes move in the background
    until the receiving call; a shared expert or another exchange may run meanwhile.

    Each rank calls ``connect([descriptor of each rank])`` once; gather the descriptors by any means
    (``torch.distributed.all_gather_object``, Ray). A rank that dies, or is silent for ``timeout``
    seconds while others wait for it, is given up: its tokens and answers are left out, the others
    go on, and :attr:`lost` names it.

    With ``device``, kernels do a rank's part on torch's current stream, and no call waits for them:
    results are valid for later work of that stream. An error on the device is raised by a later
    call, or by :meth:`check`. Whole exchanges, from ``dispatch_send`` on, can be captured into a
    CUDA graph. Ranks with and without kernels can share an exchange.

    Args:
        engine: of this rank alone.
        rank: the number of this rank, from 0.
        ranks: number of ranks.
        experts: number of experts, ``experts / ranks`` on each rank; rank 0 has the first ones.
        topk: experts of each token.
        hidden: elements of a token.
        max_tokens: most tokens of one dispatch.
        dtype: of tokens; any. For fp8 and int8, scales are a part.
        token_width: elements of ``dtype`` that a token is sent as, where several values are packed
            in one; ``hidden`` if ``None``. Answers always have ``hidden`` elements.
        parts: further tensors with a row for each token.
        answer_dtype: of the experts' answers: float32, bfloat16 or float16.
        private_rows: rows that each source sends to each rank at once; further rows wait for that
            rank's slot offer. With ``max_tokens * topk`` rows, none wait.
        shared_rows: rows of the buffer for further rows; the largest possible number if ``None``.
            With fewer, they arrive in several rounds.
        timeout: seconds; :meth:`set_timeout` changes it.
        device: the GPU that tokens and answers lie on; the host if ``None``. Each rank on a GPU
            has a stream of its own.
        launcher: launches kernels on ``device``, in place of that GPU.
        expert_rows: rows that an expert can get in one exchange, for kernels to have room for; of
            all tokens of all ranks if ``None``.
        direct: kernels store rows and answers straight to the memory of peers that they reach
            (NVLink and the GPU itself, by ``cuda_ipc``); :meth:`explain` names these peers. If
            there are more rows than ``private_rows``, ``dispatch_send`` then waits on the device
            until those peers have said where they go.

    Raises:
        InvalidArgument: sizes that don't go together.
        ResourceError: there is no such GPU.
        CompileError: a kernel doesn't compile for it.
    """

    _native: MoeExchange
    _steps: DeviceSteps | None

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
        token_width: int | None = None,
        parts: Sequence[RowPart] = (),
        answer_dtype: torch.dtype = torch.bfloat16,
        private_rows: int = 32,
        shared_rows: int | None = None,
        timeout: float = 30.0,
        device: torch.device | str | None = None,
        launcher: Launcher | None = None,
        expert_rows: int | None = None,
        direct: bool = True,
    ) -> None:
        limits = {"ranks": ranks, "experts": experts, "topk": topk, "hidden": hidden}
        limits["token_width"] = hidden if token_width is None else token_width
        tokens.check_sizes(parts, dtype, answer_dtype, **limits, max_tokens=max_tokens)
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} is out of range [0, {ranks})")
        if private_rows < 0:
            raise InvalidArgument(f"private_rows must be >= 0, got {private_rows}")
        if (shared_rows or 1) < 1:
            raise InvalidArgument(f"shared_rows must be >= 1, or None, got {shared_rows}")
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
            token_width=token_width,
        )
        self._unconnected = set(range(ranks)) - {rank}
        home = self._home
        self._left_out: tuple[int, ...] = ()
        if launcher is not None or home.type != "cpu":
            check_sizes(ranks, self._parts)
            launcher = launcher or gpu(home)
        memory: list[Tensor] = []

        def allocate(nbytes: int) -> Region:
            tensor, region = room_on(engine, nbytes, home)
            memory.append(tensor)
            return region

        self._native = MoeExchange(
            engine,
            rank=rank,
            ranks=ranks,
            experts=experts,
            topk=topk,
            max_tokens=max_tokens,
            row_nbytes=sum(p.width * p.dtype.itemsize for p in self._parts),
            elements=hidden,
            dtype=SUMS[answer_dtype],
            private_rows=private_rows,
            shared_rows=shared_rows,
            allocate=None if launcher is None else allocate,
        )
        self._steps = None
        if launcher is not None:
            self._steps = DeviceSteps(
                self._native,
                memory[0],
                MoeSizes(ranks, experts, topk, max_tokens),
                rank,
                parts=self._parts,
                hidden=hidden,
                answer_dtype=answer_dtype,
                launcher=launcher,
                timeout=timeout,
                expert_rows=expert_rows or ranks * max_tokens,
                direct=direct,
            )
        self.set_timeout(timeout)

    @property
    def asynchronous(self) -> bool:
        """Whether kernels do this rank's part: calls return before their work is done, and how many
        rows come is known on the device alone."""
        return self._steps is not None

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph has calls of this exchange: its replays are no calls of another one
        that takes its place."""
        return self._steps is not None and self._steps.captured

    def explain(self) -> str:
        """What the buffers are for, what makes them as large as they are, and which way rows go
        to each other rank, how many went that way, and why."""
        ways = [f"rows to rank {rank}: {way}" for rank, way in sorted(self._native.ways)]
        return "\n".join([super().explain(), *ways])

    def descriptor(self, only: int | None = None) -> bytes:
        """What the other ranks need to know of this one.

        Args:
            only: a rank that comes anew; those that are here keep what they have.

        Raises:
            InvalidArgument: the rank is here.
            NotQuiesced: after the timeout the one before it may still write to this rank's memory,
                or kernels still hand out its rows.
        """
        self._finish()
        return self._native.descriptor(only)

    def admit(self, descriptor: bytes) -> int:
        """Takes a rank in by its descriptor, from the next dispatch on; returns its number.

        A rank that comes anew and all others admit one another between the same two exchanges. What
        was launched on a device is waited for.

        Raises:
            HandshakeError: it is of another shape; the text lists what differs.
            InvalidArgument: it is here already, or was given no descriptor of this rank.
        """
        self._finish()
        admitted = self._native.admit(descriptor)
        self._unconnected.discard(admitted)
        return admitted

    def connect(self, descriptors: Iterable[bytes | None]) -> None:
        """Admits all ranks by their descriptors; ``None`` for a rank that is left out. This rank's
        own descriptor is ignored."""
        for rank, descriptor in enumerate(descriptors):
            if descriptor is None:
                self._unconnected.discard(rank)
            elif rank != self._rank:
                self.admit(descriptor)

    def set_timeout(self, seconds: float) -> None:
        """Sets the seconds after which other ranks give up a rank that they wait for. Only the rank
        that stalled is given up: ranks blocked on it report that. No wait takes longer than twelve
        timeouts. Use one timeout on all ranks: a longer one sends heartbeats too rarely for the
        others. Waits of a device end by themselves after sixteen timeouts; a CUDA graph keeps the
        timeout of its capture."""
        self._native.set_timeout(seconds)
        if self._steps is not None:
            self._steps.set_timeout(seconds)

    def check(self, *, wait: bool = True) -> None:
        """Waits for the device and raises its error, if there is one.

        Args:
            wait: if false, raises what is known by now.

        Raises:
            InvalidArgument: tokens named experts out of range, and their rows were left out.
            Cancelled: a wait of the device failed, the exchange was closed, or the host did not
                follow the device in time; results are invalid.
            NotQuiesced: as ``Cancelled``, because a lost rank has not released memory.
        """
        if self._steps is None:
            self._native.check()
        else:
            self._steps.check(wait)

    def finish(self) -> None:
        """Waits until all other ranks have this rank's data or are given up, so that the engine
        can be closed. On a device, call :meth:`check` first: this call doesn't wait for kernels.

        Raises:
            InvalidArgument: another thread is in a call.
        """
        self._native.finish()

    def close(self) -> None:
        """Ends all waits of the device; later calls raise. Other ranks give this rank up when they
        wait for it."""
        self._native.leave()

    def mask(self, rank: int, cause: str = "it was masked") -> None:
        """Gives a rank up."""
        self._native.mask(rank, cause)
        self._unconnected.discard(rank)

    def disconnect(self) -> None:
        """Lets go of all other ranks between two exchanges, so that all can connect again by new
        descriptors: ranks that were lost or masked, and live, come back so. All ranks call it
        before any of them calls :meth:`descriptor`. Until :meth:`connect` no call is made. What was
        launched on a device is waited for, and so are ranks that still lack data of this one; CUDA
        graphs of this exchange stay good.

        Raises:
            InvalidArgument: an exchange is under way, or this one was closed.
            NotQuiesced: after the timeout a rank may still write to this rank's memory.
        """
        self._finish()
        if self._native.between_exchanges:
            # Ranks that gave this one up take nothing more of it.
            for rank in self.given_up_by:
                self._native.mask(rank, "it gave this rank up")
            self._native.finish()
        self._native.disconnect()
        self._unconnected = set(range(self._ranks)) - {self._rank}

    def between_exchanges(self) -> bool:
        """Whether no exchange is under way, as :meth:`disconnect` needs it. What was launched on a
        device is waited for; false if its host doesn't follow in time."""
        with suppress(Cancelled):
            self._finish()
            return self._native.between_exchanges
        return False

    @property
    def given_up_by(self) -> tuple[int, ...]:
        """Ranks that have told that they gave this one up, until they are admitted again."""
        return tuple(self._native.given_up_by)

    @property
    def is_whole(self) -> bool:
        """Whether no rank was lost, and none has given this one up."""
        return self._native.is_whole

    @property
    def lost(self) -> tuple[RankLoss, ...]:
        """Ranks that were lost and not replaced."""
        return tuple(RankLoss(*one) for one in self._native.lost)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks whose answers are missing in the sums of the last :meth:`combine_recv`. Waits for a
        device, and raises as :meth:`check`."""
        return self._left_out if self._steps is None else self._steps.left_out()

    @property
    def wait_times(self) -> list[int]:
        """Nanoseconds that the last ``dispatch_recv`` or :meth:`combine_recv` waited for each rank:
        from the beginning of the call to the rank's last message; 0 if that was there before.

        Raises:
            Unsupported: kernels do this rank's part.
        """
        if self._steps is not None:
            raise Unsupported("waits are measured on the host alone; leave their statistics out")
        return self._native.wait_times

    def dispatch_send(self, x: Tensor, indices: Tensor, **parts: Tensor) -> None:
        """Sends tokens to the ranks of their experts.

        Args:
            x: ``[tokens, token_width]``.
            indices: ``[tokens, topk]``, the experts of each token; -1 for none.
            parts: by name, ``[tokens, width]``.

        Raises:
            InvalidArgument: a rank was neither admitted nor left out, a tensor doesn't match, or
                dispatch_send is not next; nothing was sent.
        """
        self.dispatch(Outgoing(x, indices, parts))

    def dispatch(self, out: Outgoing) -> None:
        """As :meth:`dispatch_send`; a device also casts tokens and keeps indices by its kernels."""
        if self._unconnected:
            raise InvalidArgument(
                f"rank {min(self._unconnected)} is not connected; give connect the descriptors of "
                f"all {self._ranks} ranks, None for a rank that is left out"
            )
        if self._steps is not None:
            self._steps.dispatch_send(out)
            return
        experts = rows.indices(out.indices, self._topk)
        parts = {"x": out.x, **out.parts}
        if out.cast is not None:
            parts["x"], parts["scales"] = out.cast.cast(out.x)
        given = tokens.given(self._parts, parts, len(experts))
        self._native.dispatch_send(given, (experts.data_ptr(), experts.numel()))
        self._tokens = len(experts)
        if out.kept is not None:
            out.kept.copy_(experts)

    def arriving(self) -> list[int]:
        """Waits until all ranks have said which rows they send: the rows of each local expert that
        come, those of ranks that are lost later included. Of a device, the host waits only for the
        first part of ``dispatch_send``, not for tokens or other work.

        Raises:
            InvalidArgument: dispatch_recv is not next.
            Cancelled: as :meth:`check`; or the device hasn't come to ``dispatch_send`` within
                sixteen timeouts. Call again then.
            NotQuiesced: as :meth:`check`.
            Unsupported: the dispatch is in a CUDA graph.
        """
        if self._steps is not None:
            return self._steps.arriving()
        counts, _, _ = self._native.arriving(multiple=1, stride=None)
        return counts

    def dispatch_recv(
        self,
        *,
        multiple: int = 1,
        stride: int | None = None,
        x: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> Dispatched:
        """As :meth:`RankExchange.dispatch_recv`.

        Args:
            counts: rows of each local expert, of :meth:`arriving` or of an earlier dispatch by the
                same indices: a device has room for these alone. If more come, it hands out nothing,
                as :meth:`check` says. Taken on the host, where the rows that come are counted.
        """
        if self._steps is None:
            return super().dispatch_recv(multiple=multiple, stride=stride, x=x)
        tokens.check_order(multiple, stride)
        return self._steps.dispatch_recv(multiple, stride, x, counts=counts)

    def dispatch_recv_into(self, room: Room, stride: int) -> Dispatched:
        """As ``dispatch_recv`` on a device, each expert's rows at a multiple of ``stride``.

        Raises:
            InvalidArgument: a tensor doesn't match, or dispatch_recv is not next.
            Unsupported: no kernels do this rank's part.
        """
        if self._steps is None:
            raise Unsupported("on the host dispatch_recv says what came; call that")
        return self._steps.dispatch_recv(1, stride, room.tensors.get("x"), room)

    def combine_answers(self) -> Tensor:
        """Waits for the answers, and gives them one by one, ``[tokens, topk, hidden]``: zeros where
        an index was -1, and from lost ranks. Before :meth:`combine_recv`; what the gradient of a
        weight needs.

        Raises:
            InvalidArgument: combine_recv is not next.
        """
        if self._steps is not None:
            return self._steps.combine_answers()
        out = torch.empty(self._tokens, self._topk, self._hidden, dtype=self._answers, device="cpu")
        flat = out.view(-1, self._hidden)
        self._native.combine_answers(
            rows.part("answers", flat, width=self._hidden, dtype=self._answers)
        )
        return out

    def combine_recv(
        self,
        weights: Tensor | None = None,
        *,
        out: Tensor | None = None,
        dtype: torch.dtype | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Waits for the answers: for each token their sum, ``[tokens, hidden]``.

        The sum is made in float32 and in the order of a token's experts: the same bits for any
        number of ranks. Answers of lost ranks are left out.

        Args:
            weights: float32 ``[tokens, topk]``; one for each if ``None``.
            out: where to put the sums.
            dtype: of the sums: ``answer_dtype`` if ``None``.
            wanted: bool ``[tokens, topk]``, the answers that are summed; all if ``None``. On a
                device also int64: those that aren't negative.

        Raises:
            InvalidArgument: a tensor doesn't match, or combine_recv is not next.
        """
        if self._steps is not None:
            return self._steps.combine_recv(weights, out, dtype, wanted)
        if wanted is not None:
            tokens.check_wanted(wanted, (self._tokens, self._topk), self._home)
        out, room = tokens.sums(out, dtype, self._answers, (self._tokens, self._hidden))
        weight = self._weights(weights, self._tokens)
        some = None if wanted is None or wanted.all() else self.combine_answers()
        self._left_out = tuple(self._native.combine_recv(weight, room, SUMS[out.dtype]))
        if some is not None and wanted is not None:
            # An answer that isn't wanted is skipped, not multiplied by zero.
            out[: self._tokens] = tokens.summed(some, weights, wanted)
        return out[: self._tokens]

    def _finish(self) -> None:
        if self._steps is not None:
            self._steps.finish()
