"""Facts about the machine and the libraries, kept with every result."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from fabric_ray.bench.results import Machine

_DISTRIBUTIONS = (
    *("fabric-ray", "nixl", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    *("ray", "torch", "numpy", "msgspec"),
)
# A library's program, and the Debian package of it.
_PROGRAMS = {"ucx": ("ucx_perftest", "ucx-utils"), "libfabric": ("fi_info", "libfabric-bin")}


def machine() -> Machine:
    here = str(Path(__file__).resolve().parent)
    return Machine(
        cpu=cpu(),
        cores=len(os.sched_getaffinity(0)),
        caches=_caches(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=_versions(),
        commit=_said("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40"),
    )


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    found = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    read = ([(at / n).read_text().strip() for n in ("level", "type", "size")] for at in found)
    return {f"L{level} {kind}": size for level, kind, size in read}


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for name, (program, package) in _PROGRAMS.items():
        if shutil.which(program):
            versions[name] = _said("dpkg-query", "-W", "-f", "${Version}", package)
    return versions


def _said(*command: str) -> str:
    if not shutil.which(command[0]):
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
