"""Kernels under ThreadSanitizer: blocks and lanes are threads, warps have 32, and atomics the order
of the device's. An order or a barrier that is missing is a race there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fabric_ray.kernels.sources import FOLDER
from tests.host_kernels import cxx

TESTS = Path(__file__).parents[2]
#: A program for each file of kernels.
PROGRAMS = {"steps": TESTS / "kernel_races.cc", "work": TESTS / "work_races.cc"}
FLAGS = (
    "-std=c++20 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-tsan -ffp-contract=off "
    "-pthread -fno-gnu-unique -fsanitize=thread -DFR_HOST_WARP=32"
)
#: What ThreadSanitizer exits with.
RACES = 66


def run(
    folder: Path, sources: Path, blocks: int = 2, file: str = "steps"
) -> subprocess.CompletedProcess[str]:
    """Builds what lies there, and runs it with so many blocks at a time."""
    compiler = cxx()
    libraries = [folder / f"block-{i}.so" for i in range(blocks)]
    program = folder / "races"
    for command in (
        ["-shared", "-fPIC", "-o", libraries[0], "-x", "c++", sources / "moe" / f"{file}.cu"],
        ["-o", program, PROGRAMS[file], "-ldl"],
    ):
        subprocess.run([compiler, *FLAGS.split(), "-I", sources, *command], check=True, timeout=250)
    for copy in libraries[1:]:
        shutil.copy(libraries[0], copy)
    return subprocess.run(
        [program, *libraries], capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.long
def test_steps_of_a_launch_have_no_race(tmp_path: Path) -> None:
    done = run(tmp_path, FOLDER)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_jobs_of_workers_have_no_race(tmp_path: Path) -> None:
    done = run(tmp_path, FOLDER, file="work")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        (
            "common/vendor_host.cuh",
            "__atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL)",
            "__atomic_fetch_add(word, 1, __ATOMIC_RELAXED)",
        ),
        (
            "common/blocks.cuh",
            "while (load_acquire(word) < end)",
            "while (load_device(word) < end)",
        ),
        ("moe/pack.cuh", "sync_block();\n    u64 some", "u64 some"),
        ("moe/work.cu", "++i;\n    sync_block();", "++i;"),
        ("moe/work.cu", "words * 8);\n  sync_block();", "words * 8);"),
    ],
    ids=[
        "arrival without an order",
        "meeting without an order",
        "no barrier of a block",
        "a job is done before its block is",
        "a job is read before it is copied",
    ],
)
def test_an_order_that_is_missing_is_a_race(
    tmp_path: Path, file: str, right: str, wrong: str
) -> None:
    sources = tmp_path / "kernels"
    shutil.copytree(FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    done = run(tmp_path, sources, file="work" if file == "moe/work.cu" else "steps")
    assert done.returncode == RACES
    assert "data race" in done.stderr
