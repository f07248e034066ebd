"""What planning takes where a trillion parameters go to vLLM workers whose loaders are recorded.

``python -m benchmarks.push.recorded`` under the Python of an environment with vLLM
(``build/vllm/bin/python``, with the clone in ``PYTHONPATH``). The model is Kimi-K2 without memory.
One worker records the loader with all experts; a worker with fewer skips the others. For the plan
its boxes are divided among 32 workers with an equal part of the experts each, and four servers.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer

from fabric_ray.bench.record import Resume, Turns, recorded
from fabric_ray.bench.results import RowHeader, row_of_turns
from fabric_ray.cli import words
from fabric_ray.integrations.vllm_recorded import Need, RecordedModel, record_model, target_side
from fabric_ray.models import parameter_shapes
from fabric_ray.models.presets import PRESET_FIELDS
from fabric_ray.plan import DType, Plan, Tensor, plan
from fabric_ray.weights.stacked import unstacked

MODEL = "kimi-k2"
# fabric-lib, section 7.3: 256 trainers.
TRAINERS, RANKS, SERVERS = "fsdp=16,pp=2,ep=8", 32, 4
_ARCHITECTURE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Result = TypeVar("Result")


def main(turns: Turns = 3, resume: Resume = None) -> None:
    """Seconds of a processor to record, and to plan with all ends."""
    keys = {step: f"push-recorded/{MODEL}/{step}" for step in ("record", "plan")}
    tensors = {
        name: Tensor(name, shape, DType.of("float32" if name.endswith("_bias") else "bfloat16"))
        for name, shape in parameter_shapes(words.model(MODEL)).items()
    }
    model, config = _model()
    spent: dict[str, list[float]] = {step: [] for step in keys}
    with recorded("push-recorded", resume) as results:
        if all(map(results.has, keys.values())):
            return
        for _ in range(turns):
            made = _timed(spent["record"], lambda: record_model(model, config, tensors, ()))
            planned = _timed(spent["plan"], partial(_plan, made, tensors))
            results.say(f"record {spent['record'][-1]:.1f} s, plan {spent['plan'][-1]:.1f} s")
        details = {
            "tensors": len(tensors),
            "copies": planned.copy_count,
            "encoded MB": len(planned.to_bytes()) / 1e6,
        }
        for step, seconds in spent.items():
            header = RowHeader(key=keys[step], unit="s")
            results.add(row_of_turns(header, {step: ("ours", seconds)}, {step: details}))


def _timed(spent: list[float], step: Callable[[], Result]) -> Result:
    begin = time.process_time()
    result = step()
    spent.append(time.process_time() - begin)
    return result


def _model() -> tuple[torch.nn.Module, Any]:
    """The model of one worker, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(
            json.dumps({**PRESET_FIELDS[MODEL], **_ARCHITECTURE})
        )
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
        ).create_engine_config()
        with set_current_vllm_config(config):
            store = f"file://{folder}/store"
            parallel_state.init_distributed_environment(1, 0, store, 0, backend="gloo")
            parallel_state.initialize_model_parallel(1)
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                return initialize_model(vllm_config=config), config.model_config


def _plan(made: RecordedModel, tensors: Mapping[str, Tensor]) -> Plan:
    """From all trainers to all workers, as the trainers of a server plan it."""
    experts = PRESET_FIELDS[MODEL]["n_routed_experts"] // RANKS
    needs: list[list[Need]] = [[] for _ in range(RANKS)]
    for need in made.needs:
        expert = _EXPERT.search(need.tensor)
        for some in needs if expert is None else [needs[int(expert[1]) // experts]]:
            some.append(need)
    target = target_side(needs * SERVERS, tensors)
    source = words.trainers(TRAINERS).side(words.model(MODEL))
    return plan(unstacked(source, target), target)


if __name__ == "__main__":
    typer.run(main)
