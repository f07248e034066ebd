"""NIXL's lists of descriptors: (address, bytes, device) of pieces of one kind of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from fabric_ray.compat.nixl.status import (
    nixl_mem_t,
    nixlMismatchError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from fabric_ray.decoding import from_msgpack
from fabric_ray.engine.memory import fix_storage
from fabric_ray.errors import InvalidArgument
from fabric_ray.tensors import check_memory

_log = logging.getLogger("nixl.fabric_ray")

Rows = NDArray[np.uint64]
_VERSION = 1


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    version: int
    kind: str
    memory: int
    rows: bytes
    labels: list[bytes]


class DescriptorList:
    """What the lists have in common: rows of whole numbers, and for some a label each.

    Args:
        type: of the memory.
        descs: an Nx3 array, tuples, or how many are going to be added.
    """

    kind: ClassVar[str]
    labelled: ClassVar[bool] = False

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._type = nixl_mem_t(type)
        self._rows: Rows = np.zeros((0, 3), dtype=np.uint64)
        self._added: list[tuple[int, int, int]] = []
        self._labels: list[bytes] = []
        self.fixed: dict[int, Any] = {}
        """By first address, what keeps tensors from moving while it is referred to (MR-1)."""
        if isinstance(descs, np.ndarray):
            self._rows = _checked(descs)
            self._labels = [b""] * (len(descs) if self.labelled else 0)
        elif not isinstance(descs, int):
            for desc in descs:
                self.addDesc(desc)

    def rows(self) -> Rows:
        """All of them, Nx3."""
        if self._added:
            self._rows = np.concatenate([self._rows, np.array(self._added, dtype=np.uint64)])
            self._added = []
        return self._rows

    def ranges(self) -> list[tuple[int, int]]:
        """First addresses and bytes, without those of empty tensors."""
        return [(first, nbytes) for first, nbytes, _ in self.rows().tolist() if nbytes]

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self._rows) + len(self._added)

    def isEmpty(self) -> bool:
        return not self.descCount()

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        row, label = self._parted(desc)
        self._added.append(row)
        if self.labelled:
            self._labels.append(label)

    def index(self, desc: tuple[Any, ...]) -> int:
        """
        Raises:
            nixlNotFoundError: it isn't there.
        """
        row, _ = self._parted(desc)
        found = np.flatnonzero(np.all(self.rows() == np.array(row, dtype=np.uint64), axis=1))
        if not found.size:
            raise nixlNotFoundError(f"{desc} is not in the list")
        return int(found[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not 0 <= index < self.descCount():
            raise IndexError(f"there is no descriptor {index} among {self.descCount()}")
        first, nbytes, device = (int(value) for value in self.rows()[index])
        if self.labelled:
            return first, nbytes, device, self._labels[index]
        return first, nbytes, device

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DescriptorList)
            and (self.kind, self._type, self._labels) == (other.kind, other._type, other._labels)
            and np.array_equal(self.rows(), other.rows())
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.kind}({self._type.name}, {[self[i] for i in range(self.descCount())]})"

    def to_bytes(self) -> bytes:
        """The encoded form: versioned."""
        rows = np.ascontiguousarray(self.rows(), dtype="<u8").tobytes()
        return msgspec.msgpack.encode(_Encoded(_VERSION, self.kind, self._type, rows, self._labels))

    @classmethod
    def _from(cls, encoded: _Encoded) -> Self:
        rows = np.frombuffer(encoded.rows, dtype="<u8").reshape(-1, 3).astype(np.uint64)
        found = cls(nixl_mem_t(encoded.memory), rows)
        if cls.labelled:
            if len(encoded.labels) != len(rows):
                raise ValueError("not as many labels as descriptors")
            found._labels = encoded.labels
        return found

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return descriptors_from_bytes, (self.to_bytes(),)

    def _parted(self, desc: tuple[Any, ...]) -> tuple[tuple[int, int, int], bytes]:
        if not isinstance(desc, tuple):
            raise TypeError(f"a descriptor is a tuple, not a {type(desc).__name__}")
        if len(desc) != 3 + self.labelled:
            raise ValueError(f"a descriptor of {self.kind} has {3 + self.labelled} elements")
        first, nbytes, device = (int(value) for value in desc[:3])
        if min(first, nbytes, device) < 0 or max(first, nbytes, device) >= 1 << 64:
            raise ValueError(f"addresses, bytes and devices lie between 0 and 2^64, not {desc[:3]}")
        label = desc[3] if self.labelled else b""
        return (first, nbytes, device), label if isinstance(label, bytes) else str(label).encode()


class nixlXferDList(DescriptorList):
    """Pieces of memory to be transferred."""

    kind = "nixlXferDList"


class nixlRegDList(DescriptorList):
    """Pieces of memory to be registered, each with a label of the caller's."""

    kind = "nixlRegDList"
    labelled = True

    def trim(self) -> nixlXferDList:
        """Without the labels."""
        return nixlXferDList(self._type, self.rows().copy())


