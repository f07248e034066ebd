"""Tables that kernels of expert parallelism write and read: sizes, rows and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import structs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_TOPK = 256
#: Routes that one block counts.
TILE = 256


@dataclass(frozen=True)
class MoeSizes:
    """What all ranks of an exchange agree on.

    Raises:
        InvalidArgument: sizes that can't be.
    """

    ranks: int
    experts: int
    topk: int
    max_tokens: int

    def __post_init__(self) -> None:
        limits = (
            ("ranks", self.ranks, 4096),
            ("experts", self.experts, 1 << 16),
            ("topk", self.topk, min(MAX_TOPK, self.experts)),
            ("max_tokens", self.max_tokens, 1 << 20),
        )
        for name, value, most in limits:
            if not 1 <= value <= most:
                raise InvalidArgument(f"{name} is {value}; give 1 to {most}")
        if self.experts % self.ranks:
            raise InvalidArgument(
                f"{self.experts} experts can't be spread over {self.ranks} ranks evenly; "
                "add experts that no token goes to"
            )
        if self.ranks * self.pair_rows >= 1 << 32:
            raise InvalidArgument("rows are counted in 32 bits; lower max_tokens")

    @property
    def local_experts(self) -> int:
        """Experts that each rank hosts."""
        return self.experts // self.ranks

    @property
    def out_rows(self) -> int:
        """Rows that one rank sends, at most."""
        return self.max_tokens * self.topk

    @property
    def pair_rows(self) -> int:
        """Rows from one rank to another, at most."""
        return self.max_tokens * min(self.topk, self.local_experts)

    @property
    def tiles(self) -> int:
        """Parts that routes are counted in."""
        return -(-self.out_rows // TILE)


@dataclass(frozen=True)
class Routing:
    """The rows of one rank's tokens, in the order of experts and, for one expert, of tokens.

    All but ``fault`` are int32 and hold unsigned numbers; -1 is none.
    """

    counts: Tensor
    """``[experts]``: rows for each."""
    starts: Tensor
    """``[experts + 1]``: the first row for each, and the number of all."""
    first: Tensor
    """``[ranks + 1]``: the first row for each rank, and the number of all."""
    token_of: Tensor
    """``[max_tokens * topk]``: of each row, its token."""
    row_of: Tensor
    """``[max_tokens, topk]``: of each (token, k), its row."""
    fault: Tensor
    """int64 ``[1]``: -1, or what :meth:`check` tells."""
    tile_counts: Tensor
    tile_faults: Tensor

    @staticmethod
    def empty(sizes: MoeSizes, device: torch.device | str) -> Routing:
        """Room for it."""
        words = _allocator(device)
        return Routing(
            counts=words(sizes.experts),
            starts=words(sizes.experts + 1),
            first=words(sizes.ranks + 1),
            token_of=words(sizes.out_rows),
            row_of=words(sizes.max_tokens, sizes.topk),
            fault=words(1, wide=True),
            tile_counts=words(sizes.tiles, sizes.experts),
            tile_faults=words(sizes.tiles, wide=True),
        )

    def check(self, indices: Tensor) -> None:
        """Waits for the device.

        Raises:
            InvalidArgument: which token goes where it can't; such rows have been left out.
        """
        fault = int(self.fault.item())
        if fault == -1:
            return
        position, kind = divmod(fault, 4)
        token, k = divmod(position, indices.shape[1])
        if kind == 0:
            raise InvalidArgument(
                f"more tokens than there is room for, {self.row_of.shape[0]}; "
                "send fewer at a time, or raise max_tokens"
            )
        expert = int(indices[token, k].item())
        if kind == 1:
            raise InvalidArgument(
                f"token {token} goes to expert {expert}, and there are {self.counts.shape[0]} "
                "from 0; -1 is none"
            )
        raise InvalidArgument(f"token {token} goes to expert {expert} twice; name each expert once")


@dataclass(frozen=True)
class Placement:
    """Where the rows of all sources go: to local experts, and for one expert by source.

    All but ``fault`` are int32 and hold unsigned numbers.
    """

    counts: Tensor
    """``[local experts]``: rows of each, of all sources."""
    starts: Tensor
    """``[local experts + 1]``: the first row of each, and all, those that fill up included."""
    origins: Tensor
    """``[ranks, local experts + 1]``: where each expert's begin among a source's, and all."""
    targets: Tensor
    """``[ranks, local experts]``: where a source's first row for each expert goes."""
    fault: Tensor
    """int64 ``[1]``: -1, or what :meth:`check` tells."""

    @staticmethod
    def empty(sizes: MoeSizes, device: torch.device | str) -> Placement:
        """Room for it."""
        words = _allocator(device)
        ranks, local = sizes.ranks, sizes.local_experts
        return Placement(
            counts=words(local),
            starts=words(local + 1),
            origins=words(ranks, local + 1),
            targets=words(ranks, local),
            fault=words(1, wide=True),
        )

    def check(self) -> None:
        """Waits for the device.

        Raises:
            InvalidArgument: a rank or an expert has more rows than there is room for; nothing was
                handed out.
        """
        fault = int(self.fault.item())
        if fault == -1:
            return
        kind, value = fault >> 32, fault & 0xFFFFFFFF
        text = {
            1: f"rank {value} sends more rows than it can have",
            2: f"local expert {value} gets more rows than its stride; raise the stride",
            3: f"{value} rows arrive and there is room for fewer; make room for them",
        }[kind]
        raise InvalidArgument(text)

    def places(self) -> structs.Places:
        """What kernels are given of it."""
        return structs.Places(
            self.origins.data_ptr(),
            self.targets.data_ptr(),
            self.fault.data_ptr(),
            self.counts.shape[0],
        )


@dataclass(frozen=True)
class Chunk:
    """Rows of one source that lie behind one another."""

    source: int
    first: int
    """Counted among the source's."""
    rows: int
    place: int | None
    """Bytes from the beginning of the region; ``None``: they don't come, zeros stand for them."""

    @staticmethod
    def table(chunks: Sequence[Chunk]) -> list[list[int]]:
        """The words of an int64 tensor ``[chunks, 3]`` that kernels read."""
        return [
            [_signed(c.source | c.rows << 32), c.first, -1 if c.place is None else c.place]
            for c in chunks
        ]


def _allocator(device: torch.device | str) -> Any:
    import torch

    def words(*shape: int, wide: bool = False) -> Tensor:
        return torch.empty(shape, dtype=torch.int64 if wide else torch.int32, device=device)

    return words


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
