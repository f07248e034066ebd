"""Runs the GPU checks, stage by stage: ``python tests/gpu/run.py STAGE... --out DIR``.

Each stage has its own limit, below nine minutes, and writes ``STAGE.log`` and ``STAGE.json``: how
it ended, and its figures. One that fails or takes too long doesn't end the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 520.0
#: Where CUDA's tools lie that are not on the path.
TOOLS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
WARM = "import torch; from fabric_ray.moe.device_memory import gpu; gpu(torch.device('cuda', 0))"


@dataclass(frozen=True)
class Step:
    """One program of a stage, and the seconds that it may take."""

    arguments: tuple[str, ...]
    seconds: float
    env: tuple[tuple[str, str], ...] = ()


def checks(*files: str, chosen: str = "", each: int = 240, seconds: float = LIMIT) -> Step:
    """Tests of this folder, those that ``chosen`` names; no longer than ``each`` seconds each."""
    named = [f"tests/gpu/{file}" for file in files]
    options = [
        "-s",
        "-v",
        "-ra",
        f"--timeout={each}",
        "--maxfail=6",
        *(["-k", chosen] if chosen else []),
    ]
    return Step((sys.executable, "-m", "pytest", *named, *options), seconds)


def sanitized(tool: str, *files: str, chosen: str, seconds: float) -> Step:
    """The same under compute-sanitizer, to which kernels are a hundred times slower."""
    under = ("compute-sanitizer", "--tool", tool, "--target-processes", "all")
    error = ("--error-exitcode", "86", "--print-limit", "20")
    of = checks(*files, chosen=chosen, each=400, seconds=seconds)
    # Each tensor is an allocation of its own: what is written behind one is noticed.
    alone = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    return Step((*under, *error, *of.arguments), seconds, alone)


COMPILE = Step((sys.executable, "-c", WARM), 120)
#: No longer than ``LIMIT`` together.
STAGES: dict[str, tuple[Step, ...]] = {
    "pushes": (checks("test_weight_pushes.py", "test_kv_stream.py", seconds=200),),
    "kernels": (COMPILE, checks("test_moe_kernels.py", "test_latencies.py", seconds=320)),
    "exchange": (
        COMPILE,
        checks("test_moe_exchange.py", seconds=230),
        checks("test_moe_faces.py", seconds=170),
    ),
    "nodes": (COMPILE, checks("test_moe_nodes.py", seconds=300)),
    "engine": (
        checks("test_gpu.py", seconds=360),
        checks("test_kv_graph.py", "test_offloaded_push.py", "test_without_gpu.py", seconds=150),
    ),
    "sanitizer": (
        COMPILE,
        sanitized(
            "memcheck",
            "test_moe_kernels.py",
            chosen="not how_far and not second_process and not every_number and not captured "
            "and not 5000",
            seconds=200,
        ),
        sanitized(
            "racecheck",
            "test_moe_kernels.py",
            chosen="(routes or packed or answers_back or (sums and some and 72) or "
            "comes_with_its_word) and not holes and not 900",
            seconds=200,
        ),
    ),
}


@dataclass(frozen=True)
class Ended:
    """How a step did."""

    command: str
    seconds: float
    code: int | None
    """``None`` if it took too long, or did not begin."""
    how: str


def run(step: Step, log: Path, env: dict[str, str], left: float) -> Ended:
    """Runs a step, its output into the log, and ends all of its processes."""
    began = time.monotonic()
    command = " ".join(step.arguments)
    with log.open("a") as out:
        print(f"$ {command}", file=out, flush=True)
        program = shutil.which(step.arguments[0], path=env["PATH"])
        if program is None:
            print(f"{step.arguments[0]} is not here", file=out)
            return Ended(command, 0.0, None, f"{step.arguments[0]} is not here")
        if left <= 0:
            print("not started: the time of its stage is over", file=out)
            return Ended(command, 0.0, None, "was not started")
        process = subprocess.Popen(
            (program, *step.arguments[1:]), cwd=ROOT, env={**env, **dict(step.env)},
            stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(step.seconds, left))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if code is None:
            print(f"ended after {time.monotonic() - began:.0f} s", file=out)
    how = "did not end in its time" if code is None else f"ended with {code}"
    return Ended(command, time.monotonic() - began, code, how)


def stage(name: str, out: Path) -> bool:
    """One stage; whether all of it went well."""
    log, found = out / f"{name}.log", out / f"{name}.figures"
    log.write_text("")
    found.write_text("")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOLS]),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        # What is loaded while a kernel waits for a peer may wait for that kernel.
        "CUDA_MODULE_LOADING": "EAGER",
        "FABRIC_FIGURES": str(found.resolve()),
    }
    began = time.monotonic()
    ended = [run(step, log, env, LIMIT - (time.monotonic() - began)) for step in STAGES[name]]
    figures: list[dict[str, Any]] = [json.loads(line) for line in found.read_text().splitlines()]
    found.unlink()
    said = re.findall(r"^=+ (.*(?:passed|failed|skipped|error).*) =+$", log.read_text(), re.M)
    well = all(one.code == 0 for one in ended) and all(f["met"] is not False for f in figures)
    report = {"well": well, "steps": [vars(one) for one in ended], "said": said, "figures": figures}
    (out / f"{name}.json").write_text(json.dumps(report, indent=1))
    print(f"{name}: {'well' if well else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    for line in said:
        print(f"    {line}")
    for one in ended:
        if one.code != 0:
            print(f"    {one.how}: {one.command}")
    for figure in figures:
        aim = "" if figure["aim"] is None else f"  (aim: {figure['aim']})"
        missed = "  MISSED" if figure["met"] is False else ""
        print(f"    {figure['name']}: {figure['value']:.4g}{aim}{missed}")
    return well


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=[*STAGES, "all"], metavar="STAGE")
    parser.add_argument("--out", type=Path, required=True, help="a folder for logs and figures")
    options = parser.parse_args(given)
    if subprocess.run([sys.executable, "-c", GPU], env=os.environ).returncode != 0:
        print("torch finds no CUDA GPU here: nothing was checked")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    names = [*STAGES] if "all" in options.stages else options.stages
    well = [stage(name, options.out) for name in names]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
