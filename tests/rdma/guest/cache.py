"""What is kept between runs: the kernel, its initramfs, and packages for the guest."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.rdma.guest.kernel import build_kernel
from tests.rdma.guest.packages import (
    download,
    kernel_package,
    missing_packages,
    need_apt,
    unpack,
    versions,
)
from tests.rdma.guest.report import say

# Raised when what is kept changes its form, so that an older cache is not taken for a current one.
_FORMAT = 1
_KEEP_SECONDS = 30 * 86400

# The first that apt knows. In 6.1, a sender whose peer has no receive posted gives up after the
# ordinary retry time, also with rnr_retry 7; later kernels do not. Debian's cloud kernels have
# neither rdma_rxe nor 9p.
KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")

# Those that are not installed here are laid over this machine's root file system, in the guest.
BASE_PACKAGES = ("iproute2", "ibverbs-providers", "ibverbs-utils")


class Cache:
    """One folder for each thing kept.

    kernel-NAME-VERSION/  vmlinux or vmlinuz, initramfs, root/ (modules)
    tools-HASH/           root/ with the unpacked packages
    known/                which of them a request has led to, so that apt is asked but once (and
                          need not be there afterwards)
    """

    def __init__(self, *, refresh: bool = False) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.base = Path(base, "fabric-ray-rdma-guest", f"v{_FORMAT}")
        (self.base / "known").mkdir(parents=True, exist_ok=True)
        self.refresh = refresh

    def kernel(self, package: str | None) -> Path:
        def find() -> Path:
            name, version = kernel_package([package] if package else KERNELS)
            return self._make(f"kernel-{name}-{version}", lambda folder: build_kernel(name, folder))

        return self._lookup(f"kernel-{package or 'default'}", find)

    def tools(self, packages: Sequence[str]) -> Path:
        """A folder to lay over the root file system, with the packages that are lacking there."""
        wanted = [*BASE_PACKAGES, *packages]

        def find() -> Path:
            need_apt()
            lacking = missing_packages(wanted)
            known = [line.encode() for line in versions(lacking)]
            key = _digest(" ".join(lacking).encode(), *known)
            return self._make(f"tools-{key}", lambda folder: _build_tools(lacking, folder))

        # What is lacking depends on what is installed here.
        status = Path("/var/lib/dpkg/status")
        key = _digest(
            " ".join(sorted(set(wanted))).encode(), status.read_bytes() if status.exists() else b""
        )
        return self._lookup(f"tools-{key}", find) / "root"

    def _make(self, name: str, build: Callable[[Path], None]) -> Path:
        """The folder `name`; if it is not there, what `build` makes in an empty one."""
        final = self.base / name
        if final.exists():
            return final
        # One builder at a time; the others wait and find it done.
        with open(self.base / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.exists():
                new = Path(tempfile.mkdtemp(prefix="new-", dir=self.base))
                try:
                    new.chmod(0o755)
                    build(new)
                    new.rename(final)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
                self._expire()
        return final

    def _expire(self) -> None:
        for item in self.base.iterdir():
            if item.is_dir() and item.name != "known":
                unused = time.time() - item.stat().st_mtime
                if unused > _KEEP_SECONDS:
                    shutil.rmtree(item, ignore_errors=True)

    def _lookup(self, request: str, find: Callable[[], Path]) -> Path:
        """The folder that a request has led to before; else what `find` says."""
        note = self.base / "known" / request
        if note.exists() and not self.refresh:
            folder = self.base / note.read_text()
            if folder.exists():
                os.utime(folder)
                return folder
        folder = find()
        new = note.with_name(f"{note.name}.{os.getpid()}")
        new.write_text(folder.name)
        new.rename(note)
        return folder


def _build_tools(lacking: Sequence[str], folder: Path) -> None:
    (folder / "root").mkdir()
    if lacking:
        say("unpacking for the guest: " + " ".join(lacking))
        unpack(download(lacking, folder / "debs"), folder / "root")
        shutil.rmtree(folder / "debs")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
