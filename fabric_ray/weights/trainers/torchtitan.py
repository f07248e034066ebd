"""What the ranks of a torchtitan trainer hold, by the tensors of the Hugging Face model.

torchtitan names parameters its own way, fuses queries, keys and values by groups of heads, and for
Llama orders rows for another form of rotary embeddings. Its ``state_dict_adapter`` knows all of it:
here it converts numbers of rows instead of weights, and so says which row lies where.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Container, Leaf, ParamMeta, Side, Tensor, side_from_param_meta
from fabric_ray.plan.dtensor import param_meta
from fabric_ray.weights.modules import Found, named, reshard, ties
from fabric_ray.weights.stacked import Rows, made_of

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """Rows of a tensor of the Hugging Face model; of stacks, the rows of all matrices."""

    name: str
    shape: tuple[int, ...]
    first: int
    rows: int


class _Placed(NamedTuple):
    """A tensor of the Hugging Face model, and where the adapter takes its rows from."""

    name: str
    shape: tuple[int, ...]
    numbers: torch.Tensor
    """Of rows of the parameter."""


class _Origin(NamedTuple):
    """What a parameter is made of."""

    shape: tuple[int, ...]
    parts: list[_Part]
    """In the order in which they lie behind each other."""


def torchtitan_parts(
    model: torch.nn.Module | Sequence[torch.nn.Module], adapter: Any
) -> tuple[dict[str, torch.Tensor], Side]:
    """A rank's tensors, and what every rank holds: ``WeightSource(tensors, side=side)``.

    All trainers call it together, since they tell each other what they hold. What the adapter
    leaves out, such as a tied head, is left out. A source looks the tensors up again for each push.

    Args:
        model: the rank's module, or its parts under pipeline parallelism.
        adapter: the model's, ``model_spec.state_dict_adapter(model_config, None)``.

    Raises:
        InvalidArgument: the adapter does more to a parameter than to name it and to order its rows,
            or leaves one out that is trained; or a parameter is a part of the model and doesn't say
            which.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        origins = _origins(adapter)
        parts = [model] if isinstance(model, torch.nn.Module) else list(model)
        for part in parts:
            reshard(part)
        _check_left_out(_named(parts), origins)
        tensors = Found(lambda: {n: t for n, t in _named(parts).items() if n in origins})
        own: list[ParamMeta] | str = [param_meta(n, t) for n, t in tensors.items()]
    except Exception as error:
        failure, own = error, f"{type(error).__name__}: {error}"
    reports = _reports(own)
    if failure is not None:
        raise failure
    side = side_from_param_meta(reports)
    made = (_made_of(container, origins[container.name]) for container in side.containers)
    return tensors, msgspec.structs.replace(side, containers=tuple(made))


def _named(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return dict(chain.from_iterable(named(part).tensors.items() for part in parts))


def _check_left_out(tensors: Mapping[str, torch.Tensor], origins: Mapping[str, _Origin]) -> None:
    """Refuses parameters that are trained and never sent, such as those of LoRA (RS-1)."""
    first = ties(tensors)
    sent = {first.get(name, name) for name in tensors if name in origins}
    for name, tensor in tensors.items():
        if tensor.requires_grad and first.get(name, name) not in sent:
            raise InvalidArgument(
                f"the adapter leaves out `{name}`, which is trained: rollouts would compute "
                "without it; gather whole tensors with a ReplicaSource, merged where it is LoRA's"
            )
    biases = [name for name in tensors if name.endswith("expert_bias") and name not in origins]
    if biases:
        _log.warning(
            "the adapter leaves out %s: rollouts choose other experts than this model once the "
            "bias is not zero; train without it (load_balance_coeff=None)",
            ", ".join(biases[:2]) + (f" and {len(biases) - 2} more" if len(biases) > 2 else ""),
        )


def _reports(own: list[ParamMeta] | str) -> dict[int, list[ParamMeta]]:
    """What all trainers hold. One that failed tells the others, which wait for it.

    Args:
        own: of this rank, or why it failed.

    Raises:
        InvalidArgument: another rank failed; it is named.
    """
    import torch.distributed as dist

    reports: list[Any] = [own]
    if dist.is_available() and dist.is_initialized():
        reports = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own)
    failed = {rank: cause for rank, cause in enumerate(reports) if isinstance(cause, str)}
    if failed and not isinstance(own, str):
        causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in failed.items())
        raise InvalidArgument(f"another trainer's module can't be described: {causes}")
    return dict(enumerate(reports))


