"""What one rank of an exchange is, whichever way tokens go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fabric_ray.errors import NotQuiesced
from fabric_ray.moe import rows, tokens
from fabric_ray.moe.tokens import Dispatched, RowPart


class RankExchange:
    """One rank of an exchange: its sizes, and the calls that are the same for all exchanges."""

    _native: Any
    _steps: Any
    """Makes the calls on a device; ``None`` on the host."""

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        experts: int,
        topk: int,
        hidden: int,
        dtype: torch.dtype,
        parts: Sequence[RowPart],
        answer_dtype: torch.dtype,
        device: torch.device | str | None,
        token_width: int | None = None,
    ) -> None:
        self._parts = (RowPart("x", token_width or hidden, dtype), *parts)
        self._topk, self._hidden, self._ranks = topk, hidden, ranks
        self._local = experts // ranks
        self._rank = rank
        self._answers = answer_dtype
        self._tokens = self._rows = 0
        self._begun: tuple[Any, dict[str, Tensor]] | None = None
        """Tensors that a receive took rows into before it failed, and their placement."""
        self._home = torch.device(device or "cpu")
        if self._home.type == "cuda" and self._home.index is None:
            self._home = torch.device("cuda", torch.cuda.current_device())

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def ranks(self) -> int:
        """All, those that are left out included."""
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
    def nbytes(self) -> int:
        """Bytes of this rank's buffers."""
        total: int = sum(nbytes for _, _, nbytes in self._native.areas)
        return total

    def explain(self) -> str:
        """What the buffers are for, and what makes them as large as they are."""
        lines = [f"{nbytes:>16,}  {name}: {what}" for name, what, nbytes in self._native.areas]
        return "\n".join([*lines, f"{self.nbytes:>16,}  bytes in all"])

    @property
    def present(self) -> tuple[bool, ...]:
        """Whether each rank takes part."""
        return tuple(self._native.present)

    def expect_departures(self) -> None:
        """Tells that this rank makes no more calls: the log no longer reports other ranks that
        leave as lost."""
        self._native.expect_departures()

    def dispatch_recv(
        self, *, multiple: int = 1, stride: int | None = None, x: Tensor | None = None
    ) -> Dispatched:
        """Waits for the tokens of all ranks, and until those that pass through this one have gone
        on. Those for one expert are behind one another, in the order of their ranks, and of the
        tokens there.

        Args:
            multiple: each expert's rows are filled up to a multiple, for a grouped GEMM.
            stride: each expert's rows begin at a multiple of this instead, for a batched GEMM.
            x: where to put the tokens, ``[rows or more, hidden]``.

        Through an ``AllToAll`` rows of a rank that was lost on the way are zeros. On its device
        there must be room for all rows that can come, by ``stride`` and in ``x``, and ``x`` has all
        of it.

        Raises:
            InvalidArgument: there are too few rows of room, or dispatch_recv is not next.
            PeerLost: through a ``ThroughputAllToAll``, a rank was lost; or others go on without
                this one.
            NotQuiesced: through an ``AllToAll``, a lost rank may still write where further rows
                would come; call it again, with the same arguments.
        """
        tokens.check_order(multiple, stride)
        if self._steps is not None:
            found: Dispatched = self._steps.dispatch_recv(multiple, stride, x)
            return found
        counts, starts, total = self._native.arriving(multiple=multiple, stride=stride)
        tensors, room = tokens.room(self._parts, total, x)
        placement = (starts, total)
        if self._begun is not None and self._begun[0] == placement:
            for name, tensor in self._begun[1].items():
                tensors[name][:total].copy_(tensor[:total])
        try:
            self._native.dispatch_recv(room)
        except NotQuiesced:
            # The rows that came do not come again (RS-1).
            self._begun = placement, tensors
            raise
        self._begun, self._rows = None, total
        return Dispatched.on_host(tensors, total, counts, starts)

    def combine_send(self, y: Tensor) -> None:
        """Sends the experts' answers, ``[rows, hidden]``, each where its token was. Through a
        ``ThroughputAllToAll`` it returns when those of this node are summed.

        Raises:
            InvalidArgument: a tensor doesn't match, or combine_send is not next.
            PeerLost: as :meth:`dispatch_recv`.
        """
        if self._steps is not None:
            self._steps.combine_send(y)
            return
        answers = rows.part("answers", y, width=self._hidden, dtype=self._answers, rows=self._rows)
        self._native.combine_send(answers)

    def _weights(self, weights: Tensor | None, count: int) -> rows.Part | None:
        """Weights of ``count`` tokens, as the native exchange takes them."""
        if weights is None:
            return None
        return rows.part("weights", weights, width=self._topk, dtype=torch.float32, rows=count)
