"""Runs a model's loader over tensors without memory, and records which box of which tensor lands
in which part of which parameter.

Tensors of the checkpoint are meta tensors: views keep offset and strides, so the arguments of a
final ``copy_`` tell the box. Copies and casts on the way are followed. Arithmetic and decisions by
value can't be recorded: such a tensor is named, and its loader needs the whole tensor.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_CLONES = (_aten._to_copy.default, _aten.clone.default)
_NEED_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_FILLS: dict[Any, Callable[[tuple[Any, ...]], float]] = {
    _aten.fill_.Scalar: lambda args: float(args[1]),
    _aten.zero_.default: lambda args: 0.0,
}


class StridedView(NamedTuple):
    """Elements of a memory, in elements of its dtype."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StridedView:
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


class BoxRead(NamedTuple):
    """A part of a checkpoint's tensor, as a loader reads it."""

    tensor: str
    box: tuple[tuple[int, int], ...]
    """``(start, length)`` per dimension."""
    view: StridedView
    """Of the box, which lies row-major without gaps."""
    casts: tuple[torch.dtype, ...]
    """Dtypes in which the elements are kept on the way, in order."""

    def of(self, box: torch.Tensor) -> torch.Tensor:
        """The elements that the loader copies, of the box's."""
        begin = box.storage_offset() + self.view.offset
        read = box.as_strided(self.view.shape, self.view.strides, begin)
        for dtype in self.casts:
            read = read.to(dtype)
        return read


class Landing(NamedTuple):
    """What a loader writes to a part of a parameter: elements of a box, or a constant."""

    target: str
    view: StridedView
    """Of the parameter; its offset counts from the parameter's first element."""
    read: BoxRead | None
    value: float = 0.0
    replaces: str | None = None
    """The checkpoint's tensor that the loader has filled with the constant, if it has."""

    @property
    def tensor(self) -> str | None:
        """The checkpoint's tensor that the loader copies."""
        return self.read.tensor if self.read else self.replaces

    @property
    def layer(self) -> str:
        """The path of the module that has the parameter."""
        return self.target.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Of the parameter in its module."""
        return self.target.rpartition(".")[2]

    def fill(self, target: torch.Tensor, boxes: Callable[[BoxRead], torch.Tensor]) -> None:
        """Writes to the parameter.

        Args:
            boxes: finds the values of a box.
        """
        offset, shape, strides = self.view
        part = target.data.as_strided(shape, strides, target.storage_offset() + offset)
        if self.read is None:
            part.fill_(self.value)
        else:
            part.copy_(self.read.of(boxes(self.read)))


@dataclass
class LoadRecording:
    """What a loader does with the tensors of a checkpoint."""

    landings: list[Landing] = field(default_factory=list)
    """In order: later ones may overwrite earlier ones."""
    whole: dict[str, str] = field(default_factory=dict)
    """Tensors that can't be recorded, and why."""


def record(
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    tensors: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
) -> LoadRecording:
    """Runs a loader; no memory is written.

    Args:
        load: takes names and tensors, as ``load_weights`` of a model.
        tensors: of the checkpoint, contiguous and on the meta device.
        targets: the parameters that the loader writes, on any device.

    Raises:
        Exception: what the loader raises, e.g. for a name that it doesn't know.
    """
    recorder = _Recorder(targets)
    waiting = deque(tensors)
    alive: dict[str, weakref.ref[torch.Tensor]] = {}

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        while waiting:
            name = waiting.popleft()
            given = tensors[name].detach()
            alive[name] = weakref.ref(given)
            recorder.follow(name, given)
            yield name, given
            del given

    with torch.no_grad(), _none_is_meta():
        while waiting:
            before = len(waiting)
            try:
                with recorder:
                    load(feed())
            except _UnrecordableError as error:
                is_known = error.names <= recorder.found.whole.keys()
                recorder.give_up(error.names, str(error))
                if recorder.current not in error.names and not is_known:
                    # The loader had taken others before it filled this one.
                    recorder.begin_again()
                    waiting.clear()
                    waiting.extend(name for name in tensors if name not in recorder.found.whole)
                    continue
            if len(waiting) == before:
                break
    landed = {landing.tensor for landing in recorder.found.landings}
    for name, given in alive.items():
        if given() is not None and name not in landed:
            recorder.give_up((name,), "the model keeps it")
    return recorder.found


_no_tensor_is_meta = threading.Lock()


@contextmanager
def _none_is_meta() -> Iterator[None]:
    """Has no tensor say that it lacks memory: some loaders fill further tensors only where there is
    memory (RS-1). Classes of tensors stay, which loaders look at."""
    with _no_tensor_is_meta:
        torch.Tensor.is_meta = property(lambda tensor: False)  # type: ignore[assignment]
        try:
            yield
        finally:
            del torch.Tensor.is_meta


