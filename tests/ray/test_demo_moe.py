"""The demo of expert parallelism: it compares, kills, masks and replaces, and is right."""

from __future__ import annotations

import msgspec
import pytest
import ray
from rich.console import Console

from fabric_ray.demo.moe import Loss, Outcome, Phase
from fabric_ray.demo.options import Moe as Options
from tests.ray.demo_command import run_demo

PHASE = Phase("whole", (), 1, 8, (0.1,), 2048, 0)
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
        assert phase["logits"] == phase["tokens"] * 258
        assert phase["wrong"] == 0


def test_one_wrong_bit_is_not_verified() -> None:
    masked = msgspec.structs.replace(PHASE, left_out=(12, 13, 14, 15))
    good = Outcome(Options(), (PHASE, masked, PHASE), LOSS, 1.0, True, "")
    assert good.verified
    for field, value in [("wrong", 1), ("logits", 0), ("left_out", (1,))]:
        bad = msgspec.structs.replace(PHASE, **{field: value})
        other = msgspec.structs.replace(good, phases=(PHASE, masked, bad))
        assert not other.summary()["verified"], field
    assert not msgspec.structs.replace(good, newcomer=False).verified
    blamed = msgspec.structs.replace(LOSS, named=(2, 3))
    assert not msgspec.structs.replace(good, loss=blamed).verified


def test_the_table_stays_whole_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    phase = msgspec.structs.replace(PHASE, left_out=(12, 13, 14, 15))
    explanation = "each has\n  1,024  bytes in all\nrows to rank 1: written by the engine"
    Outcome(Options(), (phase,) * 3, LOSS, 1.0, True, explanation).show(Console(width=80))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    titles = next(line for line in lines if line.endswith("step ms"))
    assert titles.split() == ["phase", "without", "experts", "tokens", "steps", "step", "ms"]
    assert lines[lines.index(titles) + 1].split() == ["whole", "12", "to", "15", "8", "1", "100"]
    assert "exchange memory of each rank: 1,024  bytes in all" in lines
