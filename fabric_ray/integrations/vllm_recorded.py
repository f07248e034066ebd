"""A vLLM model's own loader, recorded: which boxes of which tensors this worker needs, and how they
get into its layers.

Tensors that can't be recorded come whole, and the model loads them itself. So does every tensor of
a layer that gets such a tensor, because vLLM processes a layer once, when all of it has come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.integrations import framework
from fabric_ray.integrations.load_recorder import (
    BoxRead,
    Landing,
    LoadRecording,
    StridedView,
    record,
)
from fabric_ray.integrations.vllm_computed import RELOAD
from fabric_ray.integrations.vllm_plugin import CONNECTOR
from fabric_ray.integrations.vllm_reload import (
    Reload,
    names_filling,
    refuse_lossy_cast,
    shared_parameters,
)
from fabric_ray.plan import Container, Leaf, Mesh, Replicate, ShapeMismatch, Side, Tensor

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]


class Need(msgspec.Struct, frozen=True, array_like=True):
    """A box of a checkpoint's tensor that a worker needs."""

    tensor: str
    box: Box

    @property
    def container(self) -> str:
        """The name of the container that it arrives in."""
        return f"{self.tensor}[{', '.join(f'{at}:{at + size}' for at, size in self.box)}]"


@dataclass
class RecordedModel:
    """What a worker does with an update's boxes."""

    model: torch.nn.Module
    landings: dict[str, list[Landing]] = field(default_factory=dict)
    """By layer, in the model's order."""
    whole: dict[str, str] = field(default_factory=dict)
    """Tensors that come whole, and why."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the checkpoint's tensors."""
    tied: list[tuple[str, str]] = field(default_factory=list)
    """Tensors of the checkpoint for which the model has one memory."""
    rounded: list[str] = field(default_factory=list)
    """Tensors in float32 of which the loader takes bfloat16 values alone."""

    @property
    def needs(self) -> list[Need]:
        """Everything that is sent to this worker, in the checkpoint's order."""
        found: dict[str, dict[Need, None]] = defaultdict(dict)
        for landing in (each for some in self.landings.values() for each in some):
            if landing.read is not None:
                found[landing.read.tensor][_need(landing.read)] = None
        for name in self.whole:
            found[name] = {self.whole_need(name): None}
        return [need for name in self.shapes for need in found.get(name, ())]

    def whole_need(self, name: str) -> Need:
        return Need(name, tuple((0, size) for size in self.shapes[name]))

    def apply(self, reload: Reload, arrived: Mapping[str, torch.Tensor]) -> None:
        """Puts an update into use, layer by layer.

        Args:
            arrived: all of :attr:`needs`, by container.
        """

        def boxes(read: BoxRead) -> torch.Tensor:
            return arrived[_need(read).container]

        for path, landings in self.landings.items():
            reload.fill(self.model.get_submodule(path), landings, boxes)
        if self.whole:
            # Clones: the next version overwrites what arrived, and the model may keep a tensor.
            at = ((name, self.whole_need(name).container) for name in self.whole)
            reload.load((name, arrived[container].clone()) for name, container in at)


def record_model(
    model: torch.nn.Module, config: Any, tensors: Mapping[str, Tensor], leave: Sequence[str]
) -> RecordedModel:
    """Runs the model's loader without memory. The model is as before when this returns.

    Args:
        config: the model's, as vLLM has it.
        tensors: of the checkpoint, by name.
        leave: patterns of layers that may keep old weights.

    Raises:
        InvalidArgument: the model refuses a tensor, or would cast a quantised one.
        WeightSyncError: layers lack tensors; the message names them.
    """
    import torch

    metas = {
        name: torch.empty(each.shape, dtype=getattr(torch, each.dtype.name), device="meta")
        for name, each in tensors.items()
    }
    reload, last = Reload(model, config, leave), "none"

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for pair in named:
                last = f"`{pair[0]}` {list(pair[1].shape)}"
                yield pair
                del pair  # what the model keeps is told by its references

        model.load_weights(noted())  # type: ignore[operator]

    with _prepared(model, reload) as targets:
        try:
            found = record(load, metas, targets)
        except Exception as error:
            raise InvalidArgument(
                f"vLLM's model can't load what the trainer has: {type(error).__name__}: {error} "
                f"(the last tensor that it took: {last}); give a module whose parameters have the "
                "names and shapes of the checkpoint"
            ) from error
        for landing in found.landings:
            if landing.read is not None:
                name = landing.read.tensor
                refuse_lossy_cast(config, name, metas[name].dtype, targets[landing.target].dtype)
        made = RecordedModel(model, shapes={name: tensors[name].shape for name in tensors})
        _divide(made, found, reload)
        if _tensors(found.landings) >= made.whole.keys():
            # Else nothing is known of what a tensor fills.
            for path in reload.check():
                made.landings.pop(path, None)
    made.tied = _tied(made, found)
    made.rounded = _rounded(made, found, metas, targets)
    return made


