"""Facts about the machine and the libraries, kept with every result."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from benchmarks.harness.results import Machine

_DISTRIBUTIONS = (
    "fabric-ray",
    "nixl",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "ray",
    "torch",
    "numpy",
    "msgspec",
)
# A library's program, and the Debian package of it.
_PROGRAMS = {"ucx": ("ucx_perftest", "ucx-utils"), "libfabric": ("fi_info", "libfabric-bin")}


def machine() -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        caches=_caches(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=_versions(),
        commit=_commit(),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    caches: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (index / name).read_text().strip() for name in ("level", "type", "size")
        )
        caches[f"L{level} {kind}"] = size
    return caches


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name, (program, package) in _PROGRAMS.items():
        if shutil.which(program):
            versions[name] = _said("dpkg-query", "-W", "-f", "${Version}", package)
    return versions


def _commit() -> str:
    here = str(Path(__file__).resolve().parent)
    return _said("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40")


def _said(*command: str) -> str:
    if not shutil.which(command[0]):
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
