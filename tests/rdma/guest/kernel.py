"""The guest's kernel: from its Debian package to what QEMU starts."""

from __future__ import annotations

import gzip
import lzma
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.guest.image import initramfs
from tests.rdma.guest.packages import download, unpack, zstd
from tests.rdma.guest.report import GuestError, say

# Each is loaded at the start, with what it depends on: for the root file system, for RDMA (rxe asks
# the crypto layer for crc32, which its module does not state), and for the interfaces. All others
# are loaded when something needs them.
_MODULES = (
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "dummy",
    "macvlan",
)
_VITAL = ("rdma_rxe", "9p", "overlay", "macvlan")

# Folders of the kernel package that no guest here needs (about 250 MB).
_PRUNE = (
    "sound",
    "drivers/gpu",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "drivers/scsi",
    "drivers/staging",
    "drivers/usb",
    "drivers/iio",
    "drivers/hwmon",
    "drivers/hid",
    "drivers/md",
    "drivers/isdn",
    "drivers/platform",
    "drivers/input",
)


def build_kernel(package: str, folder: Path) -> None:
    """Fills `folder` with the kernel, its modules and an initramfs."""
    say(f"downloading {package}")
    debs = download([package, "busybox-static"], folder / "debs")
    root = folder / "root"
    unpack([deb for deb in debs if not deb.name.startswith("busybox")], root)
    unpack([deb for deb in debs if deb.name.startswith("busybox")], folder / "bb")
    shutil.rmtree(folder / "debs")
    found = (folder / "bb").rglob("busybox")
    next(p for p in found if p.is_file() and p.parent.name == "bin").rename(folder / "busybox")
    shutil.rmtree(folder / "bb")
    shutil.rmtree(root / "usr/share/doc", ignore_errors=True)

    vmlinuz = next((root / "boot").glob("vmlinuz-*"))
    version = vmlinuz.name[len("vmlinuz-") :]
    places = (root / "usr/lib/modules" / version, root / "lib/modules" / version)
    modules = next(place for place in places if place.is_dir())
    for name in _PRUNE:
        shutil.rmtree(modules / "kernel" / name, ignore_errors=True)
    _depmod(folder, modules)

    image = direct_kernel(vmlinuz.read_bytes())
    if image:
        (folder / "vmlinux").write_bytes(image)
    else:
        vmlinuz.rename(folder / "vmlinuz")
    shutil.rmtree(root / "boot")
    ordered = Modules(modules).ordered(_MODULES)
    (folder / "initramfs").write_bytes(initramfs((folder / "busybox").read_bytes(), ordered))


def _depmod(folder: Path, modules: Path) -> None:
    """For modprobe in the guest; the package makes this when it is installed."""
    # Busybox's depmod wants the modules in BASE/lib/modules.
    view = folder / "view"
    (view / "lib").mkdir(parents=True)
    (view / "lib/modules").symlink_to(modules.parent)
    command = [str(folder / "busybox"), "depmod", "-b", str(view), modules.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(view)


def direct_kernel(compressed: bytes) -> bytes | None:
    """The uncompressed kernel of a bzImage, for QEMU to start directly.

    That saves the emulated CPU several seconds of decompression. None if it is not to be had; the
    bzImage works as well.
    """
    try:
        payload, length = struct.unpack_from("<II", compressed, 0x248)
        start = (compressed[0x1F1] + 1) * 512 + payload
        data = compressed[start : start + length]
        if data[:6] == b"\xfd7zXZ\0":
            image = lzma.LZMADecompressor().decompress(data)
        elif data[:2] == b"\x1f\x8b":
            image = zlib.decompressobj(31).decompress(data)
        elif data[:4] == b"\x28\xb5\x2f\xfd":
            image = zstd(data)
        else:
            return None
    except (OSError, EOFError, GuestError, lzma.LZMAError, zlib.error, struct.error):
        return None
    # A note of owner Xen, type 18 (XEN_ELFNOTE_PHYS32_ENTRY), tells QEMU where it begins.
    entry = rb"\x04\0\0\0[\x04\x08]\0\0\0\x12\0\0\0Xen\0"
    return image if image[:4] == b"\x7fELF" and re.search(entry, image) else None


class Modules:
    """The modules of one kernel: what they depend on, and their content."""

    def __init__(self, folder: Path) -> None:
        self._files = {_name(path.name): path for path in (folder / "kernel").rglob("*.ko*")}
        listing = folder / "modules.builtin"
        lines = listing.read_text().split() if listing.exists() else []
        self._builtin = {_name(Path(line).name) for line in lines}

    def ordered(self, names: Sequence[str]) -> list[tuple[str, bytes]]:
        """Name and content of the modules and of what they depend on, in order of loading."""
        ordered: list[tuple[str, bytes]] = []
        done: set[str] = set()

        def add(name: str, wanted_by: str | None = None) -> None:
            name = _name(name)
            if name in done or name in self._builtin:
                return
            done.add(name)
            if name not in self._files:
                if wanted_by:
                    raise GuestError(f"kernel module {name}, which {wanted_by} needs, is missing")
                if name in _VITAL:
                    raise GuestError(
                        f"this kernel has no module {name} (cloud kernels do not); choose another "
                        "with --kernel"
                    )
                # A kernel may have a feature under another name (crc32 has moved about): what is
                # really missing shows in the guest.
                return
            data = self._content(name)
            depends = re.search(rb"\0depends=([^\0]*)\0", data)
            for dependency in depends.group(1).decode().split(",") if depends else []:
                if dependency:
                    add(dependency, name)
            ordered.append((name, data))

        for name in names:
            add(name)
        return ordered

    def _content(self, name: str) -> bytes:
        path = self._files[name]
        data = path.read_bytes()
        if path.suffix == ".xz":
            return lzma.decompress(data)
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".zst":
            return zstd(data)
        return data


def _name(file: str) -> str:
    return file.split(".ko")[0].replace("-", "_")
