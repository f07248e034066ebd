"""The face of a plan: figures, words, bytes and refusals."""

from __future__ import annotations

import ast
import itertools
import json
import pickle

import msgspec
import numpy as np
import pytest

from fabric_ray.errors import FabricError, InvalidArgument
from fabric_ray.plan import (
    BufferMismatch,
    Concat,
    Container,
    DType,
    DtypeMismatch,
    ExtraTensors,
    InvalidLayout,
    Leaf,
    Mesh,
    MissingTensors,
    OverlappingElements,
    Pad,
    Plan,
    PlanDecodeError,
    PlanError,
    PlanTooLarge,
    Replicate,
    ShapeMismatch,
    Shard,
    Side,
    Stack,
    Tensor,
    Uncovered,
    UnknownRank,
    apply,
    plan,
)
from fabric_ray.plan.replicas import first_replicas

BF16 = DType.of("bfloat16")
W = Tensor("w", (8, 4), BF16)
B = Tensor("b", (8,), BF16)


def whole(tensor: Tensor, *, ranks: tuple[int, ...] = (0,), **fields) -> Container:
    leaf = Leaf(tensor, Mesh.line(ranks), (Replicate(),))
    return Container(tensor.name, tensor.dtype, leaf, **fields)


def sharded(tensor: Tensor, over: tuple[int, ...], **fields) -> Container:
    return Container(
        tensor.name, tensor.dtype, Leaf(tensor, Mesh.line(over), (Shard(0),)), **fields
    )


SOURCE = Side.of(4, [sharded(W, (0, 1, 2, 3)), sharded(B, (2, 3))])
TARGET = Side.of([10, 11], [whole(W, ranks=(10, 11)), whole(B, ranks=(11,))])


@pytest.fixture
def planned() -> Plan:
    return plan(SOURCE, TARGET)


def test_links_pages_and_balance_add_up(planned):
    assert {(x.src, x.dst): x.nbytes for x in planned.links()} == {
        **{(src, dst): 16 for src in range(4) for dst in (10, 11)},
        (2, 11): 24,
        (3, 11): 24,
    }
    assert planned.bytes_on_link(2, 11) == 24
    assert planned.bytes_on_link(2, 99) == 0
    assert planned.expected_pages(10) == 4
    assert planned.expected_pages(11) == 6
    balance = planned.balance()
    assert balance.sent == {0: 32, 1: 32, 2: 40, 3: 40}
    assert balance.received == {10: 64, 11: 80}
    assert balance.sender_imbalance == pytest.approx(40 / 36)


def test_copies_are_columns_and_values(planned):
    copies = planned.for_source(2)
    assert len(copies) == 3
    assert copies.run.tolist() == [16, 16, 8]
    assert [copy.nbytes for copy in copies] == [16, 16, 8]
    assert [c.dst_container for c in copies] == [0, 0, 1]
    received = planned.for_target(11)
    assert sum(copy.pages for copy in received) == planned.expected_pages(11)
    assert {copy.peer for copy in received} == {0, 1, 2, 3}


def test_rows_are_the_runs_of_a_copy_in_whatever_grouping():
    shape = (3, 8, 5, 4)
    cube = Tensor("c", shape, BF16)
    halves = Container("c", BF16, Leaf(cube, Mesh.line(range(2)), (Shard(1),)))
    columns = Container("c", BF16, Leaf(cube, Mesh.line(range(4)), (Shard(3),)))
    routes = plan(Side.of(2, [halves]), Side.of(4, [columns]))
    copies = list(routes.for_source(1))
    assert max(len(copy.loops) for copy in copies) > 1
    for copy in copies:
        spans = [range(loop.count) for loop in copy.loops]
        runs = {
            (
                copy.src_offset
                + sum(i * x.src_stride for i, x in zip(at, copy.loops, strict=True)),
                copy.dst_offset
                + sum(i * x.dst_stride for i, x in zip(at, copy.loops, strict=True)),
            )
            for at in itertools.product(*spans)
        }
        rows = list(copy.rows())
        assert {row.nbytes for row in rows} == {copy.run}
        assert sum(row.runs for row in rows) == copy.pages == len(runs)
        assert runs == {
            (row.src_offset + i * row.src_stride, row.dst_offset + i * row.dst_stride)
            for row in rows
            for i in range(row.runs)
        }


