"""Pipelines at either end: each layer comes from the stage that has it, or the load fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch

from fabric_ray.errors import DecodeError
from fabric_ray.integrations.vllm_kv_fetch import Fetcher
from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_layout import Shards, worker_cache
from fabric_ray.integrations.vllm_kv_offer import check_stages, instance
from fabric_ray.integrations.vllm_kv_plan import Load, Ready, digest
from fabric_ray.integrations.vllm_kv_send import Sender
from fabric_ray.kvcache import Decoder, Prefiller
from fabric_ray.kvcache.errors import LayoutMismatch
from tests.kv_pages import rows
from tests.processes import within
from tests.unit.integrations.test_vllm_kv_send import PROMPT, TERMS, TOKENS, at_once, end

READY = Ready("r", "t", digest(PROMPT), len(PROMPT), 0, ((4, 5),))


class Stage:
    """A stage of a prefiller's pipeline; each of its layers has its number in its pages."""

    def __init__(self, stack: ExitStack, layers: Sequence[int] | None) -> None:
        self.tensors, rank, cache = end(stack, f"p{layers}", layers)
        for name, pages in self.tensors.items():
            pages.fill_(10 + int(name.split(".")[2]))
        self.sender = Sender(Prefiller([rank], terms=TERMS), cache, then=at_once, lease=30.0)
        stack.callback(self.sender.close)

    def compute(self) -> None:
        self.sender.begin([READY])
        self.sender.end()
        self.sender.hold("r", "t")


class Target:
    """A decoder, or a stage of its pipeline."""

    def __init__(self, stack: ExitStack, layers: Sequence[int] | None, ranks: int = 1) -> None:
        self.tensors, rank, self.cache = end(stack, f"d{layers}", layers)
        decoder = stack.enter_context(Decoder([rank], terms=TERMS))
        self.fetcher = Fetcher(decoder, self.cache, ranks=ranks, block_tokens=TOKENS, timeout=20.0)

    def start(self, offer: str) -> None:
        self.fetcher.start([Load("x", "t", digest(PROMPT), offer, len(PROMPT), 0, ((1, 0),))])

    def ends(self) -> None:
        within(10, "the load's end", lambda: "x" in self.fetcher.received())

    def is_right(self) -> bool:
        """Whether the pages of the load, and no others, have their layer's number."""
        for name, pages in self.tensors.items():
            wanted = torch.zeros_like(pages)
            wanted[:2] = 10 + int(name.split(".")[2])
            if not torch.equal(pages, wanted):
                return False
        return True


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def offer_of(stages: Sequence[Stage]) -> str:
    return instance({(i, 0): stage.sender.offer() for i, stage in enumerate(stages)})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([[0], [1, 2]], [None]),
        ([None], [[0, 1], [2]]),
        ([[0], [1, 2]], [[0, 1], [2]]),
        ([[0], [1], [2]], [[0, 1], [2]]),
    ],
)
def test_each_stage_sends_its_layers_and_lets_go_when_all_ranks_have_them(
    stack: ExitStack, ours: list[list[int] | None], theirs: list[list[int] | None]
) -> None:
    stages = [Stage(stack, layers) for layers in ours]
    targets = [Target(stack, layers, len(theirs)) for layers in theirs]
    for target in targets:
        target.start(offer_of(stages))
    for stage in stages:
        stage.compute()
    for target in targets:
        target.ends()
        assert not target.fetcher.invalid()
        assert target.is_right()
    for stage in stages:
        within(10, "the blocks", lambda stage=stage: "r" in stage.sender.sent())


def test_mr_1_a_load_that_one_stage_fails_ends_when_no_stage_writes_any_more(
    stack: ExitStack,
) -> None:
    first, last = Stage(stack, [0]), Stage(stack, [1, 2])
    target = Target(stack, None)
    target.start(offer_of([first, last]))
    last.sender.give_up("r", "t", "its model failed", held=False)
    # The first stage has its pages yet to compute, and is told that no load waits for them.
    target.ends()
    assert target.fetcher.invalid() == {0, 1}
    first.compute()
    within(10, "the blocks", lambda: "r" in first.sender.sent())
    assert not any(pages.any() for pages in target.tensors.values())


