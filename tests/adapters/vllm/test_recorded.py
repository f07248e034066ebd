"""Models of vLLM that are filled by their recorded loaders equal models that loaded the checkpoint,
in the bits of all their tensors and in what their packed kernels compute."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.adapters.vllm import servers

pytestmark = servers.needed

DENSE = ("llama", "tied", "qwen3", "gemma3", "apertus")
# First, because vLLM makes its group of expert parallelism for the first model of a process.
EXPERTS = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")


def answered(program: str, *arguments: str) -> Any:
    """What a program beside this file prints at last."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(servers.ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(servers.PYTHON), str(Path(__file__).with_name(program)), *arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=1800
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def compared(ranks: int, *kinds: str) -> list[dict[str, dict[str, Any]]]:
    """By rank and kind, what ``recorded_models.py`` says."""
    with TemporaryDirectory(prefix="fabric-ray-recorded-") as folder:
        answers: list[dict[str, dict[str, Any]]] = answered(
            "recorded_models.py", folder, str(ranks), *kinds
        )
    return answers


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (1, (*EXPERTS, *DENSE)),
        (2, (*EXPERTS, *DENSE)),
        (2, ("--expert-parallel", *EXPERTS)),
    ],
    ids=["TP 1", "TP 2", "EP 2"],
)
def test_rs_1_a_recorded_loader_fills_a_model_with_the_bits_of_a_load(
    ranks: int, kinds: tuple[str, ...]
) -> None:
    answers = compared(ranks, *kinds)
    assert len(answers) == ranks
    for answer in answers:
        for kind, found in answer.items():
            assert found["wrong"] == [], kind
            assert found["changed"] > 10, kind
            assert found["whole"] == {}, kind
            if kind == "gpt_oss":
                assert "vLLM's reload loses that" in found["streamed"]
            else:
                assert found["streamed"] == [], kind
    for kind in answers[0]:
        needed = sum(answer[kind]["elements"] for answer in answers)
        whole = answers[0][kind]["of"]
        # Norms, routers and the like lie on all ranks.
        assert whole <= needed < 1.3 * whole + 30_000, kind


def test_rs_1_layers_keep_nothing_that_they_have_computed_of_earlier_weights() -> None:
    assert answered("computed_layers.py") == {"old": [], "moved": []}
