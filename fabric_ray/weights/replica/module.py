"""A replica that is the engine's own module, whose ``load_weights`` knows the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Container, Leaf, Mesh, Replicate, Side, Tensor, replica_groups
from fabric_ray.plan.types import leaves
from fabric_ray.weights.replica.converting import described
from fabric_ray.weights.replica.sides import named, side_by_side
from fabric_ray.weights.replica.writes import Part, Writes, filled

AsRank = Callable[[int], AbstractContextManager[object]]


class Loader(Protocol):
    """An inference engine's model, as vLLM and SGLang write them."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Puts a rank's part of whole tensors, by Hugging Face names, into its parameters."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]: ...


def module_side(
    tensors: Iterable[tuple[str, torch.Tensor]], *, size: int, replicas: int = 1
) -> Side:
    """The rollouts' side where nothing is known of a layout but what a rank's tensors look like.

    Nothing is taken to be the same on two ranks of an engine, so it suits pushes from a
    :class:`ModuleReplica` and no others.

    Args:
        tensors: a rank's, by name, such as ``model.named_parameters()``; alike on all ranks.
        size: ranks of an engine. Rank ``i`` of engine ``j`` is rollout ``j * size + i``.
        replicas: engines.
    """
    ranks = range(size * replicas)

    def containers(name: str, like: torch.Tensor) -> list[Container]:
        wholes = [described(named(name, first), like) for first in range(size)]
        parts = [
            Leaf(whole, Mesh.line(ranks[first::size]), (Replicate(),))
            for first, whole in enumerate(wholes)
        ]
        strides = tuple(stride * like.element_size() for stride in like.stride())
        gaps = None if like.is_contiguous() else strides
        return side_by_side(Container(name, wholes[0].dtype, parts[0], gaps), parts)

    return Side.of(ranks, [each for item in tensors for each in containers(*item)])


class ModuleReplica:
    """An engine's module in host memory, loaded as one of its ranks after another.

    What an engine tensor is made of is found by watching the module load: each whole tensor by
    itself, as a stand-in without memory, while nothing is written. The loader has to copy into the
    parameters that there are, on its own thread, and to keep nothing after a call.

    Args:
        module: built as on the rollouts; all ranks' tensors have the same names and shapes.
        side: the same that the rollouts' targets were given, e.g. from :func:`module_side`.
        as_rank: a context in which the module loads as a rollout does; not needed where all
            rollouts are whole engines.

    Raises:
        InvalidArgument: the module lacks a tensor of the side, or ``as_rank`` is missing.
    """

    def __init__(self, module: Loader, side: Side, *, as_rank: AsRank | None = None) -> None:
        if as_rank is None and len(groups := replica_groups(side)) > 1:
            # RS-1: all would get what the module loads as one of them.
            raise InvalidArgument(
                f"rollouts {groups[0][0]} and {groups[1][0]} hold other parts of the model, and "
                "as_rank is missing; give a context in which the module loads as a rollout does"
            )
        self.side = side
        self._module = module
        self._as_rank: AsRank = as_rank or (lambda _: nullcontext())
        own = self._own()
        names = [container.name for container in side.containers]
        for name in names:
            if name not in own:
                raise InvalidArgument(
                    f"the rollouts hold `{name}`, which the module has not; give the module that "
                    "the side describes"
                )
        self._tensors = {name: own[name].detach() for name in names}
        self._seen: dict[tuple[object, ...], Mapping[str, Collection[str]]] = {}

    @property
    def ranks(self) -> Sequence[int]:
        return self.side.ranks

    def needs(self, rank: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Collection[str]]:
        held = self._held(rank)
        if held not in self._seen:
            self._seen[held] = self._watch(rank, tensors.values())
        return self._seen[held]

    def reserve(self, ranks: Sequence[int], names: Collection[str]) -> None:
        """The module has its memory already."""

    def tensors(self, rank: int) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def load(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._as_rank(rank), torch.no_grad():
            self._module.load_weights(iter(tensors.items()))
            self._check()

    def _own(self) -> dict[str, torch.Tensor]:
        return dict(self._module.named_buffers()) | dict(self._module.named_parameters())

    def _check(self) -> None:
        """RS-1: what is sent is what was loaded."""
        own = self._own()
        for name, tensor in self._tensors.items():
            now = own.get(name)
            if now is None or (now.dtype, Part.of(now)) != (tensor.dtype, Part.of(tensor)):
                raise InvalidArgument(
                    f"`{name}` has other memory since load_weights was called, and what is sent "
                    "lies in the old; have the loader copy into the parameter, and make another "
                    "ModuleReplica"
                )

    def _held(self, rank: int) -> tuple[object, ...]:
        """Equal for replicas, which needn't be watched twice."""
        found = [(c.name, leaf) for c in self.side.containers for leaf in leaves(c.layout)]
        here = [(name, leaf) for name, leaf in found if rank in leaf.mesh.ranks]
        if any(p != Replicate() for _, leaf in here for p in leaf.placements):
            return (rank,)
        # RS-1: ranks with other slices of a tensor may load other whole tensors.
        return tuple((name, leaf.tensor.name, leaf.slice) for name, leaf in here)

    def _watch(self, rank: int, tensors: Iterable[Tensor]) -> Mapping[str, Collection[str]]:
        parts: dict[str, set[str]] = defaultdict(set)
        written: dict[str, list[Part]] = defaultdict(list)
        for whole in tensors:
            for name, found in self._writes(rank, whole).items():
                parts[name].add(whole.name)
                written[name] += found
        for name, found in written.items():
            count, size = filled(self._tensors[name], found), self._tensors[name].numel()
            if count < size:
                raise InvalidArgument(
                    f"`{name}` of rollout {rank} has {size} elements, and "
                    f"{', '.join(sorted(parts[name]))} fill only {count} by copies on the thread "
                    "that calls load_weights; gather all that it is made of in one stage"
                )
        return parts

    def _writes(self, rank: int, whole: Tensor) -> Mapping[str, list[Part]]:
        writes = self._load_stand_in(rank, whole)
        for found, wanted in writes.casts:
            # RS-1: without its scales it would be a usable wrong weight.
            raise InvalidArgument(
                f"load_weights casts `{whole.name}` from {found} to {wanted}, which loses or lacks "
                "its scales; gather it in the module's dtype, or convert it by formats"
            )
        if writes.kept():
            raise InvalidArgument(
                f"the module keeps `{whole.name}` after load_weights was called with it, and may "
                "write it later than it is sent; have the loader write what it is given at once"
            )
        return writes.parts

    def _load_stand_in(self, rank: int, whole: Tensor) -> Writes:
        zero = torch.zeros((), dtype=getattr(torch, whole.dtype.name), device="cpu")
        writes = Writes(self._tensors, zero)
        with writes:
            self.load(rank, {whole.name: zero.expand(whole.shape)})
        return writes
