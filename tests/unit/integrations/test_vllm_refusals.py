"""What vLLM's model, its workers and a trainer's shards must be for a push; refused before any."""

from __future__ import annotations

import time
from math import prod
from typing import Any

import pytest
import torch

from fabric_ray.errors import FabricError, InvalidArgument, WeightSyncError
from fabric_ray.integrations.vllm_recorded import Need, target_side
from fabric_ray.plan import DType, ShapeMismatch, Tensor
from fabric_ray.weights import WeightSource
from tests.unit.integrations import vllm_fakes as fakes
from tests.unit.integrations.vllm_ranks import Trained


def test_rs_1_what_a_model_lacks_is_named_before_any_push(
    server: fakes.Server, trainer: Any
) -> None:
    module = Trained(1)
    del module.l1.lower, module.l2.upper, module.l2.lower
    with pytest.raises(FabricError, match=r"2 layers .* lack tensors .*: l1, l2; send every"):
        trainer(module)
    assert server.model.versions() == {0.0}
    sender = trainer(module, leave=("l1", "l2"))
    sender.send_weights()
    assert server.answer("prompt") == {1.0, 0.0}


def test_rs_1_a_part_that_is_filled_twice_does_not_count_for_one_that_is_not(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(named: Any) -> None:
        for name, tensor in named:
            weight = server.model.get_submodule(name.partition(".")[0]).weight
            start = 2 if name.endswith("lower") and name != "l1.lower" else 0
            weight.weight_loader(weight, tensor, start)

    monkeypatch.setattr(server.model, "load_weights", load)
    with pytest.raises(FabricError, match=r"1 layers .* lack tensors .*: l1; send every"):
        trainer(Trained(1))


def test_rs_1_a_tensor_of_which_the_loader_takes_only_a_part_is_named(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(named: Any) -> None:  # as vLLM's loaders narrow what comes
        whole((name, tensor.narrow(0, 0, 2)) for name, tensor in named)

    whole, module = server.model.load_weights, Trained(1)
    monkeypatch.setattr(server.model, "load_weights", load)
    module.l1.upper = torch.nn.Parameter(torch.ones(5, 4))
    with pytest.raises(FabricError, match=r"`l1.upper` .* takes 8 of the trainers' 20 elements"):
        trainer(module)
    assert server.model.versions() == {0.0}


def test_a_tensor_that_the_loader_refuses_without_words_is_named(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(named: Any) -> None:  # as vLLM's embeddings assert the size of the vocabulary
        for name, _ in named:
            assert name != "l1.lower"

    monkeypatch.setattr(server.model, "load_weights", load)
    with pytest.raises(FabricError, match=r"AssertionError: .* took: `l1.lower` \[2, 4\]\); give"):
        trainer(Trained(1))


@pytest.mark.parametrize(
    ("shape", "boxes", "taken"),
    [
        ((), [()], 1),
        ((6, 3), [((0, 4), (0, 3)), ((2, 4), (0, 3))], 18),
        ((6, 6), [((0, 3), (0, 6)), ((4, 2), (0, 6))], 30),
        ((6, 6), [((0, 4), (0, 4)), ((2, 4), (3, 3))], 26),
        ((6, 6), [((0, 4), (0, 4)), ((4, 2), (0, 6)), ((0, 6), (4, 2))], 36),
    ],
    ids=["scalar", "overlap", "missing row", "missing corners", "pieces"],
)
def test_rs_1_boxes_of_all_workers_cover_a_tensor(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, int], ...]], taken: int
) -> None:
    tensors, needs = (
        {"w": Tensor("w", shape, DType.of("bfloat16"))},
        [[Need("w", b)] for b in boxes],
    )
    if taken == prod(shape):
        assert len(target_side(needs, tensors).containers) == len(boxes)
        return
    with pytest.raises(ShapeMismatch, match=f"`w` .* takes {taken} of .* {prod(shape)} elements"):
        target_side(needs, tensors)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_rs_1_a_router_whose_bias_does_not_come_is_named(
    server: fakes.Server, trainer: Any, kind: str
) -> None:
    model, bias = server.model, torch.zeros(4)
    if kind == "buffer":
        model.l1.register_buffer("e_score_correction_bias", bias)
    else:
        model.l1.e_score_correction_bias = torch.nn.Parameter(bias)
    module = Trained(1)
    with pytest.raises(FabricError, match=r"1 layers .* lack tensors .*: l1; send every"):
        trainer(module)
    module.l1.register_buffer("e_score_correction_bias", torch.ones(4))
    trainer(module).send_weights()
    assert bias.tolist() == [1.0] * 4
    assert server.answer("prompt") == {1.0}


