"""The Python that the documentation shows runs, page by page, and so do the examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fabric_ray.integrations import vllm_plugin
from tests.docs import run_page
from tests.docs.run_page import blocks
from tests.processes import Other

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if any(blocks(p))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
# They take longest; the README, shorter pages and unit tests make the same calls.
SLOW = {
    "docs/inference.md",
    "docs/moe-faces.md",
    "docs/moe.md",
    "docs/quickstart.md",
    "docs/ray-transport.md",
    "docs/weights.md",
    "examples/kv_two_hosts.py",
    "examples/moe_symmetric.py",
    "examples/ray_actors.py",
}


def params(paths: list[Path]) -> Iterator[Any]:
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        yield pytest.param(path, id=name, marks=[pytest.mark.long] if name in SLOW else [])


def run_in_fork(connection: Connection, page: str, output: str) -> None:
    with open(output, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    sys.argv = ["run_page.py", page]
    run_page.main(Path(page))
    sys.stdout.flush()
    connection.send("ended")


def run(page: Path, output: Path) -> str:
    """What a program prints. One that starts no processes is a fork of one that has imported
    torch, which takes most of the time."""
    if re.search(r"multiprocessing|subprocess|ray\.init", page.read_text()):
        return run_alone("tests/docs/run_page.py", str(page))
    with Other(run_in_fork, str(page), str(output)) as other:
        try:
            assert other.hear(240.0) == "ended"
        except Exception:
            print(output.read_text())
            raise
    return output.read_text()


def run_alone(*command: str) -> str:
    # A cluster of its own, whatever else runs on this machine.
    ray = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | ray,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", params(PAGES))
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path / "output")


@pytest.mark.parametrize("example", params(EXAMPLES))
def test_an_example_runs_and_says_that_the_bytes_arrived(example: Path, tmp_path: Path) -> None:
    assert "arrived" in run(example, tmp_path / "output")


def code_lines(text: str) -> list[str]:
    lines = (line.split("  #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def test_the_three_lines_for_each_user_are_lines_of_programs_that_run() -> None:
    text = (ROOT / "README.md").read_text()
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    programs = [line for kind, code in fences if kind == "python" for line in code_lines(code)]
    excerpts = [code_lines(code) for kind, code in fences if kind == "py"]
    assert [len(lines) for lines in excerpts] == [3, 3]
    wrong = [line for lines in excerpts for line in lines if line not in programs]
    assert not wrong


def test_the_servers_of_the_first_screen_get_a_connector_that_exists() -> None:
    text = (ROOT / "README.md").read_text()
    [shell] = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = re.sub(r"vllm serve MODEL --port \d+ --kv-transfer-config", "echo", shell)
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    configurations = [json.loads(line) for line in said.splitlines()]
    assert [c["kv_role"] for c in configurations] == ["kv_producer", "kv_consumer"]
    module = ROOT / (vllm_plugin.CONNECTOR_MODULE.replace(".", "/") + ".py")
    assert {c["kv_connector"] for c in configurations} == {vllm_plugin.CONNECTOR}
    assert f"class {vllm_plugin.CONNECTOR}(" in module.read_text()