def test_a_rank_learns_which_buffers_to_bring(planned):
    assert [(c.name, c.shape, c.nbytes) for c in planned.local_containers("source", 3)] == [
        ("w", (2, 4), 16),
        ("b", (4,), 8),
    ]
    assert [c.name for c in planned.local_containers("source", 0)] == ["w"]


def test_a_plan_survives_bytes_pickle_and_comparison(planned):
    assert Plan.from_bytes(planned.to_bytes()) == planned
    assert pickle.loads(pickle.dumps(planned)) == planned
    assert hash(Plan.from_bytes(planned.to_bytes())) == hash(planned)
    assert planned != plan(SOURCE, SOURCE)
    assert planned != "a plan"


def test_a_plan_is_json(planned):
    told = json.loads(json.dumps(planned.to_dict()))
    assert told["digest"] == f"{planned.digest():016x}"
    assert told["target"]["ranks"] == [10, 11]
    assert len(told["copies"]["2"]) == 3
    assert "copies" not in planned.to_dict(copies=False)


def test_an_explanation_names_the_sender_of_each_box(planned):
    assert "rank 2 container `b`: [0:4], the only holder" in planned.explain("b")
    assert "`b`" not in planned.explain(rank=10).split("mean")[1]
    with pytest.raises(PlanError, match="`nothing`"):
        planned.explain("nothing")
    replicas = plan(Side.of(3, [whole(W, ranks=(0, 1, 2))]), Side.of(1, [whole(W)]))
    assert "chosen among 3 holders [0, 1, 2]" in replicas.explain("w", rank=0)


def test_garbage_is_no_plan(planned):
    data = planned.to_bytes()
    for damaged in (b"", b"\x00" * 100, data[:-1], data + b"\x00", data[:-5] + b"x" + data[-4:]):
        with pytest.raises(PlanDecodeError, match="plan bytes"):
            Plan.from_bytes(damaged)


def refusals():
    none = Tensor("none", (8,), BF16)
    huge = Tensor("huge", (1 << 63, 1 << 63), BF16)
    narrow = Tensor("w", (8, 4), DType.of("float8_e4m3fn"))
    small = Tensor("w", (4, 4), BF16)
    hole = sharded(W, (0, 1), ranks=(0,))
    both = [sharded(W, (0, 1)), sharded(B, (0, 1))]
    return [
        (MissingTensors, both, [whole(W), whole(B), whole(none)], "none"),
        (ExtraTensors, both, [whole(W)], "b"),
        (DtypeMismatch, [whole(W)], [whole(narrow)], None),
        (ShapeMismatch, [whole(W)], [whole(small)], None),
        (Uncovered, [hole], [whole(W)], "w"),
        (OverlappingElements, [whole(W)], [whole(W, strides=(2, 2))], None),
        (PlanTooLarge, [whole(huge)], [whole(huge)], None),
        (InvalidLayout, [whole(W), whole(W)], [whole(W)], None),
        (InvalidLayout, [whole(W, ranks=(0, 5))], [whole(W)], None),
        (InvalidLayout, [whole(W)], [Container("x", BF16, Stack(()))], None),
    ]


@pytest.mark.parametrize(("kind", "source", "target", "tensor"), refusals())
def test_each_refusal_has_its_class(kind, source, target, tensor):
    with pytest.raises(kind) as caught:
        plan(Side.of(2, source), Side.of(1, target))
    assert isinstance(caught.value, FabricError)
    assert caught.value.tensor == tensor
    assert str(caught.value)[0].islower()


