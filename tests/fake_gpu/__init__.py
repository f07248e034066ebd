"""A GPU that isn't there, as ``cuda:0`` of torch and as libcuda of the engine.

Memory lies where the processor can't reach it (``driver.c``). Kernels are torch's functions of the
host. They run when a thread waits for their stream, and no earlier: what is sent before its kernels
have ended is what was there before. A copy to the host waits for the current stream, as CUDA's
does.

``tests/gpu`` runs on it with ``FABRIC_RAY_FAKE_GPU=FOLDER``, which the driver is compiled into.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

GPU = torch.device("cuda:0")
_SOURCE = Path(__file__).with_name("driver.c")
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm")
_OF_HOST = {name: getattr(torch, name) for name in (*_FACTORIES, "as_tensor")}
_OF_HOST["to"] = torch.Tensor.to

_driver: Any = None
_lock = threading.RLock()
# By address: the memory as kernels see it.
_allocations: dict[int, torch.Tensor] = {}
_of_torch: set[int] = set()
_RELAXED = 2
_ALIGN, _SMALL, _SEGMENT = 512, 1 << 20, 2 << 20
# The segment of small tensors, and the bytes of it that are used.
_segment: tuple[int, int] | None = None


def build(folder: Path) -> Path:
    """The driver, compiled once for each folder."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        made = folder / f"{os.getpid()}.new"
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *flags, "-o", made, _SOURCE, "-lpthread"], check=True)
        made.rename(library)
    return library


def install(folder: Path) -> None:
    """Gives this process the GPU."""
    global _driver
    _driver = ctypes.CDLL(str(build(folder)), mode=ctypes.RTLD_GLOBAL)
    _driver.fake_bytes.restype = ctypes.c_void_p
    _driver.fake_bytes.argtypes = [ctypes.c_uint64]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    assert _driver.cuInit(0) == 0
    for name in _FACTORIES:
        setattr(torch, name, _factory(name))
    torch.as_tensor = _as_tensor  # type: ignore[assignment]
    torch.Tensor.to = _to  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name, function in _OF_CUDA.items():
        setattr(torch.cuda, name, function)


