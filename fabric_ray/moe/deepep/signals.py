"""The signals of a GEMM that a combine overlaps with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from fabric_ray.errors import InvalidArgument, TransferTimeout, Unsupported

_POLL_S = 50e-6


@dataclass(frozen=True)
class Signals:
    """What a GEMM raises while its rows are done, and what is awaited."""

    raised: Tensor
    """Integers ``[local experts, signals of each]``."""
    awaited: Tensor
    """Bool, likewise: those of rows that there are."""
    value: int

    @classmethod
    def of(
        cls,
        blocks: tuple[Tensor | None, Tensor | None, int, int],
        experts: tuple[Tensor | None, int],
    ) -> Self:
        """
        Args:
            blocks: a signal for each block of rows; how many rows each expert has, int32
                ``[local experts]``; rows of a block; the value.
            experts: a signal for each expert; the value.

        Raises:
            InvalidArgument: neither is given, or a shape doesn't match.
            Unsupported: the signals of a GPU.
        """
        (raised, counts, block, value), (of_experts, expert_value) = blocks, experts
        given = raised if of_experts is None else of_experts
        if given is None or (of_experts is None and counts is None):
            raise InvalidArgument(
                "overlap=True takes comp_signal, packed_recv_count, block_m and threshold, or "
                "src_signals and src_signal_expect_value"
            )
        if given.device.type != "cpu":
            raise Unsupported(
                f"signals on {given.device} can't be awaited; call with overlap=False behind the "
                "GEMM, on its stream"
            )
        if of_experts is not None:
            awaited = torch.ones(1, of_experts.numel(), dtype=torch.bool, device="cpu")
            return cls(of_experts.view(1, -1), awaited, expert_value)
        assert counts is not None
        if block < 1 or given.numel() % max(len(counts), 1):
            raise InvalidArgument(
                f"comp_signal has {given.numel()} elements for {len(counts)} experts in blocks of "
                f"{block}; give each expert as many"
            )
        each = given.view(len(counts), -1)
        number = torch.arange(each.shape[1], dtype=torch.int64, device="cpu")
        return cls(each, number * block < counts[:, None], value)

    def wait(self, timeout: float) -> None:
        """
        Raises:
            TransferTimeout: a signal isn't there after so many seconds.
        """
        end = time.monotonic() + timeout
        while True:
            missing = int((self.awaited & (self.raised.to(torch.int64) < self.value)).sum())
            if not missing:
                return
            if time.monotonic() > end:
                raise TransferTimeout(
                    f"{missing} signals of the GEMM are below {self.value} after {timeout:g} s; "
                    "launch it before the combine",
                    operation="low_latency_combine",
                    peer="",
                    missing=missing,
                    after=timeout,
                    quiesced=True,
                )
            time.sleep(_POLL_S)