def _made_of(container: Container, origin: _Origin) -> Container:
    leaf = container.layout
    assert isinstance(leaf, Leaf), "of one tensor"
    if leaf.tensor.shape != origin.shape:
        raise InvalidArgument(
            f"`{container.name}` is {list(leaf.tensor.shape)}, expected the whole model's "
            f"{list(origin.shape)}; give a module that is sharded by DTensors, as torchtitan's "
            "parallelize functions do"
        )
    dtype = container.dtype
    if len(origin.parts) == 1 and origin.parts[0].shape == origin.shape:
        whole = Tensor(origin.parts[0].name, origin.shape, dtype)
        return msgspec.structs.replace(
            container, layout=msgspec.structs.replace(leaf, tensor=whole)
        )
    slabs: list[list[Rows]] = [[]]
    for part in origin.parts:
        if sum(rows.run[1] for rows in slabs[-1]) == origin.shape[-2]:
            slabs.append([])
        tensor = Tensor(part.name, part.shape, dtype)
        slabs[-1].append(Rows(tensor, (part.first, part.rows)))
    return msgspec.structs.replace(container, layout=made_of(container, slabs))


def _origins(adapter: Any) -> dict[str, _Origin]:
    """Of all parameters of the model, by their names in torchtitan."""
    import torch

    with torch.device("meta"):
        model = adapter.model_config.build()
    layers = model._modules.pop("layers")
    found = dict(_origins_in(model, "", adapter))
    for number, layer in layers.named_children():  # one by one: numbers take memory
        found |= _origins_in(layer, f"layers.{number}.", adapter)
    return found


def _origins_in(module: Any, prefix: str, adapter: Any) -> Iterator[tuple[str, _Origin]]:
    """Of a module on the meta device: numbers its rows, and looks where the adapter puts them."""
    import torch

    held: list[tuple[int, str, tuple[int, ...]]] = []
    end = 0
    for name, tensor in named(module).tensors.items():
        shape = (*tensor.shape[:-1], 1) if tensor.ndim > 1 else tensor.shape
        begin, end = end, end + math.prod(shape)
        numbers = torch.arange(begin, end, dtype=torch.int32, device="cpu").view(shape)
        path, _, own = name.rpartition(".")
        part = module.get_submodule(path)
        tensors = part._parameters if own in part._parameters else part._buffers
        tensors[own] = torch.nn.Parameter(numbers, requires_grad=False)
        held.append((begin, prefix + name, tuple(tensor.shape)))
    placed: dict[str, list[_Placed]] = defaultdict(list)
    # The state has queries, keys and values by themselves, also where the module fuses them.
    for key, numbers in module.state_dict(prefix=prefix).items():
        begin, name, shape = held[bisect_right(held, int(numbers.min()), key=itemgetter(0)) - 1]
        placed[name] += _placed(adapter, key, numbers.detach() - begin, shape[-1])
    for _, name, shape in held:
        if placed[name]:
            yield name, _Origin(shape, _parts(name, shape, placed[name]))


def _placed(adapter: Any, key: str, numbers: torch.Tensor, columns: int) -> Iterator[_Placed]:
    """Where the adapter puts numbered rows of a tensor, or of a vector each element."""
    import torch

    if numbers.ndim == 1:
        for name, found in adapter.to_hf({key: numbers}).items():
            yield _Placed(name, tuple(found.shape), found)
        return
    shape = (*numbers.shape[:-1], columns)
    across = torch.arange(columns, dtype=torch.int32, device="cpu")
    by_column = adapter.to_hf({key: across.expand(shape)})
    for name, found in adapter.to_hf({key: numbers.expand(shape)}).items():
        moved = by_column[name]
        if not (_is(found, found[..., :1]) and found.shape[-1] == columns and _is(moved, across)):
            raise _unknown(key)
        yield _Placed(name, tuple(found.shape), found[..., 0].flatten())


def _is(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether they are equal once the second is expanded; looks at every element once."""
    import torch

    some = tuple(slice(None if stride else 1) for stride in found.stride())
    return torch.equal(found[some], wanted.expand_as(found)[some])


def _parts(name: str, shape: tuple[int, ...], placed: Sequence[_Placed]) -> list[_Part]:
    import torch

    numbers = torch.cat([each.numbers for each in placed])
    every = torch.arange(len(numbers), dtype=torch.int32, device="cpu")
    if len(placed) == 1 and placed[0].shape == shape and torch.equal(numbers, every):
        return [_Part(placed[0].name, shape, 0, len(numbers))]
    order = numbers.argsort()
    matrices = {len(each.shape) for each in placed} == {2} and len(shape) in (2, 3)
    if not matrices or not torch.equal(numbers[order], every):
        raise _unknown(name)
    of = torch.cat([torch.full_like(each.numbers, n) for n, each in enumerate(placed)])[order]
    row = torch.cat(
        [torch.arange(len(each.numbers), dtype=torch.int64, device="cpu") for each in placed]
    )[order]
    begins = (of[1:] != of[:-1]) | (row[1:] != row[:-1] + 1) | (every[1:] % shape[-2] == 0)
    cuts = [0, *(begins.nonzero().flatten() + 1).tolist(), len(numbers)]
    found = ((placed[int(of[a])], int(row[a]), b - a) for a, b in pairwise(cuts))
    return [_Part(each.name, each.shape, first, count) for each, first, count in found]


def _unknown(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"the adapter does more to `{name}` than to name it and to order its rows; gather whole "
        "tensors with a ReplicaSource and to_hf"
    )
