"""Debian packages: asked of apt, downloaded without being installed, and unpacked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.guest.report import GuestError, say

# Of no use in the guest, and something depends on them.
_SKIP = {
    "rdma-core",
    "udev",
    "systemd",
    "systemd-sysv",
    "init-system-helpers",
    "lsb-base",
    "sysvinit-utils",
    "debconf",
    "libpam-modules",
}
_QEMU = "qemu-system-x86_64"
_PATIENT = ["-q", "-o", "Acquire::http::Timeout=30", "-o", "Acquire::https::Timeout=30"]

_updated = False


def tool(name: str) -> str | None:
    """The path of a program, also when PATH lacks the sbin folders."""
    system = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    return shutil.which(name) or shutil.which(name, path=system)


def need_apt() -> None:
    """
    Raises:
        GuestError: where packages can't be had.
    """
    for name in ("apt-get", "apt-cache", "dpkg", "dpkg-query"):
        if not tool(name):
            raise GuestError(
                f"{name} is missing; the guest is put together from Debian packages, so it "
                "needs Debian or a container of it"
            )


def need_qemu() -> str:
    """The QEMU program, installed if it is missing and that is permitted."""
    found = tool(_QEMU)
    if found:
        return found
    if os.geteuid() != 0:
        raise GuestError(
            f"{_QEMU} is missing; as root: apt-get install --no-install-recommends qemu-system-x86"
        )
    need_apt()
    say("installing qemu-system-x86")
    said = ""
    for _ in range(2):
        done = subprocess.run(
            ["apt-get", *_PATIENT, "-y", "install", "--no-install-recommends", "qemu-system-x86"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        said = done.stdout
        if done.returncode == 0 or not _update():
            break
    found = tool(_QEMU)
    if not found:
        raise GuestError(f"apt-get could not install qemu-system-x86:\n{said[-2000:]}")
    return found


def missing_packages(wanted: Sequence[str]) -> list[str]:
    """The wanted packages and all they need, less what is installed here."""
    todo, seen, missing = list(wanted), set(_SKIP), []
    while todo:
        package = todo.pop()
        if package in seen:
            continue
        seen.add(package)
        if not _installed(package):
            missing.append(package)
            todo += _depends(package)
    return sorted(missing)


def versions(packages: Sequence[str]) -> list[str]:
    """`Package:` and `Version:` lines, as apt would download them now."""
    if not packages:
        return []
    return re.findall(r"^(?:Package|Version): .*$", _show(*packages), re.M)


def kernel_package(packages: Sequence[str]) -> tuple[str, str]:
    """The first package that apt knows, with its version.

    A meta-package (`linux-image-amd64`) stands for the one it depends on.
    """
    need_apt()
    for _ in range(2):
        for package in packages:
            fields = dict(re.findall(r"^(Version|Depends): (.*)$", _show(package), re.M))
            if "Version" not in fields:
                continue
            real = re.search(r"\b(linux-image-\d[^\s,(]*)", fields.get("Depends", ""))
            if real and not re.match(r"linux-image-\d+\.\d+\.\d+", package):
                return kernel_package([real.group(1)])
            return package, fields["Version"]
        if not _update():
            break
    raise GuestError(
        f"apt knows no package {' or '.join(packages)}; if the package lists are missing, "
        "as root: apt-get update"
    )


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Downloads packages, which needs no root, and returns their paths."""
    need_apt()
    folder.mkdir(parents=True, exist_ok=True)
    said = ""
    for _ in range(2):
        # apt's own user may have no access to the folder.
        done = subprocess.run(
            ["apt-get", *_PATIENT, "-o", "APT::Sandbox::User=root", "download", *packages],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = done.stdout.strip()
        if done.returncode == 0:
            return sorted(folder.glob("*.deb"))
        if not _update():
            break
    raise GuestError(f"apt-get could not download {' '.join(packages)}:\n{said}")


def unpack(debs: Sequence[Path], tree: Path) -> None:
    """Unpacks packages into a folder laid out as this machine's root is."""
    tree.mkdir(parents=True, exist_ok=True)
    for deb in debs:
        subprocess.run(["dpkg", "-x", str(deb), str(tree)], check=True)
    # Where /lib is a link to usr/lib, a folder lib in a layer above would hide all of it.
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        here = tree / name
        if here.is_dir() and not here.is_symlink() and Path("/", name).is_symlink():
            _merge(here, tree / "usr" / name)
            shutil.rmtree(here)


def zstd(data: bytes) -> bytes:
    """Decompresses with zstd(1), from its Debian package if need be."""
    program = tool("zstd")
    with tempfile.TemporaryDirectory(prefix="rdma-guest-") as folder:
        if not program:
            unpack(download(["zstd"], Path(folder, "debs")), Path(folder, "root"))
            program = str(Path(folder, "root/usr/bin/zstd"))
        # After a kernel's frame there is its length, which zstd complains of.
        return subprocess.run(
            [program, "-dcq"], input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ).stdout


def _installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f=${Status}", package],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return done.returncode == 0 and b"install ok installed" in done.stdout


def _depends(package: str) -> list[str]:
    done = subprocess.run(
        ["apt-cache", "depends", "--important", package],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    names, alternative = [], False
    for line in done.stdout.splitlines():
        match = re.match(r"\s*(\|?)(?:Pre)?Depends:\s+(\S+)", line)
        if not match:
            continue
        # "|Depends: a" is followed by an alternative of a: take the first.
        if not alternative and not match.group(2).startswith("<"):
            names.append(match.group(2))
        alternative = bool(match.group(1))
    return names


def _show(*packages: str) -> str:
    return subprocess.run(
        ["apt-cache", "show", "--no-all-versions", *packages],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout


def _update() -> bool:
    """Refreshes the package lists, once, where that is permitted."""
    global _updated
    if _updated or os.geteuid() != 0:
        return False
    _updated = True
    say("apt-get update")
    done = subprocess.run(["apt-get", *_PATIENT, "update"], stdout=subprocess.DEVNULL)
    return done.returncode == 0


def _merge(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        there = target / item.name
        if item.is_dir() and not item.is_symlink():
            _merge(item, there)
        else:
            item.rename(there)
