"""Whether the bytes at a tensor's address are its values.

They aren't for lazy negatives and conjugates (a bit of the tensor says so), for other layouts than
strided, for quantised tensors, and for subclasses that only wrap other tensors. On a device they
are once the kernels that write them have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor


# Where bitsandbytes' parameters (`Params4bit`, `Int8Params`) and HQQ's keep their scales.
_SCALES = ("quant_state", "SCB", "CB")


def is_lazy(tensor: Tensor) -> bool:
    """Whether its values are the negatives or the conjugates of its bytes (RS-1)."""
    return bool(tensor.is_neg() or tensor.is_conj())


def check_memory(what: str, tensor: Any, *, lazy: bool = False) -> None:
    """That a tensor has memory of its own which holds its values.

    Args:
        what: its name, for the error.
        tensor: without elements, or with memory that was freed, it passes.
        lazy: whether negatives and conjugates that aren't computed yet pass.

    Raises:
        InvalidArgument: it has none, or other bytes than values.
    """
    if problem := _problem(tensor) or (None if lazy else _laziness(tensor)):
        raise InvalidArgument(f"{what} {problem}")


def resolved(what: str, tensor: Tensor) -> Tensor:
    """The tensor, detached, or a copy of it where its bytes aren't its values.

    Raises:
        InvalidArgument: as :func:`check_memory`.
    """
    check_memory(what, tensor, lazy=True)
    return tensor.detach().resolve_conj().resolve_neg()


def wait_for_kernels(tensors: Iterable[Tensor]) -> None:
    """Waits for the kernels that were launched on the tensors' devices, on any stream: they may
    still read or write these. A copy is ordered behind the kernels of the current stream alone.
    Pinned memory of the host may be the target of a copy from any GPU (``non_blocking=True``).
    """
    import torch

    tensors = list(tensors)
    devices = {tensor.device for tensor in tensors} - {torch.device("meta")}
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and any(t.device.type == "cpu" and t.is_pinned() for t in tensors):
        devices |= {torch.device("cuda", i) for i in _gpus_in_use()}
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def _gpus_in_use() -> list[int]:
    """GPUs that this process has a context on. Waiting for another one would make a context there,
    which takes hundreds of megabytes of its memory."""
    import torch

    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True)
    return [i for i in range(torch.cuda.device_count()) if has_context(i)]


def _laziness(tensor: Any) -> str | None:
    if not is_lazy(tensor):
        return None
    kind = "conjugate" if tensor.is_conj() else "negative"
    return (
        f"is a lazy {kind}: its values differ from its bytes; call resolve_conj().resolve_neg() "
        "first"
    )


def _problem(tensor: Any) -> str | None:
    import torch

    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}, expected torch.strided; call to_dense() first"
    if tensor.is_quantized:
        return (
            f"is quantised ({tensor.dtype}): its values are bytes with a scale and a zero point; "
            "call dequantize() first"
        )
    if not tensor.is_floating_point():
        held = [name for name in _SCALES if getattr(tensor, name, None) is not None]
        if held:
            return (
                f"is quantised ({tensor.dtype}): its scales lie apart, in `{held[0]}`; give its "
                "values by the library that made it, such as bitsandbytes' dequantize_4bit"
            )
    if tensor.device.type == "meta":
        return "is on the meta device and has no values; materialise it first"
    if not tensor.numel():
        return None
    try:
        # Freed memory also has no address, but then its storage has no bytes.
        wraps = not tensor.data_ptr() and bool(tensor.untyped_storage().nbytes())
    except RuntimeError:  # raised for tensors without storage
        wraps = True
    if not wraps:
        return None
    return (
        f"of shape {list(tensor.shape)} is a {type(tensor).__name__}, which wraps other tensors "
        "and has no memory of its own; give plain tensors: its dequantize() or full_tensor()"
    )