def test_tensors_that_are_named_may_stay_behind():
    only_w = Side.of(1, [whole(W)])
    assert plan(SOURCE, only_w, leave=("b",)).balance().nbytes == 64
    assert plan(SOURCE, only_w, leave=["[a-c]"]).balance().nbytes == 64
    for leave, words in [
        (("b", "c"), "leave='c' names none of the source's 2 tensors"),
        (("*",), "leave='[*]' names `w`, which the target needs; narrow"),
        ("b", "leave is 'b', expected a tuple of patterns"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            plan(SOURCE, only_w, leave=leave)


@pytest.mark.parametrize(
    ("stale", "words"),
    [
        ("model.layers.0.q_proj.lora_A.default.weight", "give WeightSource the PEFT module itself"),
        ("mtp.0.weight", r"add containers for draft \(MTP\) layers"),
        ("model.layers.9.q_proj.weight", r"add containers for draft \(MTP\) layers"),
        ("model.layers.0.odd", "add containers for them"),
    ],
)
def test_the_error_says_what_would_be_stale_and_what_to_do(stale, words):
    needed = Tensor("model.layers.0.q_proj.weight", (8, 4), BF16)
    others = [Tensor(f"{stale}{i}", (4,), BF16) for i in ("", 1, 2, 3)]
    source = Side.of(1, [whole(tensor) for tensor in (needed, *others)])
    with pytest.raises(ExtraTensors, match=words) as caught:
        plan(source, Side.of(1, [whole(needed)]))
    said = str(caught.value)
    assert f"needs `{stale}`, `{stale}1`, `{stale}2` and 1 more of the source" in said
    assert "would never reach the target" in said
    assert plan(source, Side.of(1, [whole(needed)]), leave=advised_leave(said)).ranks("source")
    with pytest.raises(ExtraTensors, match="1` of the source"):
        plan(source, Side.of(1, [whole(needed)]), leave=(stale, f"{stale}[23]"))


def advised_leave(said: str) -> tuple[str, ...]:
    return ast.literal_eval(said.rpartition("leave=")[2])


@pytest.mark.parametrize(
    ("stale", "leave"),
    [
        (["draft.w", "draft.b", "odd"], ("draft.*", "odd")),
        (["a.x", "a.y", "a.needed.z[0]"], ("a.x", "a.y", "a.needed.z[[]0]")),
        (["head"], ("head",)),
        ([f"a.needed.{i}.odd.{j}" for i in range(9) for j in "xy"], ("a.needed.*.*",)),
        ([f"b.{i}.odd.{j}" for i in range(9) for j in "xy"], ("b.*.odd.*",)),
    ],
)
def test_the_advice_leaves_all_extra_tensors_and_no_other(stale, leave):
    needed = [Tensor(name, (4,), BF16) for name in ("a.needed.w", "b.0.w")]
    tensors = [*needed, *(Tensor(name, (4,), BF16) for name in stale)]
    source, target = Side.of(1, map(whole, tensors)), Side.of(1, map(whole, needed))
    with pytest.raises(ExtraTensors) as caught:
        plan(source, target)
    assert advised_leave(str(caught.value)) == leave
    plan(source, target, leave=leave)


def test_unknown_ranks_are_named(planned):
    for ask in (planned.for_source, planned.for_target, planned.expected_pages):
        with pytest.raises(UnknownRank, match="rank 77") as caught:
            ask(77)
        assert caught.value.rank == 77


def test_unknown_dtypes_need_a_size():
    with pytest.raises(ValueError, match="float6"):
        DType.of("float6")


def test_a_number_of_ranks_stands_for_their_ids():
    assert Mesh.line(2) == Mesh.line(range(2)) == Mesh.line([np.int64(0), 1])
    assert Side.of(1, []) == Side.of([0], [])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh.line(object), "ranks of Mesh.line is type .*, expected a number of ranks or"),
        (lambda: Mesh.line("01"), "ranks of Mesh.line is str '01', .*; give 1 for one rank"),
        (lambda: Side.of(1.5, []), "ranks of Side.of is float 1.5, expected a number of ranks"),
        (lambda: Mesh((0,), 1), r"shape of Mesh is int, expected a tuple; .* Mesh.line\(ranks\)"),
    ],
)
def test_what_stands_for_no_ranks_is_refused_where_it_is_given(make, words):
    with pytest.raises(InvalidLayout, match=words):
        make()


