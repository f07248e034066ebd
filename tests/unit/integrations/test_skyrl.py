"""SkyRL's modules are changed as they are imported; with its own package see
``tests/adapters/vllm/test_skyrl.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SYNC = "skyrl.backends.skyrl_train.weight_sync"


def imported(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Imports a SkyRL whose choice of backends is ``source``, in a process of its own."""
    package = folder / Path(*SYNC.split("."))
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    program = f"""
from fabric_ray.integrations import skyrl
skyrl.install()
skyrl.install()
import {SYNC} as sync
print(sync.get_transfer_strategy("fabric", False), sync.get_transfer_strategy("nccl", True))
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_other_backends_are_chosen_as_before(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        "def get_transfer_strategy(backend, colocated): return 'ipc' if colocated else 'nccl'\n"
        "def get_vllm_receive_backend(backend, colocated): return 'skyrl_nccl'\n",
    )
    assert done.stdout == "fabric ipc\n", done.stderr


def test_modules_that_are_imported_already_are_changed(tmp_path: Path) -> None:
    (tmp_path / "chosen.py").write_text(
        "def get_transfer_strategy(backend, colocated): return 'nccl'\n"
        "def get_vllm_receive_backend(backend, colocated): return 'skyrl_nccl'\n"
    )
    program = """
import chosen, sys
from fabric_ray.integrations import skyrl
sys.modules["skyrl.backends.skyrl_train.inference_servers.utils"] = chosen
skyrl.install()
print(chosen.get_transfer_strategy("fabric", False))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "fabric\n", done.stderr


def test_a_skyrl_that_chooses_in_another_way_is_refused_by_name(tmp_path: Path) -> None:
    # SkyRL 0.3 has the first of these only.
    done = imported(tmp_path, "def get_transfer_strategy(backend, colocated): return 'nccl'\n")
    assert done.returncode == 1
    assert "Unsupported" in done.stderr
    assert "get_vllm_receive_backend" in done.stderr