class GpuTensor(torch.Tensor):
    """A tensor of the GPU. Its storage has the address that the driver gave."""

    @staticmethod
    def __new__(cls, unreachable: torch.Tensor) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_subclass(
            cls, unreachable, False, dispatch_device=True, device_for_backend_keys=GPU
        )
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GpuTensor({self.dtype} {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            # For torch's guards, which would look for a GPU; Python sees the property above.
            return torch.device("meta")
        returns = func._schema.returns
        if returns and all(r.alias_info and not r.alias_info.is_write for r in returns):
            found = func(*_mapped(_unreachable, args), **_mapped(_unreachable, kwargs))
            return _mapped(_wrapped, found)
        to_host = torch.device(kwargs.get("device") or GPU).type == "cpu"
        if func is torch.ops.aten.copy_.default:
            to_host = not isinstance(args[0], GpuTensor)
        if to_host or func in _WAITING:
            _current().synchronize()
            return func(*_mapped(_seen, args), **_mapped(_seen, kwargs))
        kwargs = {key: kwargs[key] for key in kwargs.keys() - {"device", "pin_memory"}}
        # What comes from the host is copied at once.
        args, kwargs = _mapped(_kept, args), _mapped(_kept, kwargs)
        if func._schema.is_mutable:
            _launch(func, args, kwargs, None)
            return args[0] if "out" not in kwargs else kwargs["out"]
        shapes = func(*_mapped(_meta, args), **_mapped(_meta, kwargs))
        out = _mapped(_new, shapes)
        _launch(func, args, kwargs, out)
        return out


_WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


def _launch(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    # Not the tensors: a kernel refers to memory, and to no object.
    args, kwargs, out = (_mapped(_seen, each) for each in (args, kwargs, out))

    def kernel() -> None:
        found = func(*args, **kwargs)
        if out is not None:
            for to, made in zip(pytree.tree_leaves(out), pytree.tree_leaves(found), strict=True):
                to.copy_(made)

    _current().launch(kernel)


def _synchronize(device: Any = None) -> None:
    """Waits for all streams, the latest first: they have no order among each other."""
    for stream in reversed(_streams):
        stream.synchronize()


class Stream:
    """What was launched and has not run, in order. A stream of torch doesn't wait for others."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = GPU
        self._waiting: list[Callable[[], None]] = []
        with _lock:
            _streams.append(self)

    def launch(self, kernel: Callable[[], None]) -> None:
        with _lock:
            self._waiting.append(kernel)

    def run_one(self) -> None:
        with _lock, torch.inference_mode(False), torch.no_grad():
            if self._waiting:
                self._waiting.pop(0)()

    def synchronize(self) -> None:
        with _lock:
            while self._waiting:
                self.run_one()

    def query(self) -> bool:
        return not self._waiting

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.launch(partial(event.reach, event.recorded))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._stream: Stream | None = None
        self.recorded = self._reached = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or _current()
        self.recorded += 1
        self._stream.launch(partial(setattr, self, "_reached", self.recorded))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current()).wait_event(self)

    def query(self) -> bool:
        return self._reached >= self.recorded

    def synchronize(self) -> None:
        self.reach(self.recorded)

    def reach(self, number: int) -> None:
        """Has the stream run up to the record of this number."""
        with _lock:
            while self._reached < number:
                assert self._stream is not None, "it was recorded"
                self._stream.run_one()


_streams: list[Stream] = []
_default = Stream()
_here = threading.local()


def _current(device: Any = None) -> Stream:
    """The current stream of this thread."""
    stream: Stream = getattr(_here, "stream", _default)
    return stream


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before = _current()
    _here.stream = stream or before
    try:
        yield
    finally:
        _here.stream = before


def _mapped(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, function, tree)


def _factory(name: str) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            return _OF_HOST[name](*args, device=device, **kwargs)
        values = _OF_HOST[name](*args, **kwargs)
        made = _new(values)
        return made if name == "empty" else made.copy_(values)

    return make


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if isinstance(tensor, GpuTensor) or device is None or device.type != "cuda":
        return _OF_HOST["to"](tensor, *args, **kwargs)
    values = _OF_HOST["to"](tensor, dtype=dtype or tensor.dtype)
    return _new(values).copy_(values)


def _as_tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    interface = getattr(data, "__cuda_array_interface__", None)
    if interface is None:
        return _OF_HOST["as_tensor"](data, *args, device=device, **kwargs)
    dtype = {"|u1": torch.uint8, "<i8": torch.int64}[interface["typestr"]]
    (count,) = interface["shape"] or (1,)
    address, nbytes = interface["data"][0], count * dtype.itemsize
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    whose = (ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if not _driver.cuMemGetAddressRange_v2(*whose) and base.value not in _of_torch:
        _allocations[base.value] = _bytes_at(_driver.fake_bytes(base), size.value, None)
    flat = _bytes_at(address, nbytes, data).view(dtype)
    return _wrapped(flat.reshape(interface["shape"]))


def _new(like: torch.Tensor) -> GpuTensor:
    """New memory for a tensor of this shape. It holds anything."""
    nbytes = like.numel() * like.element_size()
    flat = _bytes_at(_place(max(nbytes, 1)), max(nbytes, 1), None)[:nbytes].view(like.dtype)
    return _wrapped(flat.view(like.shape))


def _place(nbytes: int) -> int:
    """The address of new memory. Small tensors share segments, as with torch's allocator."""
    global _segment
    with _lock:
        rounded = -(-nbytes // _ALIGN) * _ALIGN
        if nbytes > _SMALL:
            return _allocate(rounded)
        if _segment is None or _segment[1] + rounded > _SEGMENT:
            _segment = _allocate(_SEGMENT), 0
        start, used = _segment
        _segment = start, used + rounded
        return start + used


def _allocate(nbytes: int) -> int:
    address, mode = ctypes.c_uint64(), ctypes.c_int(_RELAXED)
    context = ctypes.c_void_p()
    assert _driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert _driver.cuCtxPushCurrent_v2(context) == 0
    _driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert _driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    _driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert _driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    _allocations[address.value] = _bytes_at(_driver.fake_bytes(address), nbytes, None).fill_(0xEE)
    _of_torch.add(address.value)
    return address.value


def _bytes_at(address: int, nbytes: int, owner: Any) -> torch.Tensor:
    """Bytes of device memory, in a storage of their own that refers to an object."""
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _wrapped(unreachable: torch.Tensor) -> GpuTensor:
    return GpuTensor(unreachable)


def _unreachable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host, for what looks at shapes alone."""
    if not isinstance(tensor, GpuTensor):
        return tensor
    return _in(tensor.untyped_storage(), tensor, tensor.storage_offset())


def _seen(tensor: torch.Tensor) -> torch.Tensor:
    """The memory as kernels see it."""
    if not isinstance(tensor, GpuTensor):
        return tensor
    address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()
    base = max((start for start in _allocations if start <= address), default=0)
    seen = _allocations.get(base)
    if seen is None or address >= base + seen.numel():  # memory of the host that the GPU reaches
        return _unreachable(tensor)
    offset, rest = divmod(address - base, tensor.element_size())
    assert not rest, "tensors are aligned"
    return _in(seen.untyped_storage(), tensor, offset)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same dtype, shape and strides without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _in(storage: Any, like: torch.Tensor, offset: int) -> torch.Tensor:
    # Kernels run outside of the caller's inference mode, and its tensors can't be changed there.
    with torch.inference_mode(False), torch.no_grad():
        flat = _OF_HOST["empty"](0, dtype=like.dtype)
        return flat.set_(storage, offset, like.shape, like.stride())


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, GpuTensor) else tensor.clone()


_OF_CUDA = {
    "is_available": lambda: True,
    "init": lambda: None,
    "device": lambda index: nullcontext(),
    "synchronize": _synchronize,
    "Stream": Stream,
    "Event": Event,
    "stream": _on,
    "current_stream": _current,
    "default_stream": lambda device=None: _default,
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
}
