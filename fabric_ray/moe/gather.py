"""An all-gather over an exchange, for ranks that may be lost."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from fabric_ray.moe.all_to_all import AllToAll

if TYPE_CHECKING:
    from fabric_ray.moe.exchanges import Exchanges

_HEAD = struct.Struct("<HI")
_NBYTES = 512
ROW_NBYTES = _NBYTES - _HEAD.size
"""Bytes of a value in one row."""
_ROWS = 16
"""Rows of one dispatch, at most."""
LEAVES = b"leaves"
"""What a rank gathers that destroys its buffer."""


class Gather:
    """An all-gather of values over an exchange, where a rank that stalls or dies is named after the
    timeout, as in all calls of the face.

    Each rank sends a row to every rank, or several for a long value. All ranks make it together. A
    rank that destroys its buffer meanwhile takes no part any more.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._rank, self._ranks = exchanges.comm.rank(), exchanges.comm.size()
        self._exchange = exchanges.make(
            checked=False,
            experts=self._ranks,
            topk=self._ranks,
            hidden=_NBYTES,
            max_tokens=_ROWS,
            dtype=torch.uint8,
            private_rows=1,
        )
        self._all = torch.arange(self._ranks, dtype=torch.int64, device="cpu")[None]
        exchanges.gather = self

    def is_one_of(self, exchanges: Collection[AllToAll]) -> bool:
        """Whether it gathers over one of these exchanges."""
        return self._exchange in exchanges

    def __call__(self, value: bytes, rows: int = 1) -> list[bytes | None]:
        """Each rank's value, cut to 506 bytes for each row; ``None`` for a rank that takes no part.

        Args:
            rows: how many are sent, the same on all ranks.

        Raises:
            PeerLost: a rank was lost, and ranks don't go on without it.
        """
        value = value[: rows * ROW_NBYTES]
        # From 1, for rows of a rank that is lost on the way come as zeros.
        head = _HEAD.pack(self._rank + 1, len(value))
        sent = torch.zeros(rows, _NBYTES, dtype=torch.uint8, device="cpu")
        for row, into in enumerate(sent):
            part = head + value[row * ROW_NBYTES :][:ROW_NBYTES]
            into[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        whole: dict[int, bytes] = {}
        lengths: dict[int, int] = {}
        for begin in range(0, rows, _ROWS):
            came: dict[int, bytes] = {}
            for one in self._dispatched(sent[begin : begin + _ROWS]):
                rank, length = _HEAD.unpack_from(one)
                if 0 < rank <= self._ranks:
                    came[rank - 1] = came.get(rank - 1, b"") + one[_HEAD.size :]
                    lengths[rank - 1] = length
            # A rank that is lost on the way said nothing.
            whole = {rank: whole.get(rank, b"") + part for rank, part in came.items()}
            gone = [r for r, one in whole.items() if one[: lengths[r]] == LEAVES != value]
            for rank in gone:
                del whole[rank]
                self._exchanges.lose(rank, "it has destroyed its buffer")
            if gone:
                self._exchanges.check_whole()
        return [
            whole[rank][: lengths[rank]] if rank in whole else None for rank in range(self._ranks)
        ]

    def _dispatched(self, rows: torch.Tensor) -> list[bytes]:
        """Rows of all ranks."""
        self._exchanges.check_whole()
        self._exchanges.follow(self._exchange)
        self._exchange.dispatch_send(rows, self._all.expand(len(rows), -1))
        received = self._exchange.dispatch_recv()
        self._exchanges.check_whole()
        return [one.tobytes() for one in received.x.numpy()]