def test_rs_1_quantised_tensors_are_not_cast_into_a_model_that_is_not(
    server: fakes.Server, trainer: Any
) -> None:
    module = Trained(1)
    quantised = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
    module.l1.upper = torch.nn.Parameter(quantised, requires_grad=False)
    with pytest.raises(FabricError, match=r"`l1.upper` comes as torch.float8_e4m3fn.*scales"):
        trainer(module)


def test_rs_1_plain_tensors_are_not_cast_to_codes(server: fakes.Server, trainer: Any) -> None:
    codes = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    server.model.l1.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(FabricError, match=r"`l1.upper` comes as torch.float32 and fills"):
        trainer(Trained(1))


@pytest.mark.parametrize("is_left", [False, True], ids=["both are loaded", "one is left out"])
def test_rs_1_tensors_that_are_tied_in_the_model_are_tied_at_the_trainer(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    model, known = server.model, server.model.load_weights
    model.head = torch.nn.Linear(4, 2, bias=False)
    model.embedding = torch.nn.Linear(4, 2, bias=False)
    model.head.weight = model.embedding.weight

    def load(named: Any) -> None:
        known([(n, t) for n, t in named if not (is_left and n == "head.weight")])

    monkeypatch.setattr(model, "load_weights", load)
    module = Trained(1)
    module.embedding, module.head = torch.nn.Linear(4, 2, False), torch.nn.Linear(4, 2, False)
    with pytest.raises(InvalidArgument, match=r"`\w+.weight` and `\w+.weight` are tied in"):
        trainer(module)
    module.head.weight = module.embedding.weight
    module.turn_to(1)
    trainer(module).send_weights()
    assert server.answer("prompt") == {1.0}


def test_workers_that_are_not_there_are_missed_at_once(trainer: Any) -> None:
    with pytest.raises(WeightSyncError, match="1 of 2 workers of vLLM are ready for shards"):
        trainer(Trained(1), workers=2, timeout=0.5)


def test_rs_3_workers_that_are_not_counted_are_noticed_before_they_keep_old_weights(
    server: fakes.Server, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = server.add_worker()
    with monkeypatch.context() as late:  # what the second says comes after the first's
        late.setattr("fabric_ray.integrations.vllm_hello.Hellos.refuse_more", lambda *_, **__: None)
        sender = trainer(Trained(1))
    while not sender._sharded._hellos._messages.qsize():
        time.sleep(0.01)
    with pytest.raises(WeightSyncError, match=r"more workers .* answer than `workers` says"):
        sender.send_weights()
    assert not server.paused
    assert server.model.versions() == {0.0}
    trainer(Trained(1), workers=2).send_weights()
    assert server.model.versions() == other.versions() == {1.0}


def test_rs_1_experts_that_move_are_refused(server: fakes.Server, trainer: Any) -> None:
    server.worker.parallel_config.enable_eplb = True
    with pytest.raises(WeightSyncError, match=r"a worker refused: Unsupported: .*enable_eplb=True"):
        trainer(Trained(1))


def test_a_rank_must_be_the_one_that_its_shards_are_numbered_by(trainer: Any) -> None:
    with pytest.raises(InvalidArgument, match="rank is 1, expected 0"):
        trainer(WeightSource({"a": torch.zeros(1)}, rank=0, name="other"), rank=1)
