"""Reports that contradict each other are refused, with ranks and fields named."""

from __future__ import annotations

import msgspec
import pytest

from fabric_ray.plan import (
    DType,
    InconsistentReports,
    ParamMeta,
    Replicate,
    Shard,
    StridedShard,
    plan,
    side_from_param_meta,
)

META = ParamMeta(
    name="w",
    shape=(6, 4),
    dtype=DType.of("bfloat16"),
    mesh_ranks=(0, 1),
    mesh_shape=(2,),
    placements=(Shard(0),),
    local_shape=(3, 4),
    local_strides=(8, 2),
)


def changed(**fields) -> ParamMeta:
    return msgspec.structs.replace(META, **fields)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (changed(shape=(8, 4), local_shape=(4, 4)), ["rank 0, 1", "shape", "(6, 4)", "(8, 4)"]),
        (changed(dtype=DType.of("float32")), ["rank 0, 1", "dtype", "float32"]),
        (changed(placements=(Shard(1),), local_shape=(6, 2)), ["rank 0, 1", "placements"]),
        (changed(mesh_ranks=(0, 1, 2)), ["rank 1", "mesh_shape", "3 ranks"]),
        (changed(local_shape=(2, 4)), ["rank 1", "local_shape", "(2, 4)", "(3, 4)"]),
        (changed(mesh_ranks=(0, 7)), ["rank 1", "mesh_ranks", "isn't in the mesh"]),
        (changed(mesh_ranks=(1, 2)), ["rank 1", "mesh_ranks", "overlap"]),
        (changed(mesh_ranks=(2, 1)), ["rank 1", "mesh_ranks", "overlap"]),
        (changed(local_strides=(8,)), ["rank 1", "local_strides"]),
    ],
)
def test_contradictions_are_named(second, words):
    with pytest.raises(InconsistentReports) as caught:
        side_from_param_meta({0: [META], 1: [second]})
    for word in ["`w`", *words]:
        assert word in str(caught.value)
    assert caught.value.tensor == "w"


def test_a_silent_member_of_the_mesh_is_named():
    with pytest.raises(InconsistentReports, match=r"`w`, rank 1, .*don't report it"):
        side_from_param_meta({0: [META]})


def test_one_name_twice_on_a_rank():
    with pytest.raises(InconsistentReports, match="rank 0 reports it twice"):
        side_from_param_meta({0: [META, META], 1: [META]})


def test_replicas_on_disjoint_meshes_become_one_container():
    other = changed(mesh_ranks=(2, 3))
    side = side_from_param_meta({0: [META], 1: [META], 2: [other], 3: [other]})
    (container,) = side.containers
    assert container.layout.mesh.shape == (2, 2)
    assert container.layout.placements == (Replicate(), Shard(0))
    planned = plan(side, side)
    assert planned.balance().nbytes == 4 * 24


def test_ranks_with_other_strides_get_their_own_container():
    side = side_from_param_meta({0: [META], 1: [changed(local_strides=(16, 2))]})
    assert [(c.ranks, c.strides) for c in side.containers] == [((0,), None), ((1,), (16, 2))]
    planned = plan(side, side)
    assert planned.balance().nbytes == 48
    assert [c.nbytes for c in planned.local_containers("source", 1)] == [2 * 16 + 8]


def test_uneven_strided_shards_have_torchs_local_shapes():
    meta = changed(
        shape=(9, 4),
        mesh_ranks=(0, 1, 2, 3),
        mesh_shape=(4,),
        placements=(StridedShard(0, 2),),
    )
    # The example of torch's _StridedShard documentation.
    assert [meta.expected_local_shape(r)[0] for r in range(4)] == [3, 3, 2, 1]


def test_reports_cross_processes_as_bytes():
    data = msgspec.msgpack.encode([META])
    assert msgspec.msgpack.decode(data, type=list[ParamMeta]) == [META]


def test_order_is_that_of_the_lowest_rank():
    norm = changed(name="norm", mesh_ranks=(1,), mesh_shape=(1,), local_shape=(6, 4))
    side = side_from_param_meta({1: [norm, META], 0: [META]})
    assert [c.name for c in side.containers] == ["w", "norm"]