class _UnrecordableError(Exception):
    """Ends a loader that asks for values of tensors."""

    def __init__(self, names: frozenset[str], why: str) -> None:
        super().__init__(why)
        self.names = names


class _Clone(NamedTuple):
    """A memory without gaps that holds copies of elements of another."""

    source: int
    """Storage of the other."""
    read: StridedView
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = LoadRecording()
        self.current = ""
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in targets.items():
            self._targets.setdefault(_storage(tensor), (name, tensor))
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._clones: dict[int, _Clone] = {}
        self._constants: dict[int, float] = {}
        """Tensors of the checkpoint that the loader has filled, by storage."""
        self._lost: dict[int, frozenset[str]] = {}
        self._filled: dict[int, set[str]] = defaultdict(set)
        """The checkpoint's tensors that have gone to a parameter, by its storage."""
        # Addresses name storages, so none may be freed.
        self._kept: list[Any] = []

    def follow(self, name: str, tensor: torch.Tensor) -> None:
        """Takes the next tensor of the checkpoint."""
        self.current = name
        # Not the tensor itself: a model that keeps it is noticed.
        self._tensors[_storage(tensor)] = (name, tensor.detach())

    def begin_again(self) -> None:
        """Forgets what the loader has done, before it runs anew."""
        self.found.landings.clear()
        for known in (self._constants, self._lost, self._filled):
            known.clear()

    def give_up(self, names: Sequence[str] | frozenset[str], why: str) -> None:
        for name in names:
            self.found.whole.setdefault(name, why)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in _FILLS and _storage(args[0]) in self._targets:
            return self._fill(args[0], _FILLS[func](args))
        if func in _FILLS and self._is_whole(args[0]):
            self._constants[_storage(args[0])] = _FILLS[func](args)
            return args[0]
        if func in _CLONES and self._sources(_storage(args[0])):
            return self._clone(func, args, kwargs)
        given = [*_tensors_in(args), *_tensors_in(tuple(kwargs.values()))]
        names = self._names(given)
        if names and func._schema.is_mutable:
            self.give_up(names, f"its loader runs {func}")
            if any(_storage(each) in self._targets for each in given):
                return args[0]
        has_memory = all(each.device.type != "meta" for each in given)
        if names and not has_memory and _NEED_VALUES & set(func.tags):
            raise _UnrecordableError(names, f"its loader runs {func}, which needs its values")
        result = func(*args, **kwargs)
        for made in _tensors_in((result,)):
            key = _storage(made)
            if names and not self._sources(key) and key not in self._targets:
                self._kept.append(made.untyped_storage())
                self._lost[key] = names
        return result

    def _sources(self, storage: int) -> bool:
        """Whether a storage holds elements of the checkpoint."""
        return storage in self._tensors or storage in self._clones or storage in self._lost

    def _names(self, given: Sequence[torch.Tensor]) -> frozenset[str]:
        """The checkpoint's tensors that tensors are made of."""
        found: set[str] = set()
        for each in given:
            key = _storage(each)
            while key in self._clones:
                key = self._clones[key].source
            if key in self._tensors:
                found.add(self._tensors[key][0])
            elif key in self._targets:
                # Not by what came last: a loader may take more tensors before it fills the first.
                found |= self._filled.get(key) or {self.current} - {""}
            found |= self._lost.get(key, frozenset())
        return frozenset(found)

    def _clone(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if func is _aten._to_copy.default:
            kwargs["device"] = torch.device("meta")
        made: torch.Tensor = func(*args, **kwargs)
        self._kept.append(made.untyped_storage())
        source = _storage(args[0])
        if args[0].dtype != self._dtype(source):
            self._lost[_storage(made)] = self._names(args[:1])
        else:
            read, strides = StridedView.of(args[0]), tuple(made.stride())
            self._clones[_storage(made)] = _Clone(source, read, strides, made.dtype)
        return made

    def _dtype(self, storage: int) -> torch.dtype | None:
        """In which elements are known, where they are."""
        if storage in self._clones:
            return self._clones[storage].dtype
        return self._tensors[storage][1].dtype if storage in self._tensors else None

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of one of the checkpoint, of which there is no clone."""
        key = _storage(tensor)
        cloned = any(clone.source == key for clone in self._clones.values())
        if key not in self._tensors or cloned:
            return False
        return tensor.numel() == self._tensors[key][1].numel()

    def _fill(self, target: torch.Tensor, value: float) -> torch.Tensor:
        if target.numel():
            self.found.landings.append(self._landing(target, None, value))
        return target

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        names = self._names((source,))
        key = _storage(target)
        if key in self._targets:
            self._filled[key] |= names
        else:
            # A buffer of the loader's own.
            names |= self._names((target,))
            if not names:
                return target.copy_(source)
            self.give_up(names, "its loader copies it to a buffer")
            self._lost[key] = names
            self._kept.append(target.untyped_storage())
            return target
        if (filled := _storage(source)) in self._constants:
            landing = self._landing(target, None, self._constants[filled])
            self.found.landings.append(landing._replace(replaces=self._tensors[filled][0]))
            return target
        read = self._read(source.expand(target.shape))
        if read is None or target.dtype != self._targets[key][1].dtype:
            self.give_up(names or self._names((target,)), "its loader computes with it")
        elif target.numel():
            self.found.landings.append(self._landing(target, read))
        return target

    def _landing(self, target: torch.Tensor, read: BoxRead | None, value: float = 0.0) -> Landing:
        name, whole = self._targets[_storage(target)]
        view = StridedView.of(target)
        begin = view.offset - int(whole.storage_offset())
        return Landing(name, view._replace(offset=begin), read, value)

    def _read(self, source: torch.Tensor) -> BoxRead | None:
        key, view, casts = _storage(source), StridedView.of(source), list[torch.dtype]()
        if source.dtype != self._dtype(key):
            return None
        while clone := self._clones.get(key):
            through = _through(view, clone)
            if through is None:
                return None
            if clone.dtype != self._dtype(clone.source):
                casts.append(clone.dtype)
            key, view = clone.source, through
        if key not in self._tensors:
            return None
        if key in self._constants:
            return None
        name, whole = self._tensors[key]
        box, inner = _box(view, tuple(whole.shape))
        return BoxRead(name, box, inner, tuple(reversed(casts)))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found


class _Dim(NamedTuple):
    """A dimension of a memory without gaps: elements, and the strides in it and elsewhere."""

    size: int
    stride: int
    other: int


def _merged(dims: Sequence[_Dim]) -> list[_Dim]:
    """Dimensions, the widest stride first; neighbours that lie behind each other in both memories
    are one."""
    found: list[_Dim] = []
    for dim in sorted((d for d in dims if d.size > 1), key=lambda d: -d.stride):
        if found:
            last = found[-1]
            if last.stride == dim.stride * dim.size and last.other == dim.other * dim.size:
                found[-1] = _Dim(last.size * dim.size, dim.stride, dim.other)
                continue
        found.append(dim)
    return found


class _Steps(NamedTuple):
    """Where a view begins in each dimension of a memory, and the steps of its own dimensions:
    which dimension each moves along, and how far."""

    begins: list[int]
    steps: list[tuple[int, int]]
    ends: list[int]


def _steps(view: StridedView, dims: Sequence[_Dim]) -> _Steps | None:
    """``None`` if a dimension of the view runs over the edge of one of the memory's."""
    rest, begins = view.offset, []
    for dim in dims:
        begins.append(min(rest // dim.stride, dim.size - 1))
        rest -= begins[-1] * dim.stride
    if rest:
        return None
    ends, steps = list(begins), []
    for size, stride in zip(view.shape, view.strides, strict=True):
        along = next((i for i, dim in enumerate(dims) if stride and not stride % dim.stride), None)
        if size == 1 or not stride:
            steps.append((0, 0))
            continue
        if along is None:
            return None
        step = stride // dims[along].stride
        steps.append((along, step))
        ends[along] += step * (size - 1)
    if any(end >= dim.size for end, dim in zip(ends, dims, strict=True)):
        return None
    return _Steps(begins, steps, ends)


def _through(view: StridedView, clone: _Clone) -> StridedView | None:
    """A view of a clone, as a view of what was cloned."""
    source = clone.read
    dims = _merged(
        [_Dim(*d) for d in zip(source.shape, clone.strides, source.strides, strict=True)]
    )
    found = _steps(view, dims)
    if found is None:
        return None
    start = sum(begin * dim.other for begin, dim in zip(found.begins, dims, strict=True))
    strides = tuple(step * dims[along].other if step else 0 for along, step in found.steps)
    return StridedView(source.offset + start, view.shape, strides)


def _box(
    view: StridedView, shape: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], StridedView]:
    """The smallest box of a contiguous tensor that has a view's elements, and the view of it; the
    whole tensor where the view runs over edges of dimensions."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    dims = [_Dim(n, step, i) for i, (n, step) in enumerate(zip(shape, strides, strict=True))]
    dims = [dim for dim in dims if dim.size > 1]
    found = _steps(view, dims)
    whole = tuple((0, size) for size in shape)
    if found is None:
        return whole, view
    box = list(whole)
    for dim, begin, end in zip(dims, found.begins, found.ends, strict=True):
        box[dim.other] = (begin, end - begin + 1)
    lengths = [length for _, length in box]
    inner = [math.prod(lengths[i + 1 :]) for i in range(len(shape))]
    steps = tuple(step * inner[dims[at].other] if step else 0 for at, step in found.steps)
    return tuple(box), StridedView(0, view.shape, steps)
