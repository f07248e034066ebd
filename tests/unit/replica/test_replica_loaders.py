"""RS-1: loaders that a replica can't follow are refused by name, and no version has old bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.plan import PlanError
from fabric_ray.weights.replica import ModuleReplica, module_side
from tests.unit.families.pushes import assert_same
from tests.unit.replica.setups import Setup, closing

Load = Callable[["Pair", str, torch.Tensor], Any]


class Pair(torch.nn.Module):
    """Two parameters and a buffer, loaded by ``load``."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.register_buffer("bias", torch.zeros(6))
        self.load, self.calls = load, 0
        self.waiting: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        for name, whole in weights:
            self.calls += 1
            self.load(self, name, whole)


def copy(pair: Pair, name: str, whole: torch.Tensor) -> None:
    getattr(pair, name).data.copy_(whole)


def version(number: int) -> dict[str, torch.Tensor]:
    return {n: torch.full_like(t, number) for n, t in Pair(copy).state_dict().items()}


SIDE = module_side(Pair(copy).state_dict().items(), size=1)


@pytest.fixture
def open_setup() -> Iterator[Callable[..., Setup]]:
    yield from closing([])


@pytest.mark.parametrize("digest", [False, True])
def test_a_loader_that_gives_a_parameter_other_memory_later_is_refused_and_its_version_is_none(
    open_setup: Callable[..., Setup], digest: bool
) -> None:
    def replaces_later(pair: Pair, name: str, whole: torch.Tensor) -> None:
        if pair.calls > 6 and name == "b":
            pair.b.data = whole.clone()
        copy(pair, name, whole)

    weights = version(1)
    pair = Pair(replaces_later)
    setup = open_setup(
        [(1, weights)], SIDE, replica=lambda: ModuleReplica(pair, SIDE), digest=digest
    )
    setup.sync.push()
    assert pair.calls == 6, "watched once, loaded once"
    weights.update(version(2))
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="`b` has other memory since load_weights"):
            setup.sync.push()
        assert_same(setup.targets[0].weights, version(1))
    assert setup.targets[0].version == 1


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.uint8, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.int8),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [False, True])
def test_rs_1_a_loader_that_casts_quantised_tensors_without_their_scales_is_refused(
    open_setup: Callable[..., Setup], stored: torch.dtype, held: torch.dtype, first: bool
) -> None:
    def casts(pair: Pair, name: str, whole: torch.Tensor) -> None:
        copy(pair, name, whole.to(getattr(pair, name).dtype) if first else whole)

    def pair() -> Pair:
        made = Pair(casts)
        made.b = torch.nn.Parameter(torch.zeros(4, 6).to(held), requires_grad=False)
        return made

    side = module_side(pair().state_dict().items(), size=1)
    weights = version(1) | {"b": torch.ones(4, 6).to(stored)}
    setup = open_setup([(1, weights)], side, replica=lambda: ModuleReplica(pair(), side))
    with pytest.raises(WeightSyncError, match=f"casts `b` from {stored} to {held}.*scales"):
        setup.sync.push()


def test_a_loader_may_cast_plain_floats(open_setup: Callable[..., Setup]) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in version(3).items()}
    setup = open_setup([(1, weights)], SIDE, replica=lambda: ModuleReplica(Pair(copy), SIDE))
    setup.sync.push()
    assert_same(setup.targets[0].weights, version(3))


def first_half_twice(pair: Pair, name: str, whole: torch.Tensor) -> None:
    for _ in range(2):
        getattr(pair, name).data[:2].copy_(whole[:2])


def by_index(pair: Pair, name: str, whole: torch.Tensor) -> None:
    getattr(pair, name).data[torch.tensor([0, 1])] = whole[:2]


def half_on_a_thread(pair: Pair, name: str, whole: torch.Tensor) -> None:
    data = getattr(pair, name).data
    data[:2].copy_(whole[:2])
    with ThreadPoolExecutor() as pool:
        pool.submit(data[2:].copy_, whole[2:]).result()


def on_a_thread(pair: Pair, name: str, whole: torch.Tensor) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(copy, pair, name, whole).result()


def replaces(pair: Pair, name: str, whole: torch.Tensor) -> None:
    getattr(pair, name).data = whole.clone()


def keeps(make: Callable[[torch.Tensor], torch.Tensor]) -> Load:
    """Keeps what is made of ``a`` until ``b`` has come."""

    def load(pair: Pair, name: str, whole: torch.Tensor) -> None:
        pair.waiting[name] = make(whole)
        if name == "bias":
            copy(pair, name, pair.waiting.pop(name))
        elif name == "b":
            for each in "ab":
                copy(pair, each, pair.waiting.pop(each, whole))

    return load


REFUSED = {
    "half twice": (first_half_twice, "`a` of rollout 0 has 24 elements, and a fill only 12"),
    "by index": (by_index, "`a` of rollout 0 has 24 elements, and a fill only 0"),
    "half on a thread": (half_on_a_thread, "fill only 12 by copies on the thread that calls"),
    "on a thread": (on_a_thread, "wrote nothing when `a` was loaded .* does its loader use thr"),
    "replaces": (replaces, "`a` has other memory since load_weights was called"),
    "keeps": (keeps(lambda whole: whole), "keeps `a` after load_weights"),
    "keeps a view": (keeps(lambda whole: whole[:2].detach()), "keeps `a` after load_weights"),
    "keeps a copy": (keeps(lambda whole: whole.double()), "keeps `a` after load_weights"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_loader_that_cannot_be_followed_is_refused_by_name_before_anything_is_sent(
    open_setup: Callable[..., Setup], how: str
) -> None:
    load, words = REFUSED[how]
    setup = open_setup([(1, version(1))], SIDE, replica=lambda: ModuleReplica(Pair(load), SIDE))
    with pytest.raises((WeightSyncError, InvalidArgument, PlanError), match=words):
        setup.sync.push()
    assert setup.targets[0].version is None


def in_pieces(pair: Pair, name: str, whole: torch.Tensor) -> None:
    """Columns, rows that overlap, bytes: whatever fills all of it."""
    data = getattr(pair, name).data
    data.view(torch.uint8)[..., ::2].copy_(whole.contiguous().view(torch.uint8)[..., ::2])
    data.view(torch.uint8)[..., 1::2].copy_(whole.contiguous().view(torch.uint8)[..., 1::2])
    data[:3].copy_(whole.float()[:3])


def test_a_loader_may_fill_a_parameter_in_pieces_of_any_kind(
    open_setup: Callable[..., Setup],
) -> None:
    replica = ModuleReplica(Pair(in_pieces), SIDE)
    setup = open_setup([(1, version(3))], SIDE, replica=lambda: replica)
    setup.sync.push()
    assert_same(setup.targets[0].weights, version(3))


def test_a_module_s_persistent_buffers_are_gathered_with_its_parameters(
    open_setup: Callable[..., Setup],
) -> None:
    trained = Pair(copy)
    trained.load_state_dict(version(5))
    trained.register_buffer("scratch", torch.zeros(2), persistent=False)
    setup = open_setup([(1, trained)], SIDE, replica=lambda: ModuleReplica(Pair(copy), SIDE))
    setup.sync.push()
    assert_same(setup.targets[0].weights, version(5))
