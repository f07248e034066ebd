"""Limits, memory and kernel modules that transports depend on."""

from __future__ import annotations

import ctypes.util
import errno
import grp
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fabric_ray.doctor.findings import Finding, Status

_GIB = 1 << 30
_CAP_IPC_LOCK = 14
# The engine's descriptors: one for a region, a few for each peer.
_FEW_FILES = 4096
# Pinned memory that a small model's weights need.
_LITTLE_LOCKED = 8 * _GIB
_LITTLE_SHM = _GIB


def system(has_nics: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """Yields what the system allows; ``has_nics``: locked memory and GPU memory on NICs matter."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield memlock(soft, hard, has_nics=has_nics, exempt=_may_lock_all())
    yield from device_files(root)
    yield _open_files()
    yield _shared_memory(root)
    yield hugepages(root)
    yield ptrace(root)
    yield from _gpu_modules(root, has_nics=has_nics)


def _size(nbytes: int) -> str:
    if nbytes >= _GIB:
        return f"{nbytes / _GIB:.0f} GiB"
    return f"{nbytes // 1024} KiB"


def _may_lock_all(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process has CAP_IPC_LOCK, to which no limit applies."""
    for line in _text(status).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def memlock(soft: int, hard: int, *, has_nics: bool, exempt: bool) -> Finding:
    """The limit of locked memory, which every NIC registration counts against."""
    if exempt:
        return Finding("memlock", "locked memory", "ok", "unlimited (CAP_IPC_LOCK)")
    if soft == resource.RLIM_INFINITY or soft >= _LITTLE_LOCKED:
        limit = "unlimited" if soft == resource.RLIM_INFINITY else _size(soft)
        return Finding("memlock", "locked memory", "ok", limit)
    detail = f"this process may lock {_size(soft)}; NICs can't register more than that"
    if hard == resource.RLIM_INFINITY or hard >= _LITTLE_LOCKED:
        remedy = "ulimit -l unlimited before the start"
    else:
        remedy = (
            "raise the hard limit: memlock in /etc/security/limits.conf, LimitMEMLOCK= of the "
            "service, or --ulimit memlock=-1 of the container"
        )
    return Finding("memlock", "locked memory", "fail" if has_nics else "absent", detail, remedy)


def device_files(root: Path = Path("/")) -> Iterator[Finding]:
    """RDMA devices that are there and that this process may not open."""
    for file in sorted((root / "dev/infiniband").glob("uverbs*")):
        subject = f"/{file.relative_to(root)}"
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            yield Finding("device-file", subject, "fail", *_closed(file, error))
        else:
            yield Finding("device-file", subject, "ok", "may be opened")


def _closed(file: Path, error: OSError) -> tuple[str, str]:
    """Why a device file doesn't open, and what to do."""
    if error.errno == errno.EACCES:
        status = file.stat()
        try:
            group = f"{grp.getgrgid(status.st_gid).gr_name} ({status.st_gid})"
        except KeyError:
            group = str(status.st_gid)
        detail = (
            f"it is there, but user {os.geteuid()} may not open it: mode "
            f"{stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}, group {group}"
        )
        if not status.st_mode & stat.S_IWGRP:
            return detail, "its group may not either: chmod 0666, by a udev rule so that it stays"
        return detail, (
            f"add the user to that group (usermod -aG), or start the container with --group-add "
            f"{status.st_gid}"
        )
    if error.errno == errno.EPERM:
        detail = "it is there, but the control group of this container's devices forbids it"
        return detail, "--device /dev/infiniband, or the resource of your device plugin"
    return f"it is there, but doesn't open: {error.strerror}", "is its driver loaded? see dmesg"


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _FEW_FILES:
        return Finding("open-files", "open files", "ok", f"{soft} a process")
    return Finding(
        "open-files",
        "open files",
        "warn",
        f"this process may open {soft}: every peer takes a few",
        f"ulimit -n {min(hard, 65536)} before the start",
    )


def _shared_memory(root: Path) -> Finding:
    # memfd, which the shm transport maps, is counted against memory, not against /dev/shm; Ray's
    # object store is in /dev/shm.
    try:
        free = shutil.disk_usage(root / "dev/shm").free
    except OSError as error:
        return Finding("dev-shm", "/dev/shm", "warn", str(error), "mount a tmpfs there, for Ray")
    status: Status = "ok" if free >= _LITTLE_SHM else "warn"
    remedy = "" if status == "ok" else "start the container with --shm-size=8g or more, for Ray"
    return Finding("dev-shm", "/dev/shm", status, f"{_size(free)} free", remedy)


def hugepages(root: Path, release: str | None = None) -> Finding:
    """Whether memory that the engine shares with processes of this host can be of huge pages.

    Args:
        release: of the kernel; by default the one that runs.
    """
    where = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    mode = _text(where).partition("[")[2].partition("]")[0]
    if mode in ("always", "within_size", "advise", "force"):
        return Finding("hugepages", "huge pages", "ok", f"shared memory may have them ({mode})")
    release = os.uname().release if release is None else release
    if mode not in ("", "deny") and _kernel(release) >= (6, 1):
        detail = f"the engine makes them of its own (MADV_COLLAPSE, Linux {release})"
        return Finding("hugepages", "huge pages", "ok", detail)
    detail = f"shared memory has none ({mode or 'not known'}): copies over shm could be faster"
    remedy = (
        f"a kernel from 6.1 on, or as root: echo advise > {Path('/') / where.relative_to(root)}"
    )
    return Finding("hugepages", "huge pages", "warn", detail, remedy)


def ptrace(root: Path) -> Finding:
    """Whether one process may write to ordinary memory of another one of its user."""
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    if scope in ("", "0", "1"):
        # With 1 the engine names its peers as those that may (PR_SET_PTRACER).
        return Finding("ptrace", "process_vm_writev", "ok", f"yama scope {scope or 'not set'}")
    return Finding(
        "ptrace",
        "process_vm_writev",
        "warn",
        f"yama scope {scope}: shm reaches only memory that the engine allocated",
        "use TransferEngine.alloc, or sysctl kernel.yama.ptrace_scope=1",
    )


def _gpu_modules(root: Path, *, has_nics: bool) -> Iterator[Finding]:
    nvidia = (root / "proc/driver/nvidia/version").exists()
    if not nvidia:
        yield Finding("gpu", "NVIDIA driver", "absent", "not loaded: no GPU memory here")
        return
    version = _text(root / "proc/driver/nvidia/version").splitlines()[0]
    yield Finding("gpu", "NVIDIA driver", "ok", version)
    release = os.uname().release
    # Kernels from 5.12 have dma-buf registration; the open driver exports it.
    new = _kernel(release) >= (5, 12)
    open_driver = "Open Kernel Module" in version
    if new and open_driver:
        yield Finding("dmabuf", "GPU memory by dma-buf", "ok", f"Linux {release}, open driver")
    peermem = any((root / f"sys/module/{m}").exists() for m in ("nvidia_peermem", "nv_peer_mem"))
    if peermem:
        yield Finding("peermem", "GPU memory by peermem", "ok", "nvidia-peermem is loaded")
    elif not (new and open_driver):
        yield Finding(
            "peermem",
            "GPU memory on NICs",
            "fail" if has_nics else "absent",
            f"neither dma-buf (Linux {release}) nor nvidia-peermem",
            "modprobe nvidia-peermem, or use the open kernel driver on Linux 5.12 or later",
        )
    device, library = (root / "dev/gdrdrv").exists(), ctypes.util.find_library("gdrapi")
    if device and library:
        yield Finding("gdrcopy", "gdrcopy", "ok", f"/dev/gdrdrv, {library}")
    else:
        lacks = "the driver (/dev/gdrdrv)" if library else "libgdrapi.so.2"
        detail = f"{lacks} is missing: flags and words live in mapped host memory"
        yield Finding("gdrcopy", "gdrcopy", "warn", detail, "install gdrcopy and its driver")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kernel(release: str) -> tuple[int, ...]:
    """Major and minor number of a kernel's release."""
    return tuple(int(n) for n in release.split("-")[0].split(".")[:2])
