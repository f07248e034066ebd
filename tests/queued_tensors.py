"""Tensors of a GPU of :mod:`tests.queued_streams`: operations are queued on the current stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.host_graph import READS_BACK, by_truth
from tests.queued_streams import QueuedDevice, QueuedGpus, Stream, Wait

aten = torch.ops.aten


class DeviceTensor(Tensor):
    """A tensor whose operations run later, on the stream that is current when they are called.

    Values lie in ``values``, on the processor. What the host asks of them waits for the current
    stream, as in torch.
    """

    values: Tensor
    on: QueuedDevice
    allocation: Any

    @staticmethod
    def __new__(cls, values: Tensor, on: QueuedDevice, allocation: Any) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device="cpu",
        )  # fmt: skip
        made.values, made.on, made.allocation = values, on, allocation
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _queued(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.allocation.block.record(stream)

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return self.cpu().to(dtype or self.dtype)
        assert device in (None, self.device), f"to {device}"
        if dtype in (None, self.dtype):
            return self.clone() if copy else self
        return super().to(dtype)

    def cpu(self) -> Tensor:  # type: ignore[override]
        self.on.wait_for([self.on.current], Wait.STREAM, "Tensor.cpu")
        return self.values.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.dtype}, {tuple(self.shape)}, {self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self) -> Any:  # type: ignore[override]
        raise TypeError("can't convert a tensor of a GPU to numpy; use cpu() first")


class OnQueuedGpus(TorchFunctionMode):
    """Makes tensors on the GPUs where torch is asked for some there; for one thread."""

    def __init__(self, gpus: QueuedGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        name = getattr(func, "__name__", "")
        if name in ("to", "cuda") and not isinstance(args[0], DeviceTensor):
            return self._to(func, args, kwargs)
        if name == "one_hot" and isinstance(args[0], DeviceTensor):
            # It makes a tensor where it takes the indices to be: on the processor.
            classes = torch.arange(args[1], device="cpu")
            on = args[0].on
            return (args[0][..., None] == on_device(classes, on, copies=False)).to(torch.int64)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            if device is not None and name.endswith("_like"):
                args, kwargs = _values(args), _values(kwargs)
            return func(*args, **kwargs)
        on = self._gpus.of(device)
        kwargs["device"] = "cpu"
        made = func(*_values(args), **_values(kwargs))
        from_host = name in ("tensor", "as_tensor", "asarray")
        return on_device(made, on, copies=from_host, empty="empty" in name)

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        device, dtype, non_blocking, _ = (
            (torch.device("cuda"), None, False, None)
            if func is Tensor.cuda
            else torch._C._nn._parse_to(*args[1:], **kwargs)
        )
        if device is None or device.type != "cuda":
            found: Tensor = func(*args, **kwargs)
            return found
        return on_device(
            args[0].to(dtype or args[0].dtype), self._gpus.of(device), copies=not non_blocking
        )


def on_device(
    values: Tensor, on: QueuedDevice, *, copies: bool = True, empty: bool = False
) -> DeviceTensor:
    """A tensor with these values.

    Args:
        copies: they are copied from the host, which waits for the stream, as torch does for memory
            that isn't pinned.
        empty: without the values.
    """
    if copies:
        on.wait_for([on.current], Wait.STREAM, "a copy from the host")
        values = values.clone()
    made = _room(values, on)
    room = made.values
    if not empty:
        on.current.launch(lambda _: _discard(room.copy_(values)))
    return made


def wrapped(values: Tensor, on: QueuedDevice, keeps: Any) -> DeviceTensor:
    """Memory of the host as a tensor of a GPU, with nothing to free."""
    return DeviceTensor(values, on, keeps)


def _room(like: Tensor, on: QueuedDevice) -> DeviceTensor:
    """Memory on the current stream for a tensor of this shape, these strides and this dtype."""
    span = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1
    nbytes = span * like.element_size() if like.numel() else 0
    allocation = on.current.memory.allocate(nbytes)
    flat = allocation.block.bytes[: nbytes or 0].view(like.dtype)
    return DeviceTensor(flat.as_strided(like.shape, like.stride(), 0), on, allocation)


def _values(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda t: t.values, tree)


def _zeros(tensor: Tensor) -> Tensor:
    """The shape by itself: an index that is valid wherever there is anything."""
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    made = torch.zeros(span if tensor.numel() else 0, dtype=torch.uint8).to(tensor.dtype)
    return made.as_strided(tensor.shape, tensor.stride())


def _queued(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, DeviceTensor)]
    on = given[0].on
    returns, arguments = func._schema.returns, func._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    if func.overloadpacket is aten.copy_:
        return _copied(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
    if func.overloadpacket in READS_BACK or by_truth(func, args):
        on.wait_for([on.current], Wait.STREAM, str(func))
        found = func(*_values(args), **_values(kwargs))
        return tree_map_only(Tensor, lambda t: on_device(t, on, copies=False), found)
    if any(r.alias_info and not r.alias_info.is_write for r in returns):
        keeps = given[0].allocation
        views = func(*_values(args), **_values(kwargs))
        return tree_map_only(Tensor, lambda t: DeviceTensor(t, on, keeps), views)
    apart = [
        leaf for leaf in tree_leaves([args, kwargs])
        if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.ndim
    ]  # fmt: skip
    if apart:
        raise RuntimeError(f"{func}: tensors of a GPU and of the host, {apart[0].shape}")
    run_args, run_kwargs = tree_map_only(Tensor, _kept, (args, kwargs))
    if written:
        on.current.launch(lambda _: _discard(func(*run_args, **run_kwargs)))
        if not returns:
            return None
        out = args[written[0]] if written[0] < len(args) else kwargs[arguments[written[0]].name]
        return out
    shapes = func(*tree_map_only(Tensor, _zeros, args), **tree_map_only(Tensor, _zeros, kwargs))
    made = tree_map_only(Tensor, lambda t: _room(t, on), shapes)
    into = [t.values for t in tree_leaves(made) if isinstance(t, DeviceTensor)]
    if "empty" not in func.overloadpacket.__name__:

        def run(_: Stream) -> None:
            found = [t for t in tree_leaves(func(*run_args, **run_kwargs)) if torch.is_tensor(t)]
            for room, values in zip(into, found, strict=True):
                room.copy_(values)

        on.current.launch(run)
    return made


def _kept(tensor: Tensor) -> Tensor:
    """What a task uses: memory alone, and no reference that would keep it from being freed; a
    number of the host as it is now."""
    return tensor.values if isinstance(tensor, DeviceTensor) else tensor.clone()


def _discard(_: Any) -> None:
    pass


def _copied(into: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    if not isinstance(into, DeviceTensor):
        assert isinstance(source, DeviceTensor)
        into.copy_(source.cpu())
        return into
    if not isinstance(source, DeviceTensor) and source.ndim and not non_blocking:
        into.on.wait_for([into.on.current], Wait.STREAM, "a copy from the host")
        source = source.clone()
    values, room = (source.values if isinstance(source, DeviceTensor) else source), into.values
    into.on.current.launch(lambda _: _discard(room.copy_(values)))
    return into
