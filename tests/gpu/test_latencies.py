"""How soon the host knows of what kernels do, and they of what it does, on a GPU."""

from __future__ import annotations

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.kernels import Device
from tests import latencies
from tests.gpu import figures
from tests.stands import OnGpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

REPLAYS = 1000
#: fabric-lib's Table 4, in microseconds: half of its callbacks, and 99 of a hundred.
PAPER = {"Rust": (6.2, 12.6), "Python": (9.3, 20.4)}


def test_callbacks_follow_what_a_captured_graph_counts() -> None:
    stand = OnGpu()
    with TransferEngine(name="watched") as engine:
        home = engine.watch(lambda _old, _new: None, device=0).home
        for language, times in zip(PAPER, latencies.changes(engine, stand, REPLAYS), strict=True):
            for which, found, theirs in zip(
                ("p50", "p99"), latencies.percentiles(times), PAPER[language], strict=True
            ):
                name = f"launch to callback in {language}, word in {home}, {which} us"
                figures.note(name, found, aim=f"{theirs} in the paper, without the launch")


def test_a_kernel_sees_what_the_host_raises() -> None:
    stand = OnGpu()
    with TransferEngine(name="raising") as engine, TransferEngine(name="answered") as other:
        home = engine.watch(lambda _old, _new: None, device=0).home
        launcher = Device(torch.cuda.current_device())
        times = latencies.round_trips((engine, other), stand, launcher, REPLAYS)
        for which, found in zip(("p50", "p99"), latencies.percentiles(times), strict=True):
            figures.note(
                f"raised, seen by a kernel and answered, words in {home}, {which} us", found
            )


@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_the_first_command_comes_soon_after_the_launch(tokens: int) -> None:
    stand = OnGpu()
    with TransferEngine(name="alone", transport="cuda_ipc") as engine:
        half, most = latencies.percentiles(latencies.first_commands(engine, stand, tokens, REPLAYS))
    figures.note(f"launch to first command, {tokens} tokens, p99 us", most)
    name = f"launch to first command, {tokens} tokens, p50 us"
    if tokens == 128:
        figures.require(name, half, at_most=15.0)
    else:
        figures.note(name, half)
