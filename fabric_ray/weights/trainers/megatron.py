"""The trainer's side of a weight push from Megatron-Core.

Containers bear Megatron's names, with layers and experts numbered as on the rank that holds them;
what they are made of bears the names that inference engines' families use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from fabric_ray.models.config import ModelConfig, parameter_dtype, parameter_shapes
from fabric_ray.models.kinds import ARCHITECTURES
from fabric_ray.plan.types import Container, DType, Layout, Pad, Side, Tensor
from fabric_ray.weights.families.errors import Indivisible, InvalidRanks, UnknownFamily
from fabric_ray.weights.families.matching import Match, filled, match
from fabric_ray.weights.families.placing import Grid, fuse
from fabric_ray.weights.families.rules import Family
from fabric_ray.weights.modules import Found, inside
from fabric_ray.weights.trainers.experts import experts_per_group
from fabric_ray.weights.trainers.ranks import Parallel
from fabric_ray.weights.trainers.tables import Experts, Layers, megatron_family

if TYPE_CHECKING:
    import torch

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def megatron_side(
    config: ModelConfig,
    parallel: Parallel,
    *,
    layers: Layers = "te",
    experts: Experts = "grouped",
    stages: Sequence[int] | None = None,
    vocab_multiple: int = 128,
    family: Family | None = None,
) -> Side:
    """What every rank of a Megatron-Core trainer holds of a model.

    With virtual pipeline parallelism, part ``i`` of a stage is called ``model{i}.``, as in
    Megatron's checkpoints; :func:`local_tensors` names a rank's tensors that way.

    Args:
        config: the model.
        parallel: sizes and numbering of the ranks.
        layers: the implementation of its layers, Transformer Engine's or Megatron-Core's.
        experts: held by one module (``grouped``) or by one each (``sequential``).
        stages: layers of each pipeline stage, in the order of the model (stage 0 to ``pp - 1``,
            ``vpp`` times); equal numbers by default.
        vocab_multiple: rows of the vocabulary are padded to a multiple of this times ``tp``.
        family: a table other than Megatron's; ``layers``, ``experts`` and ``vocab_multiple`` then
            have no meaning.

    Raises:
        FamilyError: one of its subclasses, which says what doesn't fit and what would.
    """
    if family is None:
        _check_known(config)
    table = family or megatron_family(
        layers=layers, experts=experts, vocab_multiple=vocab_multiple * parallel.tp
    )
    trainer = _Trainer(config, parallel, table, stages)
    return Side.of(parallel.world, list(trainer.containers()))


def _check_known(config: ModelConfig) -> None:
    """Refuses models of which Megatron's table lacks rules."""
    why = ARCHITECTURES[config.kind].unknown_megatron
    if config.nest and not why:
        why = f"it has no names for the text model of {config.nest}"
    if why:
        raise UnknownFamily(
            f"Megatron's table doesn't lay out {config.kind}: {why}; pass a Family of your own, or "
            "gather Hugging Face's parameters and push by way of a ModuleReplica",
            family=config.kind,
        )


def local_tensors(
    model: torch.nn.Module | Sequence[torch.nn.Module],
) -> dict[str, torch.Tensor]:
    """A rank's parameters and routers' biases, by the names that :func:`megatron_side` gives them.

    A source of them looks them up again for each push. Routers' biases become float32, as they do
    in a forward pass.

    Args:
        model: the rank's module, or its parts under virtual pipeline parallelism. Wrappers that
            call what they hold ``module`` are looked through.

    Raises:
        InvalidArgument: a wrapper gathers parameters in the next forward pass, and has old ones
            until then.
    """
    return Found(lambda: _held(unwrapped(model)))


