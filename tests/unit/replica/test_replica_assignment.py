"""Assignment of rollouts to trainers: each rollout once, about evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.weights.replica.mapping import assign

TRAINERS = st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True)


@st.composite
def replicas(draw: st.DrawFn) -> list[list[int]]:
    rollouts = draw(st.permutations(range(draw(st.integers(1, 40)))))
    kinds = draw(st.lists(st.integers(0, 7), min_size=len(rollouts), max_size=len(rollouts)))
    groups: dict[int, list[int]] = {}
    for rollout, kind in zip(rollouts, kinds, strict=True):
        groups.setdefault(kind, []).append(rollout)
    return [sorted(group) for group in groups.values()]


@given(TRAINERS, replicas())
def test_every_rollout_is_filled_once_and_replicas_stay_together(
    trainers: list[int], alike: list[list[int]]
) -> None:
    dealt = assign(trainers, alike)
    assert set(dealt) == set(trainers)
    groups = [group for mine in dealt.values() for group in mine]
    assert sorted(r for group in groups for r in group) == sorted(r for g in alike for r in g)
    for group in groups:
        assert any(set(group) <= set(kind) for kind in alike)
    if len(alike) >= len(trainers):
        assert sorted(map(sorted, groups)) == sorted(alike), "only idle trainers part replicas"


@given(TRAINERS, replicas())
def test_replicas_are_loaded_as_often_by_all_and_idle_trainers_share_replicas(
    trainers: list[int], alike: list[list[int]]
) -> None:
    dealt = assign(trainers, alike)
    loads = sorted(len(groups) for groups in dealt.values())
    assert loads[-1] - loads[0] <= 1
    rollouts = sum(map(len, alike))
    assert bool(loads[0]) == (rollouts >= len(trainers)), "no trainer is idle while there is work"


def test_equal_engines_are_dealt_out_round_robin() -> None:
    # The article's example: 8 trainers of a stage, two engines of 16 ranks.
    dealt = assign(range(8), [(rank, rank + 16) for rank in range(16)])
    assert dealt[0] == [(0, 16), (8, 24)]
    assert dealt[7] == [(7, 23), (15, 31)]


def test_one_kind_of_rollouts_is_shared_by_all_trainers() -> None:
    dealt = assign(range(4), [range(32)])
    assert [len(group) for groups in dealt.values() for group in groups] == [8, 8, 8, 8]