def test_negative_numbers_in_a_layout_are_refused():
    with pytest.raises(InvalidLayout, match="source side"):
        plan(Side.of(1, [whole(Tensor("w", (-8, 4), BF16))]), TARGET)


@pytest.mark.parametrize("rank", [-1, 1 << 32, 1 << 64, -1 << 70])
def test_ranks_that_do_not_fit_are_refused_by_the_call(planned, rank):
    for ask in (
        planned.for_source,
        planned.for_target,
        planned.expected_pages,
        planned.sending_order,
        lambda r: planned.bytes_on_link(r, 10),
        lambda r: planned.bytes_on_link(0, r),
        lambda r: planned.local_containers("source", r),
        lambda r: planned.explain(rank=r),
    ):
        with pytest.raises(InvalidArgument, match=f"^{rank} is no size, offset, count or index"):
            ask(rank)
    mesh = whole(W, ranks=(rank,))
    with pytest.raises(InvalidLayout, match="source side"):
        plan(Side.of((rank,), [mesh]), TARGET)
    with pytest.raises(InvalidLayout, match="target side"):
        first_replicas(Side.of((rank,), [mesh]))


def test_nothing_is_written_when_a_buffer_does_not_fit(planned):
    memory = {
        (rank, local.name): np.full(local.nbytes, rank, np.uint8)
        for rank in range(4)
        for local in planned.local_containers("source", rank)
    }
    room = {
        (rank, local.name): np.zeros(local.nbytes, np.uint8)
        for rank in (10, 11)
        for local in planned.local_containers("target", rank)
    }
    readonly = np.zeros(64, np.uint8)
    readonly.flags.writeable = False
    for key, wrong in (
        ((11, "w"), np.zeros(63, np.uint8)),
        ((11, "w"), np.zeros(128, np.uint8)[::2]),
        ((11, "w"), readonly),
        ((11, "w"), None),
    ):
        broken = {k: v for k, v in room.items() if k != key}
        if wrong is not None:
            broken[key] = wrong
        with pytest.raises(BufferMismatch, match="`w` on rank 11"):
            apply(planned, memory, broken)
        assert not any(value.any() for k, value in broken.items() if k != key)
    assert apply(planned, memory, room) == planned.balance().nbytes


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        W.name = "other"
    assert msgspec.structs.replace(W, name="v").name == "v"


def test_a_named_rank_has_a_padded_container_though_all_of_it_is_padding() -> None:
    tensor = Tensor("e", (100, 4), BF16)

    def rows(rank: int, start: int, count: int) -> Leaf:
        return Leaf(tensor, Mesh.line([rank]), (Replicate(),), ((start, count), (0, 4)))

    layout = Pad(Concat(0, (rows(0, 0, 64), rows(1, 64, 36))), (64, 4))
    whole = Leaf(tensor, Mesh.line([0]), (Replicate(),))
    source = Side.of(1, [Container("e", BF16, whole)])
    for ranks, last in ((None, 0), ((0, 1, 2), 1)):
        p = plan(source, Side.of(3, [Container("e", BF16, layout, ranks=ranks)]))
        found = [p.local_containers("target", rank) for rank in range(3)]
        assert [len(f) for f in found] == [1, 1, last]
        assert all(c.shape == (64, 4) for f in found for c in f)
        assert [p.expected_pages(rank) for rank in range(3)] == [1, 1, 0]
