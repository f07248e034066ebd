"""The tensors of a trainer's module, by their names in the plain model.

Wrappers (``torch.compile``, activation checkpointing, FSDP, DDP, PEFT) insert components into
names. Only this module removes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.adapters import Merge, active, merge_of

if TYPE_CHECKING:
    import torch

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# Removed only where all names begin with one, since a model may have a part of that name.
_ROOTS = ("module.", "base_model.model.")

T = TypeVar("T")


class Named(NamedTuple):
    """A model's tensors."""

    tensors: dict[str, Any]
    merges: dict[str, Merge]
    """By name of the tensor to which active adapters are added."""


class Found(dict[str, Any]):
    """Tensors of modules by name; ``again`` looks them up anew, since a module that is moved has
    other buffers (RS-1). Users may remove, replace and add tensors."""

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(look())
        self._look = look
        self._first = dict(self)

    def again(self) -> dict[str, Any]:
        """What the modules have by now: without what is gone and with what is new."""
        now = dict(self._look())
        own = {name: t for name, t in self.items() if t is not self._first.get(name)}
        removed = self._first.keys() - self.keys()
        return {name: t for name, t in now.items() if name not in removed} | own


def current(
    source: torch.nn.Module | Mapping[str, Any],
) -> torch.nn.Module | Mapping[str, Any]:
    """A module, or the tensors that a mapping has by now."""
    return source.again() if isinstance(source, Found) else source


def named(source: torch.nn.Module | Mapping[str, Any]) -> Named:
    """A module's tensors, or those of a mapping, by their names in the plain model.

    Raises:
        InvalidArgument: names that collide, or adapters that can't be merged.
    """
    if isinstance(source, Mapping):
        return Named(plain_names(source), {})
    return of_module(source)


def plain_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors by their names in the plain model.

    Raises:
        InvalidArgument: two tensors have the same name there.
    """
    names = {name: _without_wrappers(name) for name in tensors}
    while root := _root(names.values()):
        names = {name: plain.removeprefix(root) for name, plain in names.items()}
    first: dict[str, str] = {}
    for name, plain in names.items():
        if plain in first:
            raise InvalidArgument(
                f"parameters `{first[plain]}` and `{name}` are both `{plain}` without the names of "
                "wrappers; give each tensor once, by its name in the plain model"
            )
        first[plain] = name
    return {plain: tensors[name] for plain, name in first.items()}


def of_module(module: torch.nn.Module) -> Named:
    """Parameters and persistent buffers, such as biases of routers.

    Active PEFT adapters are merged into their base, so that rollouts get the weights that the
    module computes with (RS-1).

    Raises:
        InvalidArgument: adapters that can't be merged, names that collide, or a wrapper that holds
            old parameters.
    """
    for _ in inside(module):
        pass
    parts = dict(module.named_modules(remove_duplicate=False))
    adapted = {path: part for path, part in parts.items() if _is_adapted(part)}
    found: dict[str, Any] = {}
    merges: dict[str, Merge] = {}
    with_weight: set[str] = set()
    for name, tensor in _tensors(module, parts):
        path = next((path for path in _ancestors(name) if path in adapted), None)
        if path is None:
            found[name] = tensor
            continue
        layer = adapted[path]
        inner = _in_base(path, layer, _without_wrappers(name.removeprefix(f"{path}.")))
        if inner is None:
            continue
        found[plain := f"{path}.{inner}"] = tensor
        if inner == "weight" and "base_layer" in layer._modules:
            with_weight.add(path)
            if merge := merge_of(path, layer, tensor):
                merges[plain] = merge
    for path in adapted.keys() - with_weight:
        if "base_layer" in adapted[path]._modules:
            merge_of(path, adapted[path], None)  # raises if an adapter has no weight
    tensors = plain_names(found)
    plain_of = dict(zip(found, tensors, strict=True))
    return Named(tensors, {plain_of[name]: merge for name, merge in merges.items()})


def inside(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """What wrappers that call it ``module`` hold, the outermost first.

    Raises:
        InvalidArgument: a wrapper gathers parameters in the next forward pass, and has old ones
            until then (RS-1).
    """
    import torch

    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        settings = getattr(module, "ddp_config", None)
        if getattr(settings, "overlap_param_gather", False):
            raise InvalidArgument(
                "the module gathers its parameters in the next forward pass "
                "(overlap_param_gather), and holds old ones until then; turn it off, or call "
                "start_param_sync(force_sync=True) after each step and give `model.module`"
            )
        yield inner
        module = inner


def reshard(module: Any) -> None:
    """Has FSDP2 drop what it has gathered of a module, if it has. A next pass gathers the shards
    anew; without, it would compute with what was gathered before they were written (RS-1)."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules() if fsdp and hasattr(module, "modules") else ():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def ties(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Tensors that are the same view of the same memory as an earlier one, with its name."""
    first: dict[Any, str] = {}
    found = {}
    for name, tensor in tensors.items():
        local = getattr(tensor, "_local_tensor", tensor)
        if local.numel() and not local.data_ptr():  # freed memory has no address
            continue
        # A rank may have no part of a tensor that is divided.
        at = local.data_ptr() if local.numel() else id(tensor)
        seen = (local.dtype, tuple(local.shape), local.stride(), tuple(tensor.shape))
        key = (at, *seen, str(getattr(tensor, "placements", "")))
        if (same := first.setdefault(key, name)) != name:
            found[name] = same
    return found


def _tensors(
    module: torch.nn.Module, parts: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, Any]]:
    # Under all their names: an engine may need a tied head as a separate tensor.
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in parts.items():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _is_adapted(part: torch.nn.Module) -> bool:
    """Whether this is a PEFT layer. Attributes are checked last, since wrappers forward them."""
    inner = part._modules.keys() & {"base_layer", "original_module"}
    return bool(inner) and hasattr(part, "active_adapters")


def _in_base(path: str, layer: Any, inner: str) -> str | None:
    """A tensor's name in the layer without PEFT; ``None`` for tensors of PEFT."""
    if "base_layer" in layer._modules:
        return inner.removeprefix("base_layer.") if inner.startswith("base_layer.") else None
    # Each adapter trains a copy of the whole module.
    adapters = active(path, layer)
    copies = layer._modules.get("modules_to_save")
    if copies is None and adapters:
        raise InvalidArgument(
            f"`{path}` is a {type(layer).__name__}, whose adapter `{adapters[0]}` isn't merged "
            "while pushing; merge it with PEFT's merge_and_unload() and push the result"
        )
    used = "original_module."
    if copies is not None and adapters and adapters[0] in copies:
        used = f"modules_to_save.{adapters[0]}."
    return inner.removeprefix(used) if inner.startswith(used) else None


def _ancestors(name: str) -> Iterator[str]:
    """Paths of the modules around a tensor, the outermost first."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _root(names: Iterable[str]) -> str | None:
    """The wrapper that all names begin with."""
    listed = list(names)
    return next((r for r in _ROOTS if listed and all(n.startswith(r) for n in listed)), None)
