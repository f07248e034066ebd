"""The demo, small: real training, real pushes, every byte compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from fabric_ray.demo.options import Weights as Options
from fabric_ray.demo.weights import run
from fabric_ray.errors import FabricError, InvalidArgument
from fabric_ray.models import demo_config
from fabric_ray.models.boxes import InitialWeights
from fabric_ray.models.checkpoint import save_checkpoint
from tests.ray.demo_command import run_demo


@pytest.mark.long
def test_experts_from_a_checkpoint(cluster: list[str], tmp_path: Path) -> None:
    config = demo_config(parameters=2e6, kind="qwen3_moe", tp=2, ep=2)
    save_checkpoint(tmp_path / "model", config, InitialWeights(config, seed=3))
    outcome = run(
        Options(
            checkpoint=tmp_path / "model",
            ep=2,
            pushes=2,
            digest=True,
            transport="tcp",
            output=tmp_path / "out",
        )
    )
    assert outcome.verified
    assert outcome.model == "qwen3_moe"
    assert all(c.nbytes and c.changed for push in outcome.pushes for c in push.checked)
    assert {link.transport for link in outcome.links} == {"tcp"}
    assert Path(outcome.timeline).read_bytes().startswith(b"\x89PNG")
    # Nothing but the picture stays.
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["timeline.png"]


def test_the_command_prints_one_json_object(cluster: list[str], tmp_path: Path) -> None:
    sizes = ["--parameters", "2e6", "--pushes", "2", "--trainers", "2", "--rollouts", "1"]
    address = ray.get_runtime_context().gcs_address
    result = run_demo("weights", *sizes, "--output", str(tmp_path), address=address)
    assert result["bytes"] > 2 * 2e6
    for key in ("seconds", "gbytes_per_s", "floor_gbytes_per_s"):
        assert result[key] > 0
    assert len(result["pushes"]) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(trainers=0), "--trainers: got 0"),
        (Options(checkpoint=Path("/nowhere")), "/nowhere is not a directory"),
        (Options(parameters=2e6, rollouts=2, ep=3), "ep"),
    ],
)
def test_bad_options_end_before_anything_starts(
    options: Options, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InvalidArgument, FabricError), match=text):
        run(options)
    assert list(tmp_path.iterdir()) == []
