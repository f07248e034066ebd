"""The demo of expert parallelism: it compares, kills, masks and replaces, and is right."""

from __future__ import annotations

import msgspec
import pytest
import ray
from rich.console import Console

from fabric_ray.demo.moe import Loss, Outcome, Phase
from fabric_ray.demo.options import Moe as Options
from fabric_ray.moe.layer import Traffic
from tests.ray.demo_command import run_demo

PHASE = Phase("whole", (), 1, 8, (0.1,), 2048, 0, True, {})
LOSS = Loss(3, 1, (3,), (0,), "it died", 0.1, 0.2)


@pytest.mark.long
def test_the_command_kills_and_replaces_and_prints_one_json_object(cluster: list[str]) -> None:
    address = ray.get_runtime_context().gcs_address
    sizes = ["--ranks", "3", "--steps", "2", "--tokens", "20"]
    result = run_demo("moe", *sizes, address=address)
    whole, masked, again = result["phases"]
    assert result["loss"]["named"] == [2]
    assert whole["left_out"] == again["left_out"] == []
    assert masked["left_out"] == [8, 9, 10, 11]
    for phase in (whole, masked, again):
        assert phase["tokens"] == 2 * 3 * 20
        assert phase["logits"] == phase["tokens"] * 256
        assert phase["wrong"] == 0
    # Each token went to three experts in each of two layers.
    rows = sum(one["rows"] for one in whole["traffic"].values())
    assert rows >= whole["tokens"] * 3 * 2
    assert sorted(masked["traffic"]) == ["0", "1"]


def test_one_wrong_bit_is_not_verified() -> None:
    masked = msgspec.structs.replace(PHASE, left_out=(12, 13, 14, 15))
    good = Outcome(Options(), (PHASE, masked, PHASE), LOSS, 1.0, True, "")
    assert good.verified
    for field, value in [("wrong", 1), ("said", False), ("logits", 0), ("left_out", (1,))]:
        bad = msgspec.structs.replace(PHASE, **{field: value})
        other = msgspec.structs.replace(good, phases=(PHASE, masked, bad))
        assert not other.summary()["verified"], field
    assert not msgspec.structs.replace(good, newcomer=False).verified
    blamed = msgspec.structs.replace(LOSS, named=(2, 3))
    assert not msgspec.structs.replace(good, loss=blamed).verified


def test_the_tables_stay_whole_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = Traffic(2, 1617, 125_200, 109_100, dispatch_seconds=0.0252, combine_seconds=0.0304)
    phase = msgspec.structs.replace(PHASE, traffic={0: traffic})
    explanation = "each has\n  1,024  bytes in all\nrows to rank 1: written by the engine"
    Outcome(Options(), (phase,) * 3, LOSS, 1.0, True, explanation).show(Console(width=80))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    titles = "rank  rows of its experts  load  dispatched  combined  dispatch ms  combine ms"
    assert titles in lines
    row = lines[lines.index(titles) + 1].split()
    assert row == ["0", "1617", "1.00", "125.2", "kB", "109.1", "kB", "12.60", "15.20"]
    assert "exchange memory of each rank: 1,024  bytes in all" in lines
