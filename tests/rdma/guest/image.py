"""What runs in the guest before the command: the initramfs and the scripts."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

_SCRIPTS = Path(__file__).parent / "scripts"
_APPLETS = ("sh", "mount", "insmod", "mkdir", "switch_root", "cp", "cat", "poweroff")


def script(name: str, fill: Mapping[str, str]) -> str:
    """A script of the folder `scripts`, with text in place of each `@NAME@`."""
    text = (_SCRIPTS / name).read_text()
    for key, value in fill.items():
        text = text.replace(f"@{key}@", value)
    return text


def initramfs(busybox: bytes, modules: Iterable[tuple[str, bytes]]) -> bytes:
    """A cpio archive: busybox, modules, and the program that runs first."""
    archive = _Archive()
    for folder in ("bin", "dev", "proc", "sys", "m", "l", "new"):
        archive.add(folder, stat.S_IFDIR | 0o755)
    archive.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive.add("bin/busybox", stat.S_IFREG | 0o755, busybox)
    for applet in _APPLETS:
        archive.add(f"bin/{applet}", stat.S_IFLNK | 0o777, b"busybox")
    names = []
    for name, data in modules:
        names.append(name)
        archive.add(f"m/{name}.ko", stat.S_IFREG | 0o644, data)
    init = script("init.sh", {"MODULES": " ".join(names)})
    archive.add("init", stat.S_IFREG | 0o755, init.encode())
    archive.add("TRAILER!!!", 0)
    return archive.content()


class _Archive:
    """cpio's "new ASCII" format, which the kernel unpacks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 1

    def add(
        self, name: str, mode: int, data: bytes = b"", *, device: tuple[int, int] = (0, 0)
    ) -> None:
        self._inode += 1
        raw = name.encode() + b"\0"
        numbers = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0)
        head = "070701" + "".join(f"{number:08X}" for number in numbers)
        for block in (head.encode() + raw, data):
            self._parts.append(block + b"\0" * (-len(block) % 4))

    def content(self) -> bytes:
        return b"".join(self._parts)
