"""Whole tensors on a trainer, one after the other, in host memory."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, starmap
from typing import Any

import torch

from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Tensor
from fabric_ray.tensors import check_memory, resolved, wait_for_kernels
from fabric_ray.weights.adapters import Adapters, add, trained
from fabric_ray.weights.changes import ChangeCheck
from fabric_ray.weights.local import describe_tensor
from fabric_ray.weights.modules import Found, current, named, reshard, ties
from fabric_ray.weights.quant import Formats
from fabric_ray.weights.replica.converting import Converting, described

Gather = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Weights = torch.nn.Module | Mapping[str, torch.Tensor] | Gather
"""A module, or tensors by name, whose DTensors are gathered one by one; or a function that gathers
and returns pairs of a Hugging Face name and a whole tensor, as Megatron's exporters do."""

_AGAIN = "gather the same at every push, in the same order, or make another ReplicaSource"


class Gathering:
    """A trainer's weights, whole, in the same order at each push.

    Args:
        weights: what to gather. A tensor that a function has handed out isn't written to again.
        formats: what becomes of which tensors once they are whole.
        rank: this trainer's.
    """

    def __init__(self, weights: Weights, formats: Formats, rank: int) -> None:
        self._weights = weights
        self._formats = formats
        self._rank = rank
        self._converting = Converting((), {}, rank)
        self._whole: dict[str, Tensor] | None = None
        # Gathering is a collective: two threads that ask first gather once.
        self._lock = threading.RLock()
        self._shards: dict[str, Any] = {}
        self._adapters = Adapters()
        self._ties: dict[str, str] | None = None
        self._changes = ChangeCheck(())

    def whole(self) -> dict[str, Tensor]:
        """What will come, in order. A function that gathers is called once to find out.

        Raises:
            InvalidArgument: a name comes twice.
        """
        with self._lock:
            if self._whole is None:
                self._whole = self._announced()
            return self._whole

    def _announced(self) -> dict[str, Tensor]:
        reshard(self._weights)
        # By map, which keeps hold of no tensor while it asks for the next.
        tensors = self._gathered() if self._is_function else self._named()
        wholes = list(starmap(described, tensors))
        self._converting = Converting(wholes, self._formats, self._rank)
        whole: dict[str, Tensor] = {}
        for each in chain.from_iterable(map(self._converting.become, wholes)):
            if each.name in whole:
                raise InvalidArgument(f"`{each.name}` is gathered twice; gather it once")
            whole[each.name] = each
        return whole

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors themselves, as :meth:`whole` has announced them.

        Raises:
            InvalidArgument: something else has come.
            WeightSyncError: a named tensor was changed meanwhile.
            NotFinite: a tensor can't be given its format.
        """
        self.whole()
        tensors = iter(self._gathered())
        try:
            yield from self._as_announced(tensors)
        except Exception:
            # The other trainers gather to the end, and would wait for this one.
            with suppress(Exception):
                deque(tensors, maxlen=0)
            raise
        # The consumer has read all tensors by now.
        self._changes.check()

    def _as_announced(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        announced = iter(self.whole().values())
        for name, gathered in tensors:
            made = self._converting.convert(name, gathered)
            # The consumer keeps it as long as needed; a reference here would outlive its bucket.
            del gathered
            while made:
                found, expected = described(*made[0]), next(announced, None)
                if found != expected:
                    raise InvalidArgument(f"{_told(found)} came, not {_told(expected)}; {_AGAIN}")
                yield made.popleft()
        if missing := next(announced, None):
            raise InvalidArgument(f"`{missing.name}` did not come; {_AGAIN}")

    @property
    def _is_function(self) -> bool:
        return not isinstance(self._weights, (torch.nn.Module, Mapping))

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        assert isinstance(self._weights, (torch.nn.Module, Mapping)), "functions name nothing"
        found, merges = named(current(self._weights))
        self._adapters.see(merges)
        for name, tensor in found.items():
            local = getattr(tensor, "_local_tensor", tensor)
            check_memory(f"parameter `{name}`", local, lazy=True)
        if isinstance(self._weights, (torch.nn.Module, Found)):
            found = {name: trained(t, self._shards.get(name)) for name, t in found.items()}
            self._shards = {name: t for name, t in found.items() if _is_sharded(t)}
        tied = ties({name: t for name, t in found.items() if name not in self._adapters})
        if self._ties is not None and tied != self._ties:
            odd = sorted(tied.items() ^ self._ties.items())[0][0]
            raise InvalidArgument(f"`{odd}` is tied to another tensor than before; {_AGAIN}")
        self._ties = tied
        self._changes = ChangeCheck(chain(found.items(), self._adapters.tensors()))
        return found.items()

    def second_names(self, used: Collection[str]) -> set[str]:
        """Names of tied tensors that come under another name, which is among the used."""
        groups: dict[str, set[str]] = defaultdict(set)
        for name, first in (self._ties or {}).items():
            groups[first] |= {first, name}
        found = (names - set(used) for names in groups.values() if names & set(used))
        return set().union(*found)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._is_function:
            assert callable(self._weights)
            return map(_on_host, self._weights())
        tensors = self._named()
        # RS-1: a step in another stream may still write them.
        wait_for_kernels(tensor for _, tensor in tensors)
        return map(self._merged, tensors)

    def check(self) -> None:
        """Finds errors of this trainer alone, without a gather.

        Raises:
            InvalidArgument: a named tensor can't be gathered.
        """
        if not self._is_function:
            self._named()

    def _merged(self, one: tuple[str, Any]) -> tuple[str, torch.Tensor]:
        name, whole = _on_host(one)
        if name not in self._adapters:
            return name, whole
        return name, add(self._adapters.whole(name), whole, [[(0, size)] for size in whole.shape])


def _on_host(one: tuple[str, Any]) -> tuple[str, torch.Tensor]:
    name, tensor = one
    whole = tensor.detach().full_tensor() if _is_sharded(tensor) else tensor
    return name, resolved(f"parameter `{name}`", whole).cpu()


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _told(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"`{tensor.name}` ({describe_tensor(tensor.dtype.name, tensor.shape)})"
