"""The model of an exchange against what exchanges count, and against what their launches do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.moe import model
from benchmarks.moe.machine import GPUS, MOVE_LOADS, PACK_LOADS, Machine
from benchmarks.moe.shape import Shape, batch, crossings
from fabric_ray import TransferEngine
from fabric_ray.kernels.steps import _Flag
from fabric_ray.moe import AllToAll, RowPart, cast
from fabric_ray.moe.tokens import Outgoing
from tests.host_kernels import Host
from tests.unit.kernels.test_kernel_compiler import FACTS
from tests.unit.moe.moe_ranks import joined, on_each

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks.md"


@pytest.mark.parametrize("private_rows", [1, 64])
def test_bytes_of_each_pair_are_those_that_an_exchange_sends(private_rows: int) -> None:
    shape = Shape(3, 24, hidden=256, experts=12, topk=3, private_rows=private_rows)
    engines: list[TransferEngine] = []
    given = [batch(shape, rank, 0) for rank in range(shape.ranks)]

    def work(a: AllToAll) -> None:
        mine = given[a.rank]
        a.dispatch_send(mine.x, mine.indices, scales=mine.scales)
        got = a.dispatch_recv()
        a.combine_send(got.x.to(torch.bfloat16))
        a.combine_recv(mine.weights)

    sizes: dict[str, Any] = {
        "experts": shape.experts,
        "topk": shape.topk,
        "hidden": shape.hidden,
        "max_tokens": shape.tokens,
        "dtype": torch.float8_e4m3fn,
        "parts": [RowPart("scales", shape.scales, torch.float32)],
        "private_rows": private_rows,
    }
    with joined([None] * shape.ranks, transport="tcp", engines=engines, **sizes) as ranks:
        on_each(ranks, work)
        found = {
            (engine.metrics().name, peer.name): sum(
                tally.nbytes for rail in peer.rails for tally in rail.tallies
            )
            for engine in engines
            for peer in engine.metrics().peers
        }
    local = shape.experts // shape.ranks
    rows = [(one.indices // local).flatten().bincount(minlength=shape.ranks) for one in given]
    wanted = {}
    for a in range(shape.ranks):
        for b in range(shape.ranks):
            if a != b:
                sent, _ = model.pair_nbytes(shape, int(rows[a][b]))
                _, back = model.pair_nbytes(shape, int(rows[b][a]))
                wanted[f"rank-{a}", f"rank-{b}"] = sent + back
    assert found == wanted


class Meets:
    """A launcher that counts the meets of each launch, by the rule of ``run`` in ``steps.cu``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.found: list[int] = []

    def launch(
        self, file: str, kernel: str, blocks: int, threads: int, arguments: Any, **options: Any
    ) -> None:
        if options.get("together"):
            meets, alone = 0, True
            for i, step in enumerate(arguments.step[: arguments.n]):
                of_one = bool(step.flags & _Flag.ALONE)
                if i and not step.flags & _Flag.BESIDE and not (of_one and alone):
                    meets, alone = meets + 1, True
                alone &= of_one
            self.found.append(meets)
        self._host.launch(file, kernel, blocks, threads, arguments, **options)

    def resident(self, *of: Any) -> int:
        return self._host.resident(*of)


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("tokens", [4, 520])
def test_launches_meet_as_often_as_the_model_says(
    host: Host, casts: bool, stores: bool, tokens: int
) -> None:
    shape = Shape(1, tokens, hidden=128, experts=4, topk=2)
    meets = Meets(host.another())
    with TransferEngine(name="alone", transport="shm") as engine:
        a = AllToAll(
            engine, rank=0, ranks=1, experts=4, topk=2, hidden=128, max_tokens=tokens,
            dtype=torch.float8_e4m3fn, parts=[RowPart("scales", 1, torch.float32)],
            direct=stores, launcher=meets,
        )  # fmt: skip
        mine = batch(shape, 0, 0)
        if casts:
            a.dispatch(Outgoing(mine.x.to(torch.bfloat16), mine.indices, {}, cast.Fp8Form()))
        else:
            a.dispatch_send(mine.x, mine.indices, scales=mine.scales)
        got = a.dispatch_recv()
        a.combine_send(got.x.to(torch.bfloat16))
        a.combine_recv(mine.weights)
        a.check()
        a.close()
    assert tuple(meets.found) == model.meets(shape)


def test_tokens_cross_between_nodes_as_often_as_those_of_a_batch() -> None:
    shape = Shape(8, 4096, hidden=128, topk=3)
    once, _ = crossings(shape, batch(shape, 0, 0), 0)
    # Of 4096 draws; six standard deviations are 2 %.
    assert model.spread(shape.experts, shape.topk, 2) == pytest.approx(once / 4096, abs=0.02)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("case", model.CASES)
def test_more_bytes_take_longer(case: str, gpu: Any) -> None:
    shape = model.CASES[case]
    for more in ({"tokens": 2 * shape.tokens}, {"hidden": 2 * shape.hidden}):
        less = model.predict(case, gpu)
        grown = model.predict(case, gpu, msgspec.structs.replace(shape, **more))
        for half in ("dispatch", "combine"):
            for a, b in zip(getattr(less, half), getattr(grown, half), strict=True):
                assert (a.us, a.hbm) < (b.us, b.hbm)
                assert a.nvlink < b.nvlink
                assert a.nic <= b.nic
            best, worst = getattr(less, half)
            assert best.us < worst.us


def test_the_model_has_the_loads_of_the_machine_code() -> None:
    assert FACTS["run_steps"].loads == FACTS["sum_bf16_bf16"].loads == MOVE_LOADS
    assert FACTS["work_bf16"].loads == MOVE_LOADS
    # By Little's law, 32 KiB of each multiprocessor in 0.39 us are more than an H100 reads.
    h100 = Machine(GPUS[0], 0.0)
    assert h100.stream(1e9, MOVE_LOADS) < 1.01 * 1e9 / h100.hbm
    assert h100.stream(1e9, PACK_LOADS) > 1.01 * 1e9 / h100.hbm


def test_the_documentation_has_the_table() -> None:
    text = DOCS.read_text()
    assert [line for line in model.table() if line not in text] == []
