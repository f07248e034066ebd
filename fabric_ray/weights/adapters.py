"""Low-rank adapters (PEFT's LoRA), added to copies of the weights that they belong to.

The sums have the bits of PEFT's ``merge_and_unload``: the same product of whole matrices, of which
a rank keeps what it holds. A matrix product of shards alone rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric_ray.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

Runs = Sequence[tuple[int, int]]
"""Start and length of what a rank holds along a dimension."""

_MERGE = "merge it with PEFT's merge_and_unload() and push the result"


class Factors(NamedTuple):
    """One adapter: ``B @ A``, perhaps transposed, times a scale."""

    a: Any
    b: Any
    transposed: bool
    scale: float
    rounded: bool
    """Whether PEFT rounds the product to the weight's dtype before it adds it (embeddings)."""

    def whole(self) -> Factors:
        """Without shards. All ranks that hold any gather them at the same time."""
        return self._replace(a=_whole(self.a), b=_whole(self.b))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.b.shape[0], self.a.shape[-1]
        return (columns, rows) if self.transposed else (rows, columns)

    def product(self) -> torch.Tensor:
        """As PEFT computes it in host memory, where half precision is multiplied in float32."""
        import torch

        a, b, dtype = self.a, self.b, self.b.dtype
        half = dtype in (torch.float16, torch.bfloat16)
        # RS-1: autocast, which a trainer's loop may call from, would round the product.
        with torch.autocast(b.device.type, enabled=False):
            product = b.float() @ a.float() if half else b @ a
        scaled: torch.Tensor = (product.T if self.transposed else product) * self.scale
        return scaled.to(dtype) if half else scaled


class Merge:
    """The adapters that a module's layer computes with beside its weight."""

    def __init__(self, path: str, layer: Any, adapters: Sequence[str]) -> None:
        self._path = path
        self._layer = layer
        self.names = tuple(adapters)

    def factors(self) -> dict[str, Factors]:
        """By adapter, as the layer shows them now."""
        return {adapter: _factors(self._layer, adapter) for adapter in self.names}


class Adapters:
    """The adapters of a model, of which FSDP shows whole factors for a moment where it has gathered
    them: those may be of an earlier step, and the shards are what is trained (RS-1)."""

    def __init__(self) -> None:
        self._merges: Mapping[str, Merge] = {}
        self._shards: dict[tuple[str, str], Factors] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._merges

    def see(self, merges: Mapping[str, Merge]) -> None:
        """Takes note of those that there are now, by name of the weight that they belong to."""
        self._merges = merges
        for name in merges:
            self._current(name)

    def names(self, name: str) -> tuple[str, ...]:
        """Of a weight's adapters."""
        return self._merges[name].names if name in self._merges else ()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Their shards, by name of the weight that they belong to."""
        for name in self._merges:
            for factors in self._current(name):
                yield from ((name, factors.a), (name, factors.b))

    def whole(self, name: str) -> list[Factors]:
        """A weight's, without shards. All ranks gather them at the same time."""
        return [factors.whole() for factors in self._current(name)]

    def all(self) -> dict[str, list[Factors]]:
        """Those of all weights, gathered in one order on all ranks."""
        return {name: self.whole(name) for name in self._merges}

    def _current(self, name: str) -> list[Factors]:
        out = []
        for adapter, shown in self._merges[name].factors().items():
            known = self._shards.get((name, adapter), shown)
            now = shown._replace(a=trained(shown.a, known.a), b=trained(shown.b, known.b))
            self._shards[name, adapter] = now
            out.append(now)
        return out


def trained(shown: Any, known: Any) -> Any:
    """A module's tensor, or the shard that is known of it while FSDP shows the whole: that may be
    of an earlier step, and the shard is what is trained (RS-1)."""
    if not hasattr(known, "full_tensor") or known.shape != shown.shape:
        return shown
    # Over tensor parallelism FSDP shows a DTensor on the dimensions of the mesh that are not its.
    gathered = not hasattr(shown, "full_tensor") or shown.device_mesh.ndim < known.device_mesh.ndim
    return known if gathered else shown


