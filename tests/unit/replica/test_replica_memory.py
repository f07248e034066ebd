"""What a push from replicas takes of memory: a bucket, what waits, a replica, and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.plan.types import Concat
from tests.unit.replica.setups import Setup, closing

LAYERS, ROWS, COLUMNS = 12, 512, 512
INT16 = DType.of("int16")


class Gather:
    """Gathers tensors that it keeps no hold of, and counts the bytes of those that live."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS, layers: int = LAYERS) -> None:
        self.shape, self.columns, self.layers = (rows, columns), columns, layers
        self.live = self.most = 0
        self.room = 1
        """Each tensor is the first of so many in a memory."""

    def side(self, ranks: int) -> Side:
        """Layers of two fused matrices, cut by rows."""
        mesh = Mesh.line(range(ranks))

        def part(name: str) -> Leaf:
            return Leaf(Tensor(name, self.shape, INT16), mesh, (Shard(0),))

        fused = [
            Container(f"layers.{i}.gate_up", INT16, Concat(0, (part(f"gate.{i}"), part(f"up.{i}"))))
            for i in range(self.layers)
        ]
        norm = Leaf(Tensor("norm", (self.columns,), INT16), mesh, (Replicate(),))
        return Side.of(ranks, [*fused, Container("norm", INT16, norm)])

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A gate waits for its up, which comes a layer later.
        order = ["gate.0"]
        for i in range(1, self.layers):
            order += [f"gate.{i}", f"up.{i - 1}"]
        for name in [*order, f"up.{self.layers - 1}"]:
            yield name, self.fresh(self.shape, len(name))
        yield "norm", self.fresh((self.columns,), 1)

    def fresh(self, shape: tuple[int, ...], fill: int) -> torch.Tensor:
        array = np.full((self.room, *shape), fill, dtype=np.int16)
        self._count(array.nbytes)
        weakref.finalize(array, self._count, -array.nbytes)
        return torch.from_numpy(array)[0]

    def _count(self, nbytes: int) -> None:
        self.live += nbytes
        self.most = max(self.most, self.live)


@pytest.fixture
def open_setup() -> Iterator[Callable[..., Setup]]:
    yield from closing([])


TENSOR = 2 * ROWS * COLUMNS


@pytest.mark.parametrize("bucket", [TENSOR, 3 * TENSOR, 5 * TENSOR])
def test_whole_tensors_never_take_more_than_a_bucket_and_what_waits(
    open_setup: Callable[..., Setup], bucket: int
) -> None:
    gather = Gather()
    setup = open_setup([(1, gather)], gather.side(2), bucket=bucket, cache=2 * TENSOR)
    for _ in range(2):
        gather.most = 0
        report = setup.sync.push()
        assert gather.most == report.temporary[0].gathered
        assert gather.most <= bucket + 2 * TENSOR
        assert not gather.live, "nothing outlives a push"


def test_a_bucket_is_let_go_before_the_next_is_gathered(
    open_setup: Callable[..., Setup],
) -> None:
    gather, shape = Gather(), (ROWS, COLUMNS)
    leaves = [Leaf(Tensor(n, shape, INT16), Mesh.line([0]), (Replicate(),)) for n in "abc"]
    alone = Side.of(1, [Container(leaf.tensor.name, INT16, leaf) for leaf in leaves])

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, gather.fresh(shape, 1)) for name in "abc")

    open_setup([(1, weights)], alone, bucket=TENSOR, cache=0).sync.push()
    assert gather.most == TENSOR


def test_what_waits_does_not_keep_the_memory_that_it_was_a_part_of(
    open_setup: Callable[..., Setup],
) -> None:
    gather = Gather()
    gather.room = 5
    setup = open_setup([(1, gather)], gather.side(2), bucket=2 * TENSOR, cache=2 * TENSOR)
    setup.sync.connect()
    gather.most = 0
    setup.sync.push()
    assert gather.most <= 2 * gather.room * TENSOR, "a bucket's; what waits was copied"


def of_process(what: str) -> int:
    """Bytes of memory that this process has (``VmRSS``) or has had (``VmHWM``)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(what))


def test_the_process_grows_by_what_is_reported_and_no_more(
    open_setup: Callable[..., Setup],
) -> None:
    gather = Gather(rows=4 * ROWS, columns=4 * COLUMNS, layers=5)
    tensor = 16 * TENSOR
    options = {"bucket": 4 * tensor, "cache": 2 * tensor, "digest": False, "staged": False}
    setup = open_setup([(1, gather)], gather.side(1), **options)
    setup.sync.push()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # forget the highest mark
    before = of_process("VmRSS")
    (temporary,) = setup.sync.push().temporary
    assert temporary.gathered >= 5 * tensor
    assert of_process("VmHWM") - before <= 1.05 * temporary.gathered
    model = 10 * tensor + 2 * gather.columns
    assert model <= temporary.replica <= model + 256 * 6