def refuse_lost(
    model: torch.nn.Module, config: Any, tensors: Sequence[tuple[str, str, Sequence[int]]]
) -> None:
    """Refuses a model that loses what is streamed to it: vLLM's reload keeps what goes through the
    loaders of parameters, and some models copy to parameters themselves.

    Args:
        config: the model's, as vLLM has it.
        tensors: name, dtype and shape of the checkpoint's.

    Raises:
        Unsupported: it is such a model; the message names a tensor.
    """
    import torch

    metas = {
        name: torch.empty(list(shape), dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in tensors
    }
    found = LoadRecording()
    with _prepared(model, Reload(model, config)) as targets:
        loaders = [(t, t.weight_loader) for t in targets.values() if hasattr(t, "weight_loader")]
        for tensor, _ in loaders:
            tensor.weight_loader = lambda *_, **__: True
        with suppress(Exception):  # what the model refuses is named when it comes
            found = record(model.load_weights, metas, targets)  # type: ignore[arg-type]
        for tensor, loader in loaders:
            tensor.weight_loader = loader
    skipped = framework(f"{RELOAD}.meta", "vllm").SKIP_LOAD_TENSORS
    for landing in found.landings:
        if landing.tensor is not None and landing.name not in skipped:
            raise Unsupported(
                f"{type(model).__name__} copies `{landing.tensor}` to `{landing.target}` itself, "
                "and vLLM's reload loses that where whole tensors are streamed; give trainer_init "
                "a torch.nn.Module on the host or on CUDA GPUs, or a WeightSource of fabric-ray, "
                "whose shards trainers write"
            )


def refuse_moved_experts(config: Any) -> None:
    """Refuses workers whose experts move.

    Args:
        config: vLLM's, of parallel execution.

    Raises:
        Unsupported: they do. Loaders fill experts where they are at the start (RS-1).
    """
    if config.enable_eplb:
        raise Unsupported(
            "vLLM's load balancer moves experts between workers, and its loaders fill them where "
            "they are at the start: got enable_eplb=True, expected False; start vLLM without "
            "--enable-eplb"
        )


def refuse_stores(config: Any) -> None:
    """Refuses a server whose connectors keep what the old weights computed.

    Args:
        config: vLLM's.

    Raises:
        Unsupported: vLLM resets the caches of connectors that can (``reset_cache``), and takes the
            others' for reset. Requests would be answered from pages of earlier weights (RS-1).
    """
    if config.ec_transfer_config is not None:
        raise Unsupported(
            "vLLM does not discard what an encoder cache connector has of earlier weights: got "
            f"ec_connector={config.ec_transfer_config.ec_connector!r}, expected none; start vLLM "
            "without --ec-transfer-config"
        )
    if config.kv_transfer_config is None:
        return
    factory = framework("vllm.distributed.kv_transfer.kv_connector.factory", "vllm")
    base = framework("vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm")
    for name, connector in _connectors(factory.KVConnectorFactory, config.kv_transfer_config):
        resets = connector.reset_cache is not base.KVConnectorBase_V1.reset_cache
        if name != CONNECTOR and not resets:  # ours compares the weights at both ends
            raise Unsupported(
                "vLLM does not discard what this KV connector has of earlier weights: got "
                f"kv_connector={name!r}, expected {CONNECTOR} or one that has reset_cache; start "
                "vLLM with another --kv-transfer-config"
            )


def _connectors(factory: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """The connectors of a ``KVTransferConfig``, by name: those in a MultiConnector too."""
    if config.kv_connector is None:
        return
    connector = factory.get_connector_class(config)
    inner = config.kv_connector_extra_config.get("connectors")
    if connector.__name__ != "MultiConnector" or inner is None:
        yield config.kv_connector, connector
        return
    for each in inner:
        yield from _connectors(factory, type(config)(**{"engine_id": config.engine_id, **each}))


def target_side(needs: Sequence[Sequence[Need]], tensors: Mapping[str, Tensor]) -> Side:
    """The workers' side: a container for each box, at the ranks that need it.

    Args:
        needs: by rank.
        tensors: of the checkpoint, by name.

    Raises:
        ShapeMismatch: ranks need a part of a tensor only. Loaders of vLLM take as many rows as
            their parameter has from a tensor that has more.
    """
    ranks: dict[Need, list[int]] = defaultdict(list)
    for rank, some in enumerate(needs):
        for need in some:
            ranks[need].append(rank)
    _refuse_parts(ranks, tensors)
    return Side.of(len(needs), [_container(need, ranks[need], tensors) for need in ranks])


def _refuse_parts(needs: Iterable[Need], tensors: Mapping[str, Tensor]) -> None:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for need in needs:
        boxes[need.tensor].append(need.box)
    for name, some in boxes.items():
        shape = tensors[name].shape
        if (taken := _covered(some)) < prod(shape):
            raise ShapeMismatch(
                f"`{name}` has another shape than in vLLM's model: vLLM takes {taken} of the "
                f"trainers' {prod(shape)} elements, shape {list(shape)}; serve and train one "
                "config.json",
                tensor=name,
            )


def _covered(boxes: Sequence[Box]) -> int:
    """The number of elements in at least one of the boxes, which may overlap."""
    edges = [
        sorted({edge for at, size in runs for edge in (at, at + size)})
        for runs in zip(*boxes, strict=True)
    ]
    cells = np.zeros([len(each) - 1 for each in edges], dtype=bool)
    for box in boxes:
        cells[
            tuple(
                slice(bisect_left(each, at), bisect_left(each, at + size))
                for each, (at, size) in zip(edges, box, strict=True)
            )
        ] = True
    volumes = reduce(np.multiply.outer, map(np.diff, edges), np.int64(1))
    return int(volumes[cells].sum())


def _container(need: Need, ranks: Sequence[int], tensors: Mapping[str, Tensor]) -> Container:
    tensor = tensors[need.tensor]
    whole = tuple((0, size) for size in tensor.shape)
    box = None if need.box == whole else need.box
    leaf = Leaf(tensor, Mesh.line(ranks), (Replicate(),), box)
    return Container(need.container, tensor.dtype, leaf)


@contextmanager
def _prepared(model: torch.nn.Module, reload: Reload) -> Iterator[dict[str, torch.Tensor]]:
    """The model's parameters as its loader fills them, by name; restored at the end."""
    layerwise = framework(f"{RELOAD}.layerwise", "vllm")
    utils = framework(f"{RELOAD}.utils", "vllm")
    try:
        reload.begin()
        targets = {}
        for path, layer in model.named_modules():
            for name, tensor in utils.get_layer_tensors(layer).items():
                # vLLM's wrapper defers and counts.
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
                targets[f"{path}.{name}" if path else name] = tensor
        yield targets
    finally:
        reload.restore()


def _divide(made: RecordedModel, found: LoadRecording, reload: Reload) -> None:
    """Divides tensors into those that come by boxes and those that come whole."""
    by_layer: dict[str, list[Landing]] = defaultdict(list)
    for landing in found.landings:
        by_layer[landing.layer].append(landing)
    partly = reload.count(found.landings)
    whole = dict(found.whole)
    for path, landings in by_layer.items():
        layer, filled = made.model.get_submodule(path), {landing.name for landing in landings}
        reason = reload.loads_itself(layer, filled)
        if found.whole and path in partly:
            # RS-1: what is missing comes by a loader that isn't recorded.
            reason = f"`{path}` gets another whole"
        if reason:
            whole |= {t: reason for t in _tensors(landings) if t not in whole}
    layers = {path: _tensors(landings) for path, landings in by_layer.items()}
    growing = True
    while growing:
        growing = False
        for path, names in layers.items():
            if names & whole.keys() and not names <= whole.keys():
                growing = True
                whole |= {t: f"`{path}` gets another whole" for t in names if t not in whole}
    made.whole = {name: whole[name] for name in made.shapes if name in whole}
    paths = [path for path, _ in made.model.named_modules()]
    made.landings = {
        path: by_layer[path]
        for path in paths
        if layers.get(path) and not layers[path] & whole.keys()
    }


def _tied(made: RecordedModel, found: LoadRecording) -> list[tuple[str, str]]:
    filled: dict[str, dict[StridedView, str]] = defaultdict(dict)
    for landing in found.landings:
        if landing.tensor is not None:
            filled[landing.target][landing.view] = landing.tensor
    pairs = set()
    for first, *others in shared_parameters(made.model):
        for name in others:
            a, b = filled[first], filled[name]
            pairs |= {(a[view], b[view]) for view in a.keys() & b.keys()}
            # Loaders leave out a further name, if the checkpoint has it.
            one, left = (a, name) if a else (b, first)
            if not (a and b) and len(tensors := {*one.values()}) == 1:
                same = [each for each in names_filling(left) if each in made.shapes]
                pairs |= {(t, each) for t in tensors for each in same}
    return sorted((a, b) for a, b in pairs if a != b)


def _rounded(
    made: RecordedModel,
    found: LoadRecording,
    metas: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
) -> list[str]:
    import torch

    taken: dict[str, set[torch.dtype]] = defaultdict(set)
    for landing in found.landings:
        if landing.read is not None:
            dtypes = (*landing.read.casts, targets[landing.target].dtype)
            taken[landing.read.tensor].add(dtypes[0])
    return [
        name
        for name, dtypes in taken.items()
        if name not in made.whole
        and dtypes == {torch.bfloat16}
        and metas[name].dtype == torch.float32
    ]


def _tensors(landings: Sequence[Landing]) -> set[str]:
    return {landing.tensor for landing in landings if landing.tensor is not None}


def _need(read: BoxRead) -> Need:
    return Need(read.tensor, read.box)