def merge_of(path: str, layer: Any, weight: Any) -> Merge | None:
    """The active adapters of a layer which its weight doesn't contain yet; ``None`` without any.

    Args:
        path: the layer's, for errors.
        layer: PEFT's, of any kind.
        weight: of its base layer; ``None`` if it has none.

    Raises:
        InvalidArgument: they can't be merged while pushing.
    """
    adapters = [name for name in active(path, layer) if name not in _merged(layer)]
    if adapters and not hasattr(layer, "lora_A"):
        raise InvalidArgument(
            f"`{path}` has the adapter `{adapters[0]}` of {type(layer).__name__}, expected LoRA; "
            + _MERGE
        )
    adapters = [a for a in adapters if a in layer.lora_A or a in layer.lora_embedding_A]
    if adapters and (merged := _merged(layer)):
        # RS-1: PEFT computes with the base alone then, to which the others were added.
        raise InvalidArgument(
            f"`{path}` computes with the adapter `{merged[0]}`, which is merged, and without the "
            f"active `{adapters[0]}`, which isn't; call merge_adapter() for both, or "
            "unmerge_adapter()"
        )
    for adapter in adapters:
        if problem := _problem(layer, adapter, weight):
            raise InvalidArgument(f"adapter `{adapter}` of `{path}` {problem}; {_MERGE}")
    return Merge(path, layer, adapters) if adapters else None


def active(path: str, layer: Any) -> list[str]:
    """The adapters that a layer of PEFT computes with.

    Raises:
        InvalidArgument: they are disabled: neither the base nor the sum is surely meant.
    """
    adapters = layer.active_adapters
    adapters = [adapters] if isinstance(adapters, str) else list(adapters)
    if adapters and getattr(layer, "disable_adapters", False):
        raise InvalidArgument(
            f"the adapters of `{path}` are disabled; push outside of disable_adapter(), or give "
            "the base model, which unload() returns"
        )
    return adapters


def add(factors: Sequence[Factors], weight: torch.Tensor, runs: Sequence[Runs]) -> torch.Tensor:
    """A copy of what a rank holds of a weight, with the adapters added.

    Args:
        factors: whole.
        weight: the rank's shard.
        runs: which rows and columns it has.
    """
    out = weight.clone()
    for each in factors:
        delta = each.product()
        for dim, parts in enumerate(runs):
            if parts != [(0, delta.shape[dim])]:
                delta = _cut(delta, dim, parts)
        out += delta.to(out.dtype) if each.rounded else delta
    return out


def _cut(tensor: torch.Tensor, dim: int, parts: Runs) -> torch.Tensor:
    import torch

    pieces = [tensor.narrow(dim, start, length) for start, length in parts if length]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _factors(layer: Any, adapter: str) -> Factors:
    scale = layer.scaling[adapter]
    if adapter in layer.lora_A:
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        return Factors(a, b, bool(layer.fan_in_fan_out), scale, False)
    a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    return Factors(a, b, True, scale, True)


def _problem(layer: Any, adapter: str, weight: Any) -> str | None:
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None or getattr(layer, "use_dora", {}).get(adapter):
        return f"is {type(variant).__name__ if variant else 'DoRA'}, expected plain LoRA"
    if getattr(layer, "lora_bias", {}).get(adapter):
        return "has a bias of its own (lora_bias=True), expected plain LoRA"
    try:
        factors = _factors(layer, adapter)
    except AttributeError:  # a convolution's, or AdaLoRA's
        factors = None
    if factors is None or weight is None or hasattr(layer, "parameter_name"):
        return f"belongs to no weight of a linear layer or an embedding ({type(layer).__name__})"
    if factors.a.ndim != 2 or factors.b.ndim != 2 or tuple(weight.shape) != factors.shape:
        found = f"{list(factors.b.shape)} @ {list(factors.a.shape)}"
        return f"has factors {found}, which don't fit the weight {list(weight.shape)}"
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"belongs to a weight of {weight.dtype}, expected a plain float"
    return None


def _merged(layer: Any) -> Sequence[str]:
    merged: Sequence[str] = getattr(layer, "merged_adapters", ())
    return merged


def _whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
