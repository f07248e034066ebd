"""The trainer's side of a weight push from FSDP2, by sizes alone.

Trainers that run describe themselves (:mod:`fabric_ray.plan.dtensor`); this says the same before
there are any. Within a pipeline stage everything but experts is sharded over all ranks, and experts
over the ranks of their expert-parallel group, both along dimension 0 as ``fully_shard`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fabric_ray.models.config import (
    ModelConfig,
    Shape,
    nested_name,
    parameter_dtype,
    parameter_shapes,
)
from fabric_ray.plan.types import Container, DType, Leaf, Mesh, Shard, Side, Tensor
from fabric_ray.weights.families.errors import InvalidRanks
from fabric_ray.weights.trainers.experts import experts_per_group

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class FsdpParallel(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel sizes of an FSDP2 trainer.

    A stage has ``fsdp * ep`` ranks, neighbours in different expert-parallel groups.

    Raises:
        InvalidRanks: a size is below 1.
    """

    fsdp: int = 1
    """Ranks that share an expert."""
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in self.__struct_fields__:
            if getattr(self, axis) < 1:
                raise InvalidRanks(f"{axis}={getattr(self, axis)} must be 1 or more", family="fsdp")

    @property
    def stage_size(self) -> int:
        return self.fsdp * self.ep

    @property
    def world(self) -> int:
        return self.stage_size * self.pp

    def stage(self, stage: int) -> Mesh:
        """All ranks of a pipeline stage."""
        start = stage * self.stage_size
        return Mesh.line(range(start, start + self.stage_size), name="fsdp")

    def group(self, stage: int, group: int) -> Mesh:
        """The ranks of a stage that hold the experts of one expert-parallel group."""
        return Mesh.line(self.stage(stage).ranks[group :: self.ep], name="fsdp")


def even_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each of ``pp`` stages; the first ones take the remainder."""
    each, more = divmod(layers, pp)
    return tuple(each + (stage < more) for stage in range(pp))


def fsdp_side(
    config: ModelConfig, parallel: FsdpParallel, *, stages: Sequence[int] | None = None
) -> Side:
    """The side of an FSDP2 trainer, for models with one parameter per expert.

    Args:
        config: the model.
        parallel: sizes.
        stages: layers of each pipeline stage; as even as can be by default.

    Raises:
        InvalidRanks: the sizes don't fit the model.
        Indivisible: expert-parallel groups can't own equal numbers of experts.
    """
    if parallel.pp > config.layers:
        raise InvalidRanks(
            f"pp={parallel.pp} stages are more than {config.layers} layers; use fewer",
            family="fsdp",
        )
    if config.moe is not None and config.moe.stacked and parallel.ep > 1:
        raise InvalidRanks(
            f"{config.kind} holds experts as one parameter, which ep={parallel.ep} groups "
            "can't own by itself; use ep=1",
            family="fsdp",
        )
    experts = experts_per_group(config, parallel.ep, family="fsdp")
    stages = even_stages(config.layers, parallel.pp) if stages is None else stages
    if len(stages) != parallel.pp or sum(stages) != config.layers or min(stages) < 1:
        raise InvalidRanks(
            f"stages {list(stages)} must be pp={parallel.pp} numbers from 1 that add up to "
            f"{config.layers} layers",
            family="fsdp",
        )
    return Side.of(parallel.world, list(_containers(config, parallel, stages, experts)))


def _containers(
    config: ModelConfig, parallel: FsdpParallel, stages: Sequence[int], experts: int
) -> Iterator[Container]:
    stage_of = [stage for stage, layers in enumerate(stages) for _ in range(layers)]
    everyone = [parallel.stage(stage) for stage in range(parallel.pp)]
    groups = [[parallel.group(s, g) for g in range(parallel.ep)] for s in range(parallel.pp)]
    nested = bool(config.nest)
    embedding = nested_name(_EMBEDDING) if nested else _EMBEDDING
    for name, shape in parameter_shapes(config).items():
        layer, expert = _place(name, nested)
        if layer is None:
            yield _sharded(config, name, shape, everyone[0 if name == embedding else -1])
        elif expert is None:
            yield _sharded(config, name, shape, everyone[stage_of[layer]])
        else:
            yield _sharded(config, name, shape, groups[stage_of[layer]][expert // experts])
    if config.tied and parallel.pp > 1:
        # Without an embedding to share, the last stage keeps a copy of it.
        shape = (config.vocab, config.hidden)
        yield _sharded(config, embedding, shape, everyone[-1], container=_HEAD)


def _place(name: str, nested: bool) -> tuple[int | None, int | None]:
    """The layer and the expert that a parameter belongs to; stacked experts belong to none."""
    parts = name.split(".")[nested:]
    if parts[1:2] != ["layers"]:
        return None, None
    one = parts[4] == "experts" and parts[5].isdecimal()
    return int(parts[2]), int(parts[5]) if one else None


def _sharded(
    config: ModelConfig, name: str, shape: Shape, mesh: Mesh, *, container: str | None = None
) -> Container:
    dtype = DType.of(parameter_dtype(config, name))
    return Container(container or name, dtype, Leaf(Tensor(name, shape, dtype), mesh, (Shard(0),)))