def _held(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for index, part in enumerate(parts):
        prefix = f"model{index}." if len(parts) > 1 else ""
        out |= {prefix + name: tensor for name, tensor in part.named_parameters()}
        for name, bias in part.named_buffers():
            if name.endswith(".router.expert_bias"):
                bias.data = bias.data.float()
                out[prefix + name] = bias
    return out


def unwrapped(
    model: torch.nn.Module | Sequence[torch.nn.Module],
) -> list[torch.nn.Module]:
    """The parts of a rank's model, without wrappers; see :func:`local_tensors`."""
    import torch

    parts = [model] if isinstance(model, torch.nn.Module) else model
    return [[part, *inside(part)][-1] for part in parts]


class _Place(msgspec.Struct, frozen=True):
    """Where a layer is."""

    stage: int
    part: int
    number: int
    """In its part, from 0."""


class _Trainer:
    """One model under one table on the ranks of one trainer."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        table: Family,
        stages: Sequence[int] | None,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.shapes = parameter_shapes(config)
        self.matches = match(table, self.shapes)
        self.places = _places(config.layers, parallel, stages)
        self.grids = [parallel.grid(stage) for stage in range(parallel.pp)]
        self.experts = experts_per_group(config, parallel.ep, family="megatron")
        self.expert_grids = [
            [parallel.expert_grid(stage, group) for group in range(parallel.ep)]
            for stage in range(parallel.pp)
        ]

    def containers(self) -> Iterator[Container]:
        for found in self.matches:
            place = self._place(found)
            if found.rule.per_expert:
                yield from self._experts(found, place)
                continue
            yield self._container(found, place, self.grids[place.stage])
            if found.container == _EMBEDDING and self.config.tied and self.parallel.pp > 1:
                yield self._tied_output(found)

    def _place(self, found: Match) -> _Place:
        """Of what lies in no layer, the embedding is in the first stage, the rest in the last."""
        if found.layer is not None:
            return self.places[found.layer]
        if found.container.startswith("embedding."):
            return _Place(0, 0, 0)
        return _Place(self.parallel.pp - 1, self.parallel.vpp - 1, 0)

    def _experts(self, found: Match, place: _Place) -> Iterator[Container]:
        for expert in range(len(found.members)):
            group, number = divmod(expert, self.experts)
            grid = self.expert_grids[place.stage][group]
            yield self._container(found, place, grid, expert=expert, number=number)

    def _tied_output(self, found: Match) -> Container:
        """Without an embedding to share, the last stage keeps a copy of it."""
        rule = msgspec.structs.replace(found.rule, container=_OUTPUT)
        last = _Place(self.parallel.pp - 1, self.parallel.vpp - 1, 0)
        copy = msgspec.structs.replace(found, rule=rule)
        return self._container(copy, last, self.grids[-1])

    def _container(
        self, found: Match, place: _Place, grid: Grid, *, expert: int = 0, number: int = 0
    ) -> Container:
        name = filled(found.rule.container, layer=place.number, expert=number)
        prefix = f"model{place.part}." if self.parallel.vpp > 1 else ""
        members = found.members[expert]
        dtype = DType.of(parameter_dtype(self.config, members[0]))
        tensors = [Tensor(member, self.shapes[member], dtype) for member in members]
        layout: Layout = fuse(self.config, found.rule, tensors, grid)
        # The last ranks' shares of a small vocabulary may be nothing but padding.
        ranks = grid.ranks if isinstance(layout, Pad) else None
        return Container(prefix + name, dtype, layout, ranks=ranks)


def _places(layers: int, parallel: Parallel, stages: Sequence[int] | None) -> list[_Place]:
    count = parallel.pp * parallel.vpp
    if stages is None:
        if layers % count:
            raise Indivisible(
                f"{layers} layers can't be shared evenly by pp={parallel.pp} stages of "
                f"vpp={parallel.vpp} parts; say by `stages` how many each has",
                family="megatron",
            )
        stages = [layers // count] * count
    if len(stages) != count or sum(stages) != layers or min(stages) < 0:
        raise InvalidRanks(
            f"stages {list(stages)} must be {count} numbers (pp={parallel.pp}, "
            f"vpp={parallel.vpp}) that add up to {layers} layers",
            family="megatron",
        )
    return [
        _Place(index % parallel.pp, index // parallel.pp, number)
        for index, size in enumerate(stages)
        for number in range(size)
    ]
