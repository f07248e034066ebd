"""The CUDA driver: loads machine code into torch's context, launches on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fabric_ray.errors import ResourceError
from fabric_ray.kernels.cache import Cache
from fabric_ray.kernels.sources import source

if TYPE_CHECKING:
    import torch

_CAPTURE_MODE_RELAXED = 2


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ResourceError(
            f"kernels can't be launched without the CUDA driver: {error}", call="dlopen"
        ) from error


def _call(name: str, *arguments: object) -> None:
    library = _driver()
    result = getattr(library, name)(*arguments)
    if result == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorString(result, ctypes.byref(text))
    said = text.value.decode() if text.value else f"error {result}"
    raise ResourceError(f"{name} failed: {said}", call=name)


def _torch() -> Any:
    """torch, with a GPU that kernels can be compiled for."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        raise ResourceError(
            f"kernels need a CUDA GPU, and torch {torch.__version__} finds none here", call="cuInit"
        )
    return torch


def current_architecture(device: int) -> str:
    """What kernels for a GPU are compiled for: ``sm_90a``, for example.

    Suffixed where the GPU has instructions of its own that later ones don't have.
    """
    torch = _torch()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major in (9, 10) else ''}"


@functools.cache
def _primary_context(index: int) -> tuple[int, int]:
    """A GPU as the driver names it, and its primary context, retained for good."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return device.value, int(context.value or 0)


def _enter(index: int) -> None:
    """Makes the context that torch uses on a GPU this thread's, unless it has one of that GPU: an
    earlier ``torch.cuda.device`` need not have left one, nor one of this GPU."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    context = ctypes.c_void_p()
    device, primary = _primary_context(index)
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value:
        current = ctypes.c_int()
        _call("cuCtxGetDevice", ctypes.byref(current))
        if current.value == device:
            return
    _call("cuCtxSetCurrent", ctypes.c_void_p(primary))


@contextmanager
def _apart_from_captures(index: int) -> Iterator[None]:
    """What is called in it, in the context of a GPU, neither breaks the capture of a graph, of any
    thread, nor is refused because of it."""
    _enter(index)
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


#: The driver divides blocks of this size between smaller allocations. A peer that maps one of them
#: maps the whole block.
_BLOCK = 2 << 20


class _Allocation:
    """Bytes in blocks of their own; freed with the last reference, after all work of the device."""

    def __init__(self, nbytes: int, index: int) -> None:
        import torch

        address = ctypes.c_uint64()
        given = (ctypes.byref(address), ctypes.c_size_t(-(-nbytes // _BLOCK) * _BLOCK))
        with torch.cuda.device(index), _apart_from_captures(index):
            try:
                _call("cuMemAlloc_v2", *given)
            except ResourceError:
                # torch keeps what its tensors have freed.
                torch.cuda.empty_cache()
                _call("cuMemAlloc_v2", *given)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, _free, address, index).atexit = False


def _free(address: ctypes.c_uint64, index: int) -> None:
    import torch

    with torch.cuda.device(index), _apart_from_captures(index):
        _call("cuMemFree_v2", address)


def mappable(nbytes: int, device: torch.device) -> torch.Tensor:
    """Zero bytes that other processes of the host can map, however torch's allocator was set:
    expandable segments and ``cudaMallocAsync`` have memory that they can't.

    Raises:
        ResourceError: the GPU has no room.
    """
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    made: torch.Tensor = torch.as_tensor(
        _Allocation(nbytes, index), dtype=torch.uint8, device=device
    )
    return made.zero_()


class Device:
    """One GPU, as a launcher: kernels are compiled, and loaded, when they are first launched.

    A launch is on torch's current stream, waits for nothing and allocates nothing, so that it can
    be captured into a CUDA graph; launch each kernel once before, or :meth:`load` it, for loading
    can't.

    Raises:
        ResourceError: there is no CUDA GPU, or the driver refused something; the text says what.
        CompileError: from :meth:`load` and the first launch.
    """

    def __init__(self, index: int, cache: Cache | None = None) -> None:
        _torch()
        self.index = index
        self._cache = cache or Cache()
        self._lock = threading.Lock()
        self._functions: dict[tuple[str, str], ctypes.c_void_p] = {}
        self._modules: dict[str, ctypes.c_void_p] = {}

    def load(self, file: str, *kernels: str) -> None:
        """Compiles a file of kernels, or finds it in the cache, and loads it.

        Args:
            kernels: those that are launched while others run and wait for what the host does:
                loading one then could wait for them.
        """
        import torch

        with self._lock, torch.cuda.device(self.index):
            self._load(file)
            for kernel in kernels:
                self._function(file, kernel)

    def _load(self, file: str) -> None:
        if file not in self._modules:
            _enter(self.index)
            code = self._cache.get(source(file), current_architecture(self.index)).code
            module = ctypes.c_void_p()
            _call("cuModuleLoadData", ctypes.byref(module), code)
            self._modules[file] = module

    def _function(self, file: str, kernel: str) -> ctypes.c_void_p:
        function = self._functions.get((file, kernel))
        if function is None:
            self._load(file)
            function = ctypes.c_void_p()
            module = self._modules[file]
            _call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
            self._functions[file, kernel] = function
        return function

    def resident(self, file: str, kernel: str, threads: int) -> int:
        """Blocks of a kernel that run at a time when nothing else does, so that they may wait for
        one another."""
        import torch

        blocks = ctypes.c_int()
        with self._lock, torch.cuda.device(self.index):
            _enter(self.index)
            _call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                ctypes.byref(blocks),
                self._function(file, kernel),
                ctypes.c_int(threads),
                ctypes.c_size_t(0),
            )
            multiprocessors = torch.cuda.get_device_properties(self.index).multi_processor_count
        return blocks.value * int(multiprocessors)

    def launch(
        self,
        file: str,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: ctypes.Structure,
        *,
        together: bool = False,
    ) -> None:
        """Launches a kernel.

        Args:
            arguments: the struct that it takes.
            together: begins when all blocks can run at a time, :meth:`resident` at most: they wait
                for one another.
        """
        import torch

        with torch.cuda.device(self.index):
            _enter(self.index)
            function = self._functions.get((file, kernel))
            if function is None:
                with self._lock:
                    function = self._function(file, kernel)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            given = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            sizes = (blocks, 1, 1, threads, 1, 1, 0, stream, given)
            if together:
                _call("cuLaunchCooperativeKernel", function, *sizes)
            else:
                _call("cuLaunchKernel", function, *sizes, None)
