"""Where the tokens of DeepEP's normal calls go: the layout that a dispatch is given, and the handle
that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fabric_ray.errors import InvalidArgument, Unsupported


@dataclass(frozen=True)
class Layout:
    """How many tokens go where."""

    tokens_per_rank: Tensor
    """int32 ``[ranks]``."""
    tokens_per_expert: Tensor
    """int32 ``[experts]``."""
    in_rank: Tensor
    """bool ``[tokens, ranks]``."""


def check_together(device: torch.device, *tensors: Tensor | None) -> None:
    """
    Raises:
        InvalidArgument: one lies on another device.
    """
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise InvalidArgument(f"a tensor lies on {tensor.device}; move it to {device}")


def layout_of(topk_idx: Tensor, experts: int, ranks: int) -> Layout:
    """Counts ``topk_idx``, integers ``[tokens, topk]``, -1 for none. An expert that a token names
    twice counts twice, as DeepEP counts it.

    Raises:
        InvalidArgument: experts that don't spread over ranks evenly, or that there aren't.
    """
    layout, extremes = _counted(topk_idx, experts, ranks)
    _check_extremes(torch.stack(extremes).tolist() if extremes else (), experts)
    return layout


def _counted(topk_idx: Tensor, experts: int, ranks: int) -> tuple[Layout, tuple[Tensor, ...]]:
    """As :func:`layout_of`, of the experts that there are, and the least and the largest index, if
    there are any; waits for no device."""
    if experts < 1 or experts % ranks:
        raise InvalidArgument(f"{experts} experts can't be spread over {ranks} ranks evenly")
    if topk_idx.ndim != 2 or topk_idx.dtype.is_floating_point:
        shape = tuple(topk_idx.shape)
        raise InvalidArgument(f"indices are {topk_idx.dtype} {shape}; give integers [tokens, topk]")
    idx = topk_idx.to(torch.int64)
    chosen = _named(idx, experts).sum(1, dtype=torch.int32)
    in_rank = chosen.view(len(idx), ranks, experts // ranks).any(2)
    layout = Layout(
        tokens_per_rank=in_rank.sum(0, dtype=torch.int32),
        tokens_per_expert=chosen.sum(0, dtype=torch.int32),
        in_rank=in_rank,
    )
    return layout, tuple(torch.aminmax(idx)) if idx.numel() else ()


def _check_extremes(extremes: Sequence[int], experts: int) -> None:
    """
    Raises:
        InvalidArgument: the least or the largest index is that of no expert.
    """
    if extremes and not -1 <= extremes[0] <= extremes[1] < experts:
        raise InvalidArgument(
            f"experts {extremes[0]} to {extremes[1]} are named, and there are {experts}; "
            "-1 is for none"
        )


def _named(numbers: Tensor, size: int) -> Tensor:
    """Whether each is 0, 1 and so on: bool ``[..., size]``."""
    return numbers[..., None] == torch.arange(size, dtype=torch.int64, device=numbers.device)


def tally(numbers: Tensor, size: int) -> Tensor:
    """How often 0, 1 and so on are among ``numbers``: int64 ``[size]``. Waits for no device."""
    return _named(numbers.flatten(), size).sum(0)


def checked_layout(
    x: Tensor,
    per_rank: Tensor | None,
    in_rank: Tensor | None,
    per_expert: Tensor | None,
    topk_idx: Tensor | None,
    ranks: int,
) -> Layout:
    """What :func:`layout_of` counted, as a dispatch of ``x`` is given it.

    Raises:
        InvalidArgument: a layout of other indices, or of other tokens.
    """
    if per_rank is None or in_rank is None or per_expert is None:
        raise InvalidArgument("a dispatch takes what get_dispatch_layout counted, or a handle")
    if topk_idx is None:
        return _layout_alone(x, per_rank, in_rank, per_expert, ranks)
    layout, extremes = _counted(topk_idx, len(per_expert), ranks)
    if len(topk_idx) != len(x):
        raise InvalidArgument(f"{len(topk_idx)} rows of topk_idx for {len(x)} tokens")
    pairs = [
        (layout.in_rank, in_rank),
        (layout.tokens_per_rank, per_rank),
        (layout.tokens_per_expert, per_expert),
    ]
    same = all(ours.shape == theirs.shape for ours, theirs in pairs)
    differ = [(ours != theirs).sum() for ours, theirs in pairs] if same else []
    # A device is waited for once.
    found = torch.stack([*extremes, *differ]).tolist() if extremes or differ else []
    _check_extremes(found[: len(extremes)], len(per_expert))
    if not same or any(found[len(extremes) :]):
        raise InvalidArgument("the layout isn't that of topk_idx; call get_dispatch_layout")
    return layout


def _layout_alone(
    x: Tensor, per_rank: Tensor, in_rank: Tensor, per_expert: Tensor, ranks: int
) -> Layout:
    """A layout without the experts of tokens.

    Raises:
        InvalidArgument: it is of other tokens, or contradicts itself.
    """
    experts = len(per_expert)
    if experts < 1 or experts % ranks:
        raise InvalidArgument(f"{experts} experts can't be spread over {ranks} ranks evenly")
    if in_rank.shape != (len(x), ranks) or in_rank.dtype != torch.bool:
        raise InvalidArgument(
            f"is_token_in_rank is {in_rank.dtype} {tuple(in_rank.shape)}; give bool "
            f"[{len(x)}, {ranks}]"
        )
    if not torch.equal(in_rank.sum(0), per_rank.to(torch.int64)):
        raise InvalidArgument(
            "num_tokens_per_rank and is_token_in_rank differ; call get_dispatch_layout"
        )
    return Layout(per_rank.to(torch.int32), per_expert.to(torch.int32), in_rank)


class UnknownValue(Tensor):
    """A value of DeepEP's handles that this rank does not know. It may be kept and handed on with
    the handle; reading it raises."""

    _name: str
    _instead: str

    @classmethod
    def of(cls, name: str, instead: str, device: torch.device) -> UnknownValue:
        """
        Args:
            name: DeepEP's.
            instead: the value of the handle to read in its place.
        """
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        made: UnknownValue = torch.Tensor._make_subclass(cls, nothing)
        made._name, made._instead = name, instead
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KNOWN_OF_ANY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.equal and args[0] is args[1]:
            return True
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
        names = ", ".join(sorted({one._name for one in given}))
        raise Unsupported(
            f"{names} of a dispatch over several nodes: the rank that forwards the tokens counts "
            f"them, and this one does not know that; read {given[0]._instead}, or the other values "
            "of the handle"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnknownValue({self._name})"


_KEPT_WITH = ("device", "dtype", "is_cuda", "requires_grad", "grad_fn", "is_leaf", "shape")
_KNOWN_OF_ANY = frozenset([
    *(getattr(Tensor, name).__get__ for name in _KEPT_WITH),
    Tensor.record_stream,
    Tensor.__hash__,
])  # fmt: skip
"""What callers ask a tensor for that they only keep; torch's checkpoints compare shapes."""

