"""Tensors whose bytes aren't their values: each place that takes an address resolves or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.cache import _checked
from fabric_ray.integrations.outbox import Outbox
from fabric_ray.integrations.sglang import FabricWorker
from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_layout import _check as check_cache
from fabric_ray.kernels import moe as kernels
from fabric_ray.moe import rows
from fabric_ray.plan import Replicate
from fabric_ray.tensors import check_memory, resolved
from fabric_ray.weights import WeightSource
from fabric_ray.weights.quant import Cast
from fabric_ray.weights.replica import LayoutReplica, ReplicaSource
from fabric_ray.weights.replica.gathering import Gathering
from tests.unit.weights.test_awkward_pushes import Few, noise, side_of


class Wrapper(torch.Tensor):
    """A tensor that holds others and has no memory of its own, as quantised parameters are."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a wrapper")


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)


def coded() -> torch.Tensor:
    """Four-bit codes as bitsandbytes' `Params4bit` has them."""
    codes = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    codes.quant_state = object()  # type: ignore[attr-defined]
    return codes


def negative(tensor: torch.Tensor) -> torch.Tensor:
    lazy: torch.Tensor = torch._neg_view(tensor)
    return lazy


@pytest.fixture
def few() -> Iterator[Callable[..., Few]]:
    made = []

    def make(*args: Any, **options: Any) -> Few:
        made.append(Few(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("formats", [None, {"w": Cast("float32")}], ids=["as they are", "cast"])
@pytest.mark.parametrize("kind", ["negative", "transposed", "expanded", "imaginary"])
def test_rs_1_what_is_no_view_of_memory_arrives_by_its_values(
    few: Callable[..., Few], kind: str, formats: dict[str, Cast] | None
) -> None:
    base = noise(6, 4)
    made: Callable[[], torch.Tensor] = {
        "negative": lambda: negative(base),
        "transposed": lambda: negative(base).t().contiguous().t(),
        "expanded": lambda: base[:1].expand(6, 4),
        "imaginary": lambda: torch.complex(base.float(), base.float()).conj().imag.bfloat16(),
    }[kind]
    tensors = {"v": noise(3, 5), "w": made()}
    setup = few([tensors], side_of({"v": (3, 5), "w": (6, 4)}, 1, Replicate()), formats)
    sync = setup.controller(digest=True)
    for _ in range(2):
        sync.push()
        assert torch.equal(setup.target.weights["v"], tensors["v"])
        assert torch.equal(setup.target.weights["w"], tensors["w"].to(setup.target.weights["w"]))
        base.mul_(3)  # a lazy view follows its base: what is pushed is what it shows then
        tensors["w"] = made()


def test_a_parameter_that_becomes_lazy_is_noticed(few: Callable[..., Few]) -> None:
    tensors = {"w": noise(6, 4)}
    setup = few([tensors], side_of({"w": (6, 4)}, 1, Replicate()))
    sync = setup.controller()
    sync.push()
    tensors["w"] = negative(tensors["w"])
    with pytest.raises(Exception, match=r"`w` differs from the plan: .*computed for each push"):
        sync.push()
    sync.connect()
    sync.push()
    assert torch.equal(setup.target.weights["w"], tensors["w"])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            Wrapper(torch.ones(4, 4)),
            r"`w` of shape \[4, 4\] is a Wrapper, which wraps .*dequantize",
        ),
        (quantised(), r"`w` is quantised \(torch.qint8\).*dequantize"),
        (coded(), r"`w` is quantised \(torch.uint8\).*scales lie apart, in `quant_state`"),
        (torch.eye(4).to_sparse(), r"`w` has layout torch.sparse_coo.*to_dense"),
        (torch.zeros(4, device="meta"), "`w` is on the meta device and has no values"),
    ],
    ids=["wrapper", "quantised", "coded", "sparse", "meta"],
)
def test_a_parameter_without_values_in_memory_is_refused_by_name(
    tensor: torch.Tensor, words: str
) -> None:
    engine = TransferEngine(transport="shm")
    with pytest.raises(InvalidArgument, match=words):
        WeightSource({"v": torch.ones(2), "w": tensor}, rank=0, name="unused", engine=engine)
    with pytest.raises(InvalidArgument, match=words.replace("`w`", "the tensor")):
        engine.register(tensor)
    if not isinstance(tensor, Wrapper):
        with pytest.raises(InvalidArgument, match=words):
            list(Gathering({"w": tensor}, {}, 0))
    engine.close()


def test_a_replica_is_filled_with_values(few: Callable[..., Few]) -> None:
    tensors = {"w": noise(6, 4)}
    side = side_of({"w": (6, 4)}, 1, Replicate())
    setup = few([tensors], side)
    setup.sources[0].close()
    lazy = {"w": negative(tensors["w"])}
    engine = setup.engines["trainer 0"]
    source = ReplicaSource(lazy, LayoutReplica(side), rank=0, name="trainer 0", engine=engine)
    setup.controller().push()
    assert torch.equal(setup.target.weights["w"], lazy["w"])
    source.close()


def test_rows_and_caches_that_are_lazy_are_refused() -> None:
    lazy = negative(torch.ones(4, 8))
    cpu = torch.device("cpu")
    for call in (
        lambda: rows.check_rows("x", lazy, width=8, dtype=torch.float32, device=cpu),
        lambda: kernels._part("x", lazy),
        lambda: kernels._expect("x", lazy, "float32", (4, 8)),
        lambda: check_cache("x", negative(torch.ones(2, 2, 4, 8)), LayerGroup(4)),
        lambda: _checked(negative(torch.ones(8, dtype=torch.int8)), 0, 8),
        lambda: FabricWorker({"x": lazy}, side_of, rank=0, ranks=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=r"is a lazy negative.*resolve_neg"):
            call()
    assert rows.indices(negative(torch.ones(4, 2, dtype=torch.int64)), 2).eq(-1).all()
    assert not rows.indices(negative(torch.ones(4, 2, dtype=torch.int64)), 2).is_neg()


def test_an_outbox_sends_values(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransferEngine(transport="shm")
    outbox, added = Outbox(engine, 1 << 16), []
    monkeypatch.setattr(outbox, "_to", [object()])
    monkeypatch.setattr(outbox, "_add", lambda piece, data: added.append(data))
    lazy = negative(torch.ones(3))
    list(outbox.put("w", lazy))
    assert torch.equal(added[0].view(torch.float32), lazy)
    with pytest.raises(InvalidArgument, match="`w` is quantised"):
        list(outbox.put("w", quantised()))
    engine.close()


def test_memory_that_was_freed_and_tensors_without_elements_pass() -> None:
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    check_memory("it", freed)
    check_memory("it", torch.zeros(0, 3))
    plain = torch.ones(3)
    assert resolved("it", plain).data_ptr() == plain.data_ptr()