def test_stages_that_were_not_asked_before_a_load_ended_do_not_hold_its_pages(
    stack: ExitStack,
) -> None:
    """The decoder has yet to be welcomed there."""
    stages = Stage(stack, [0]), Stage(stack, [1, 2])
    target = Target(stack, None)
    target.start(offer_of(stages))
    target.fetcher.cancel(["x"])
    target.ends()
    for stage in stages:
        stage.compute()
        within(10, "the blocks", lambda stage=stage: "r" in stage.sender.sent())
    assert not any(pages.any() for pages in target.tensors.values())


@pytest.mark.parametrize("layers", [[None], [[0], [1, 2]]])
def test_stages_do_not_hold_the_pages_of_a_load_that_is_refused_before_it_is_sent(
    stack: ExitStack, layers: list[list[int] | None]
) -> None:
    stages = [Stage(stack, of_stage) for of_stage in layers]
    target = Target(stack, None)
    load = Load("x", "t", digest(PROMPT), offer_of(stages), len(PROMPT), 1, ((1, 0),))
    target.fetcher.start([load])
    target.ends()
    assert target.fetcher.invalid() == {0, 1}
    for stage in stages:
        stage.compute()
        within(10, "the blocks", lambda stage=stage: "r" in stage.sender.sent())


def test_a_prefiller_is_asked_again_after_one_of_its_stages_was_lost(stack: ExitStack) -> None:
    first, last = Stage(stack, [0]), Stage(stack, [1, 2])
    target = Target(stack, None)
    target.start(offer_of([first, last]))
    last.sender.close()
    target.ends()
    assert target.fetcher.invalid() == {0, 1}
    again = Stage(stack, [1, 2])
    target.start(offer_of([first, again]))
    first.compute()
    again.compute()
    target.ends()
    assert not target.fetcher.invalid()
    assert target.is_right()


@pytest.mark.parametrize(
    ("ours", "why"),
    [([[0], [1]], "none offers layer 2"), ([[0, 1], [1, 2]], "2 offers layer 1")],
)
def test_rs_1_layers_that_no_stage_has_or_two_have_are_refused(
    stack: ExitStack, ours: list[list[int]], why: str
) -> None:
    stages = [Stage(stack, layers) for layers in ours]
    target = Target(stack, None)
    offers = [stage.sender.offer() for stage in stages]
    with pytest.raises(LayoutMismatch, match=f"{why} of group model.layers"):
        check_stages(offers, target.cache.layouts[0])
    target.start(offer_of(stages))
    target.ends()
    assert target.fetcher.invalid() == {0, 1}
    with pytest.raises(DecodeError, match="no layouts"):
        check_stages([offers[0][:4] + b"\x81\xa4ends\x90"], target.cache.layouts[0])


def test_rs_1_a_layer_is_called_the_same_whatever_other_layers_its_stage_has() -> None:
    """LongCat's layers have two caches each, so that one number doesn't tell them apart."""

    def called(layers: Sequence[int]) -> dict[str, tuple[str, int]]:
        tensors = {
            f"model.layers.{i}.self_attn.{j}.attn": torch.zeros(5, 4, 8, 6)
            for i in layers
            for j in (0, 1)
        }
        cache = worker_cache(
            tensors,
            groups=[LayerGroup(8, tuple(tensors))],
            shards=Shards(ranks=1, rank=0, shards=1, is_stage=True),
            model="m",
            form=rows,
        )
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        return {
            names[cache.buffers[place.buffer].data_ptr()]: (group.name, layer)
            for group in cache.layouts[0].groups
            for layer, place in zip(group.layers, group.tensors[0].places, strict=True)
        }

    whole = called(range(4))
    assert len(set(whole.values())) == len(whole) == 8
    for layers in ([0], [1, 2], [3], [0, 1], [2, 3], [10, 2]):
        stage = called(layers)
        assert {name: whole.get(name, stage[name]) for name in stage} == stage