_INSTEAD = "recv_gbl_rank_prefix_sum (handle[-4])"
_PLACES = {6: (4, 3), 10: (0, 7)}
"""By the length of a handle, the places of ``is_token_in_rank`` and of a tensor of all rows."""


class Handle(tuple[Tensor, ...]):
    """Where the tokens of a dispatch went; later calls may use it any number of times.

    As a tuple it is DeepEP's with one channel. On one node: int32 ``rank_prefix_matrix [ranks,
    ranks]``, of which only this rank's column is known, the rows that came from ranks up to each;
    ``channel_prefix_matrix [ranks, 1]``; ``recv_channel_prefix_matrix [ranks, 1]``;
    ``recv_src_idx [rows]``, each row's number at its source; bool ``is_token_in_rank [tokens,
    ranks]``; int32 ``send_head [tokens, ranks]``, each token's number among those for a rank, -1
    for none.

    On several nodes: bool ``is_token_in_rank [tokens, ranks]``; int32 ``rdma_channel_prefix_matrix
    [nodes, 1]``; ``gbl_channel_prefix_matrix [ranks, 1]``; ``recv_rdma_channel_prefix_matrix
    [nodes, 1]``; ``recv_rdma_rank_prefix_sum``, unknown here (:class:`UnknownValue`);
    ``recv_gbl_channel_prefix_matrix [ranks, 1]``; ``recv_gbl_rank_prefix_sum [ranks]``, the rows
    that came from ranks up to each; uint8 ``recv_src_meta [rows, 8]``, two int32: the source's
    node, and which ranks of this node have the token, of which only this rank is known; int32
    ``send_rdma_head [tokens, nodes]``, each token's number among those for a node, -1 for none;
    ``send_nvl_head``, likewise unknown.
    """

    ranks_of: Tensor
    """int64 ``[tokens, most ranks of a token]``; -1 for none."""
    rows: int
    """Rows that came here."""
    topk: int
    gone: frozenset[int]
    """Ranks that took no part when it was made; all others' rows are there."""

    @classmethod
    def made(
        cls, fields: Sequence[Tensor], ranks_of: Tensor, rows: int, topk: int, gone: frozenset[int]
    ) -> Handle:
        self = cls(fields)
        self.ranks_of, self.rows, self.topk, self.gone = ranks_of, rows, topk, gone
        return self

    @classmethod
    def of(cls, given: Any, topk: int = 0) -> Handle:
        """A handle, also of a plain tuple of what was in one.

        Raises:
            InvalidArgument: it is something else.
        """
        if isinstance(given, Handle):
            return given
        places = _PLACES.get(len(given)) if isinstance(given, tuple | list) else None
        if places is None:
            raise InvalidArgument("the handle is none; give what dispatch returned")
        in_rank, each_row = (given[place] for place in places)
        ranks = ranks_of(in_rank, in_rank.shape[1])
        return cls.made(given, ranks, len(each_row), topk, frozenset())

    @property
    def tokens(self) -> int:
        return len(self.ranks_of)


