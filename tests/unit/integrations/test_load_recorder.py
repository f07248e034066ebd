"""What a model's loader does with the tensors of a checkpoint, recorded without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fabric_ray.integrations.load_recorder import BoxRead, LoadRecording, record


def recording(
    load: Callable[[str, torch.Tensor], object],
    targets: dict[str, torch.Tensor],
    **tensors: torch.Tensor,
) -> LoadRecording:
    def loads(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            load(name, tensor)

    return record(loads, {name: tensor.to("meta") for name, tensor in tensors.items()}, targets)


def replayed(found: LoadRecording, tensors: dict[str, torch.Tensor], into: torch.Tensor) -> None:
    """Fills a parameter from the boxes alone, each in the middle of a memory."""

    def box(read: BoxRead) -> torch.Tensor:
        part = tensors[read.tensor][tuple(slice(at, at + size) for at, size in read.box)]
        memory = torch.full((part.numel() + 10,), torch.nan, dtype=part.dtype)
        memory[5:-5] = part.flatten()
        return memory[5:-5].view(part.shape)

    for landing in found.landings:
        landing.fill(into, box)


LOADERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "rows": lambda p, t: p.data.narrow(0, 2, 4).copy_(t.narrow(0, 4, 4)[:, :6]),
    "transposed": lambda p, t: p.data.copy_(t.t()[1:7, :6]),
    "by heads": lambda p, t: p.data.view(2, 3, 6).copy_(t[:6, 2:].view(2, 3, 6)),
    "a cloned transpose": lambda p, t: p.data.copy_(t.t().contiguous()[2:, :6]),
    "a cast on the way": lambda p, t: p.copy_(t.to(torch.bfloat16)[1:7, 1:7]),
    "views as other dtypes": lambda p, t: p.data.copy_(
        t.view(torch.int32).view(torch.float32).clone()[1:7, 1:7]
    ),
    "every other": lambda p, t: p.data[:4, :4].copy_(t[::2, 1::2]),
    "chunks": lambda p, t: p.data[:, :4].copy_(t.chunk(2, dim=1)[1][:6]),
    "broadcast": lambda p, t: p.data.copy_(t[3, :6]),
    "reshaped over rows": lambda p, t: p.data.copy_(t.reshape(-1)[10:46].view(6, 6)),
    "a clone that is reshaped": lambda p, t: p.data.copy_(
        t.t().contiguous().view(4, 2, 8)[1:, :, 2:].reshape(6, 6)
    ),
    "a constant in its place": lambda p, t: p.data.copy_(t.zero_()[1:7, :6]),
    "a constant beside it": lambda p, t: (p[:2].data.copy_(t[:2, :6]), p[2:].data.fill_(7)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_a_recorded_loader_fills_has_the_bits_that_the_loader_gives(name: str) -> None:
    load, tensor = LOADERS[name], torch.randn(8, 8)
    expected, got = torch.zeros(6, 6), torch.zeros(6, 6)
    load(expected, tensor.clone())
    target = torch.empty(6, 6, device="meta")
    found = recording(lambda _, given: load(target, given), {"p": target}, t=tensor)
    assert not found.whole
    replayed(found, {"t": tensor}, got)
    assert torch.equal(got, expected)


def test_a_worker_needs_no_more_of_a_tensor_than_its_loader_reads() -> None:
    target = torch.empty(2, 8, device="meta")
    found = recording(lambda _, t: target.copy_(t[4:6]), {"p": target}, t=torch.zeros(64, 8))
    [landing] = found.landings
    assert landing.read is not None
    assert landing.read.box == ((4, 2), (0, 8))


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda p, t: p.data.copy_(t + 1), "computes with it"),
        (lambda p, t: p.data.copy_(torch.cat([t[:1], t[1:]])), "computes with it"),
        (lambda p, t: p.data.add_(t), "runs aten.add_"),
        (lambda p, t: p.data.copy_(t) if t.max() > 0 else None, "needs its values"),
        (lambda p, t: (p.data.copy_(t), p.data.copy_(-p.data)), "computes with it"),
        (lambda p, t: torch.zeros(2, 2).copy_(t), "copies it to a buffer"),
    ],
)
def test_a_tensor_that_a_loader_computes_with_is_named_and_the_others_are_recorded(
    load: Callable[..., object], why: str
) -> None:
    targets = {name: torch.empty(2, 2, device="meta") for name in "abc"}

    def loads(name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            load(targets[name], tensor)
        else:
            targets[name].data.copy_(tensor)

    found = recording(loads, targets, **{name: torch.zeros(2, 2) for name in "abc"})
    assert list(found.whole) == ["b"]
    assert why in found.whole["b"]
    assert {each.target for each in found.landings} >= {"a", "c"}


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda p, t: (p.data.copy_(t), p.data.copy_(-p.data)), "computes with it"),
        (lambda p, t: (p.data.copy_(t), p.data.mul_(2)), "runs aten.mul_"),
        (lambda p, t: p.data.fill_(t[0, 0].item()), "needs its values"),
    ],
)
def test_rs_1_a_loader_that_takes_all_tensors_first_is_recorded_by_what_it_fills(
    load: Callable[..., object], why: str
) -> None:
    targets = {name: torch.empty(2, 2, device="meta") for name in "abc"}

    def loads(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in list(named):
            if name == "b":
                load(targets[name], tensor)
            else:
                targets[name].data.copy_(tensor)

    found = record(loads, {name: torch.zeros(2, 2, device="meta") for name in "abc"}, targets)
    assert list(found.whole) == ["b"]
    assert why in found.whole["b"]
    assert [each.target for each in found.landings if each.target != "b"] == ["a", "c"]


def test_a_loader_never_writes_to_memory_while_it_is_recorded() -> None:
    target = torch.ones(4)

    def load(_: str, tensor: torch.Tensor) -> None:
        target.data.copy_(tensor)
        target.data.fill_(3)
        target.data.mul_(tensor)

    recording(load, {"p": target}, t=torch.zeros(4))
    assert target.tolist() == [1.0] * 4


@pytest.mark.parametrize("looks_at", ["parameter", "tensor"])
def test_rs_1_a_loader_that_fills_a_further_tensor_where_there_is_memory_comes_whole(
    looks_at: str,
) -> None:
    further = torch.ones(2)
    targets: dict[str, torch.Tensor] = {
        name: torch.nn.Parameter(torch.empty(2, 2, device="meta")) for name in "ab"
    }

    def load(name: str, tensor: torch.Tensor) -> None:
        assert type(targets[name]) is torch.nn.Parameter  # some loaders ask for it
        targets[name].data.copy_(tensor)
        without = targets[name] if looks_at == "parameter" else tensor[:1]
        if name == "a" and not without.is_meta:
            further.copy_(tensor[0])

    found = recording(load, targets, a=torch.zeros(2, 2), b=torch.zeros(2, 2))
    assert list(found.whole) == ["a"]
    assert further.tolist() == [1.0, 1.0]
    assert all(p.is_meta for p in targets.values())


def test_a_tensor_that_the_model_keeps_comes_whole() -> None:
    kept = []
    found = recording(lambda _, tensor: kept.append(tensor), {}, t=torch.zeros(4))
    assert found.whole == {"t": "the model keeps it"}
