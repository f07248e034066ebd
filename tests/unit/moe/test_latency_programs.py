"""What GPU checks time and count, with kernels on the processor: that it comes at all."""

from __future__ import annotations

import pytest

from fabric_ray import TransferEngine
from tests import kv_graph_checks, latencies
from tests.host_kernels import Host
from tests.stands import OnProcessor


def test_callbacks_follow_each_replay(host: Host) -> None:
    with TransferEngine() as engine:
        in_rust, in_python = latencies.changes(engine, OnProcessor(host), 5)
    assert len(in_rust) == len(in_python) == 5
    assert min(in_rust + in_python) > 0


def test_a_kernel_answers_each_word_that_is_raised(host: Host) -> None:
    stand = OnProcessor(host)
    with TransferEngine() as engine, TransferEngine() as other:
        times = latencies.round_trips((engine, other), stand, stand, 5)
    assert len(times) == 5
    assert min(times) > 0


def test_each_replay_of_a_dispatch_has_a_first_command(host: Host) -> None:
    with TransferEngine(transport="shm") as engine:
        times = latencies.first_commands(engine, OnProcessor(host), 4, 3, hidden=256)
    assert len(times) == 3
    assert min(times) > 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ic_2_layers_that_a_replay_counts_arrive_as_they_were_computed(
    host: Host, transport: str
) -> None:
    kv_graph_checks.check_layers(OnProcessor(host), transport)