def handle_fields(
    in_rank: Tensor, origin: Tensor | None, rank: int, room: int, ranks_per_node: int
) -> list[Tensor]:
    """What a :class:`Handle` has as a tuple.

    Args:
        origin: int32 ``[rows]``: from 1, each row's number at its source, after ``room`` numbers of
            each rank before that; ``None`` if unknown.
    """
    ranks, where = in_rank.shape[1], in_rank.device
    came = torch.full((ranks,), -1, dtype=torch.int32, device=where)
    source = numbers = torch.empty(0, dtype=torch.int32, device=where)
    if origin is not None:
        numbers = (origin - 1).clamp(min=0)
        source, numbers = numbers // room, numbers % room
        came = tally(source, ranks).cumsum(0, dtype=torch.int32)
    sent, heads = _sent(in_rank)
    if ranks_per_node == ranks:
        prefix = torch.full((ranks, ranks), -1, dtype=torch.int32, device=where)
        prefix[:, rank] = came
        return [prefix, sent, torch.zeros_like(sent), numbers, in_rank, heads]
    nodes = ranks // ranks_per_node
    to_nodes, node_heads = _sent(in_rank.view(len(in_rank), nodes, ranks_per_node).any(2))
    here = torch.full_like(source, 1 << rank % ranks_per_node)
    meta = torch.stack([source // ranks_per_node, here], 1).view(torch.uint8)
    return [
        in_rank,
        to_nodes,
        sent,
        torch.zeros_like(to_nodes),
        UnknownValue.of("recv_rdma_rank_prefix_sum", _INSTEAD, where),
        torch.zeros_like(sent),
        came,
        meta,
        node_heads,
        UnknownValue.of("send_nvl_head", _INSTEAD, where),
    ]


def heads_of(ranks: Tensor, size: int) -> Tensor:
    """Each token's number among those for a rank, -1 for none: int32 ``[tokens, size]``.

    Args:
        ranks: int64 ``[tokens, topk]``, repeated ones too; -1 for none.
    """
    return _sent(_named(ranks, size).any(1))[1]


def _sent(to: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool ``[tokens, targets]``: int32 tokens for each target ``[targets, 1]``, and each
    token's number among those for a target, -1 for none."""
    heads = torch.where(to, to.cumsum(0, dtype=torch.int32) - 1, -1)
    return to.sum(0, dtype=torch.int32)[:, None], heads


def ranks_of(in_rank: Tensor, width: int) -> Tensor:
    """The ranks of each token in ascending order, -1 elsewhere: int64 ``[tokens, width]``."""
    ranks = in_rank.shape[1]
    numbers = torch.arange(ranks, dtype=torch.int64, device=in_rank.device)
    if width == ranks:
        return torch.where(in_rank, numbers, -1)
    found = torch.where(in_rank, numbers, ranks).sort(1).values[:, :width]
    return torch.where(found < ranks, found, -1)
