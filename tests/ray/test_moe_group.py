"""Ranks as Ray actors: the same model, even if ranks die, stall or are replaced."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch

from fabric_ray import errors
from fabric_ray.demo.moe_model import Reader, exchange_sizes, model, rank_model
from fabric_ray.moe.group import ExpertGroup, Forward
from fabric_ray.moe.rank_calls import ranks_to_evict

CONFIG = model(3)
WHOLE = Reader(CONFIG, 5)
BUILD = partial(rank_model, CONFIG, 5)
OPTIONS: dict[str, Any] = {"exchange": exchange_sizes(CONFIG), "cpus_per_rank": 0.1, "ranks": 3}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(64) for _ in range(draw.randint(1, 16))] for _ in range(count)]


def check(found: Forward, asked: list[list[int]]) -> None:
    """Every bit is that of the model in one place, without the experts that were left out."""
    for one, sequence in zip(found.outputs, asked, strict=True):
        assert torch.equal(one, WHOLE(sequence, found.left_out))


@pytest.fixture(scope="module")
def group(cluster: list[str]) -> Iterator[ExpertGroup]:
    """Whole as every test begins, and as it ends."""
    with ExpertGroup(BUILD, timeout=30.0, ranks_per_node=2, **OPTIONS) as group:
        yield group


@pytest.fixture(autouse=True)
def whole_again(group: ExpertGroup) -> Iterator[None]:
    yield
    while group.lost:
        group.join()


def test_logits_are_those_of_one_place(group: ExpertGroup) -> None:
    for count in (0, 1, 7):
        asked = prompts(count, seed=count)
        found = group.forward(asked)
        assert found.left_out == found.lost == ()
        check(found, asked)


def test_each_rank_is_an_actor_with_an_engine_of_its_own(group: ExpertGroup) -> None:
    for what in ("actor_id", "incarnation", "pid"):
        assert len({getattr(m, what) for m in group.members}) == 3
    # Two share a placement group.
    assert group.members[0].node_id == group.members[1].node_id
    for m in group.members:
        assert m.incarnation in group.explain()
    assert "bytes in all" in group.explain()


def test_rs_4_who_dies_is_named_and_the_others_go_on(group: ExpertGroup) -> None:
    asked = prompts(6, seed=3)
    victim = group.members[1]
    os.kill(victim.pid, signal.SIGKILL)
    found = group.forward(asked)
    assert found.left_out == (4, 5, 6, 7) == group.left_out
    assert [one.member for one in found.lost] == [victim]
    check(found, asked)
    check(group.forward(asked), asked)
    member = group.join()
    assert member.rank == 1
    assert member.incarnation != victim.incarnation
    assert group.left_out == ()
    check(group.forward(asked), asked)


@pytest.mark.long
def test_a_death_in_the_middle_mixes_no_experts(group: ExpertGroup) -> None:
    asked = prompts(60, seed=4)
    pid = group.members[2].pid
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    check(group.forward(asked), asked)
    timer.join()
    while not group.lost:  # the kill came after the last input
        check(group.forward(asked), asked)
    check(group.forward(asked), asked)


@pytest.mark.long
def test_two_may_die_and_come_again(group: ExpertGroup) -> None:
    asked = prompts(4, seed=6)
    for m in group.members[1:]:
        os.kill(m.pid, signal.SIGKILL)
    found = group.forward(asked)
    assert found.left_out == tuple(range(4, 12))
    check(found, asked)
    group.join(2)
    assert group.left_out == (4, 5, 6, 7)
    check(group.forward(asked), asked)
    group.join()
    check(group.forward(asked), asked)


@pytest.mark.long
def test_a_masked_rank_is_left_out_until_it_is_replaced(group: ExpertGroup) -> None:
    asked = prompts(4, seed=7)
    pid = group.members[0].pid
    group.mask(0, "its host is drained")
    assert [one.cause for one in group.lost] == ["its host is drained"]
    found = group.forward(asked)
    assert found.left_out == (0, 1, 2, 3)
    assert found.lost == ()
    check(found, asked)
    with pytest.raises(errors.InvalidArgument, match="not here"):
        group.mask(0)
    with pytest.raises(errors.InvalidArgument, match="was not given up"):
        group.join(1)
    assert group.join(0).pid != pid
    with pytest.raises(errors.InvalidArgument, match="none were"):
        group.join()
    check(group.forward(asked), asked)


@pytest.mark.long
def test_a_death_between_calls_is_found_as_another_joins(group: ExpertGroup) -> None:
    asked = prompts(4, seed=8)
    os.kill(group.members[2].pid, signal.SIGKILL)
    assert group.join().rank == 2
    check(group.forward(asked), asked)


@pytest.mark.long
def test_who_stalls_is_named_by_the_others(cluster: list[str]) -> None:
    asked = prompts(4, seed=9)
    with ExpertGroup(BUILD, timeout=10.0, **OPTIONS) as group:
        check(group.forward(asked), asked)
        victim = group.members[1]
        os.kill(victim.pid, signal.SIGSTOP)
        found = group.forward(asked)
        check(found, asked)
        assert victim in [one.member for one in found.lost]
        assert all(one.named_by for one in found.lost if one.member == victim)


def test_what_can_not_be_is_refused_before_anything_is_started(group: ExpertGroup) -> None:
    for options, words in [
        ({"ranks": 5}, "12 experts on 5 ranks"),
        ({"ranks": 0}, "ranks is 0"),
        ({"cpus_per_rank": 0}, "more than 0 CPUs"),
        ({"gpus_per_rank": -1}, "0 GPUs for none"),
        ({"timeout": 0}, "more than 0"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=words):
            ExpertGroup(BUILD, **{**OPTIONS, **options})  # type: ignore[arg-type]
    check(group.forward(prompts(2)), prompts(2))


@pytest.mark.long
def test_a_closed_group_leaves_no_actor_and_no_place(cluster: list[str]) -> None:
    group = ExpertGroup(BUILD, **{**OPTIONS, "ranks": 1})
    pid = group.members[0].pid
    [place] = [p.id.hex() for p in group._places]
    group.close()
    group.close()
    with pytest.raises(errors.InvalidArgument, match="was closed"):
        group.forward([[0]])

    def gone() -> bool:
        state = ray.util.placement_group_table()[place]["state"]
        return not os.path.exists(f"/proc/{pid}") and state == "REMOVED"

    deadline = time.monotonic() + 60
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gone()


def test_a_place_that_no_node_has_is_said(cluster: list[str]) -> None:
    for lacking, word in ({"cpus_per_rank": 1000}, "CPU"), ({"gpus_per_rank": 1}, "GPU"):
        with pytest.raises(errors.FabricError, match=rf"{word}.*lower ranks_per_node"):
            ExpertGroup(BUILD, **{**OPTIONS, **lacking}, start_timeout=1.0)


def test_no_remaining_rank_has_given_up_another_remaining_rank() -> None:
    assert ranks_to_evict({0: [], 1: []}) == set()
    assert ranks_to_evict({0: [2], 1: [2], 2: [0, 1]}) == {2}
    assert ranks_to_evict({0: [1], 1: [0]}) == {1}
    assert ranks_to_evict({0: [3], 1: [0]}) == {0}, "3 is dead already"
    draw = random.Random(0)
    for _ in range(300):
        ranks = range(draw.randint(1, 6))
        named = {r: {b for b in ranks if b != r and draw.random() < 0.3} for r in ranks}
        out = ranks_to_evict(named)
        left = set(ranks) - out
        assert all(not named[r] & left for r in left)
        assert left