def descriptors_from_bytes(data: bytes) -> DescriptorList:
    """Decodes.

    Raises:
        nixlMismatchError: anything but an encoding of a list.
    """
    kinds: Sequence[type[DescriptorList]] = (nixlXferDList, nixlRegDList)
    try:
        encoded = from_msgpack(data, _Encoded)
        if encoded.version != _VERSION:
            raise ValueError(f"version {encoded.version}; this is version {_VERSION}")
        [kind] = [kind for kind in kinds if kind.kind == encoded.kind]
        return kind._from(encoded)
    except (msgspec.MsgspecError, ValueError) as error:
        raise nixlMismatchError(f"not a list of descriptors: {error}") from error


L = TypeVar("L", bound=DescriptorList)


def listed(
    kind: type[L], descs: Any, mem_type: str | None, memories: Mapping[str, nixl_mem_t]
) -> L | None:
    """A list of what a caller gives: a list, tensors, or tuples or an array of a named kind of
    memory. ``None``, and a line in the log, for anything else."""
    if isinstance(descs, kind):
        return descs
    if isinstance(descs, DescriptorList):
        _log.error("a %s is wanted, not a %s", kind.kind, descs.kind)
        return None
    if hasattr(descs, "data_ptr"):
        descs = [descs]
    if len(descs) and hasattr(descs[0], "data_ptr"):
        return _of_tensors(kind, descs)
    if mem_type is None:
        _log.error("descriptors that aren't tensors need a mem_type")
        return None
    memory = memories[mem_type]
    wanted = 3 + kind.labelled
    if not isinstance(descs, np.ndarray) and any(
        not isinstance(desc, tuple) or len(desc) != wanted for desc in descs
    ):
        _log.error("descriptors of %s are tuples of %d", kind.kind, wanted)
        return None
    return kind(memory, descs)


def _of_tensors(kind: type[L], tensors: Sequence[Any]) -> L | None:
    device = tensors[0].device
    if any(tensor.device != device or not tensor.is_contiguous() for tensor in tensors):
        _log.error("tensors must be contiguous and on one device")
        return None
    try:
        for tensor in tensors:
            check_memory("a tensor", tensor)
    except InvalidArgument as error:
        _log.error("%s", error)
        return None
    memory = nixl_mem_t.DRAM_SEG if device.type == "cpu" else nixl_mem_t.VRAM_SEG
    number = max(0, tensors[0].get_device())
    rows = [(t.data_ptr(), t.numel() * t.element_size(), number) for t in tensors]
    made = kind(memory, np.array(rows, dtype=np.uint64))
    if kind.labelled:
        made.fixed = {t.data_ptr(): fix_storage(t.untyped_storage()) for t in tensors}
    return made


def check_supported(descs: DescriptorList) -> None:
    """
    Raises:
        nixlNotSupportedError: neither DRAM nor VRAM.
    """
    if descs.getType() not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
        raise nixlNotSupportedError(
            f"{descs.getType().name} can't be registered here; only DRAM and VRAM can"
        )


def _checked(array: NDArray[Any]) -> Rows:
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype not in (np.uint64, np.int64):
        raise ValueError("descriptors are an Nx3 array of uint64 or int64")
    if not array.flags.c_contiguous:
        raise ValueError("an array of descriptors must be C-contiguous")
    return array.astype(np.uint64)
