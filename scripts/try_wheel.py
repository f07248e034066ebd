"""Tries an installed wheel: ``python scripts/try_wheel.py`` where nothing else is installed."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import fabric_ray
from fabric_ray import kernels
from fabric_ray.compat import shim_path
from fabric_ray.compat.mooncake import TransferEngine
from fabric_ray.compat.nixl import nixl_agent

ROOT = Path(__file__).parents[1]


def main() -> None:
    home = Path(fabric_ray.__file__).parent
    assert home != ROOT / "fabric_ray", "this is the checkout, not a wheel"
    assert all(kernels.source(name) for name in kernels.sources()), "kernels are missing"
    assert all(Path(folder).is_dir() for folder in shim_path().split(":")), "shims are missing"
    assert (home / "py.typed").is_file()
    nixl_agent("alone")
    TransferEngine()
    script = Path(sys.executable).with_name("fabric-ray")
    subprocess.run([script, "--help"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, ROOT / "examples" / "engine_two_processes.py"], check=True)
    print(
        f"fabric_ray {fabric_ray.__version__} works on Python {platform.python_version()}, "
        f"{' '.join(platform.libc_ver())}"
    )


if __name__ == "__main__":
    main()
