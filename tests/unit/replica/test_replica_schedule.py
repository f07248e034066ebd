"""When what is loaded and sent: never before it is complete, never over what is being sent, and
within what was promised of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.replica.schedule import Schedule, schedule

Drawn = tuple[dict[str, int], dict[int, dict[str, set[str]]]]
BOUNDLESS = 1 << 30


@st.composite
def work(draw: st.DrawFn) -> Drawn:
    """Whole tensors, and engine tensors that share them; some need only a few on some rollouts."""
    names = [f"w{i}" for i in range(draw(st.integers(1, 12)))]
    sizes = {name: draw(st.integers(1, 100)) for name in names}
    some = st.sets(st.sampled_from(names), min_size=1, max_size=4)
    needs = {
        rank: {f"e{i}": draw(some) for i in range(draw(st.integers(1, 5)))}
        for rank in range(draw(st.integers(1, 3)))
    }
    return sizes, needs


def bound(sizes: dict[str, int]) -> st.SearchStrategy[int]:
    return st.integers(max(sizes.values()), sum(sizes.values()))


@given(work(), st.data())
def test_every_engine_tensor_is_sent_once_to_every_rollout_when_all_of_it_is_there(
    drawn: Drawn, data: st.DataObject
) -> None:
    sizes, needs = drawn
    plan = schedule(sizes, needs, bucket=data.draw(bound(sizes)), cache=BOUNDLESS)
    here: set[str] = set()
    sent = []
    for bucket in plan.buckets:
        here |= set(bucket.arrive)
        for load in bucket.loads:
            assert set(load.tensors) <= here
            for name in load.complete:
                assert needs[load.rank][name] <= set(load.tensors)
                sent.append((load.rank, name))
        here -= set(bucket.drop)
    assert sorted(sent) == sorted((rank, name) for rank, n in needs.items() for name in n)
    assert not here
    assert [name for bucket in plan.buckets for name in bucket.arrive] == list(sizes)


@given(work(), st.data())
def test_nothing_is_loaded_where_something_may_still_be_sent_from(
    drawn: Drawn, data: st.DataObject
) -> None:
    sizes, needs = drawn
    plan = schedule(sizes, needs, bucket=data.draw(bound(sizes)), cache=BOUNDLESS)
    under_way: dict[str, int] = {}
    loads = [load for bucket in plan.buckets for load in bucket.loads]
    for number, load in enumerate(loads):
        under_way = {name: at for name, at in under_way.items() if at > load.after}
        written = {name for name, parts in needs[load.rank].items() if parts & set(load.tensors)}
        assert not written & under_way.keys()
        under_way |= dict.fromkeys(load.complete, number)


def peak(plan: Schedule, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Bytes of the largest bucket, of what waits, and of both, counted again."""
    held: set[str] = set()
    most = [0, 0, 0]
    for bucket in plan.buckets:
        held |= set(bucket.arrive)
        nbytes = [sum(sizes[n] for n in names) for names in (bucket.arrive, held)]
        held -= set(bucket.drop)
        waiting = sum(sizes[n] for n in held)
        most = [max(a, b) for a, b in zip(most, (nbytes[0], waiting, nbytes[1]), strict=True)]
    return most[0], most[1], most[2]


@given(work(), st.data())
def test_memory_is_what_was_worked_out_and_a_smaller_cache_is_refused_with_what_would_do(
    drawn: Drawn, data: st.DataObject
) -> None:
    sizes, needs = drawn
    most = data.draw(bound(sizes))
    plan = schedule(sizes, needs, bucket=most, cache=BOUNDLESS)
    assert (plan.bucket_nbytes, plan.cache_nbytes, plan.peak_nbytes) == peak(plan, sizes)
    assert plan.bucket_nbytes <= most
    assert plan.peak_nbytes <= plan.bucket_nbytes + plan.cache_nbytes
    assert schedule(sizes, needs, bucket=most, cache=plan.cache_nbytes) == plan
    if plan.cache_nbytes:
        with pytest.raises(InvalidArgument, match=f"up to {plan.cache_nbytes} bytes .* raise"):
            schedule(sizes, needs, bucket=most, cache=plan.cache_nbytes - 1)


def test_a_tensor_larger_than_a_bucket_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="`w1` takes 30 bytes, more than a bucket of 20"):
        schedule({"w0": 10, "w1": 30}, {0: {"e": {"w0", "w1"}}}, bucket=20, cache=100)


def test_only_memory_that_another_rollout_waits_for_is_waited_for() -> None:
    sizes, needs = dict.fromkeys("abcd", 1), {"x": {"a", "b"}, "y": {"c"}, "z": {"d"}}
    twice = schedule(sizes, {0: needs, 1: needs}, bucket=2, cache=0)
    assert [load.after for bucket in twice.buckets for load in bucket.loads] == [-1, 0, -1, 2]
    once = schedule(sizes, {0: needs}, bucket=2, cache=0)
    assert [load.after for bucket in once.buckets for load in bucket.loads] == [-1, -1]
