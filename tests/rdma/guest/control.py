"""The folder that tells the guest what to do: scripts, environment and command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.guest.image import script
from tests.rdma.guest.network import network
from tests.rdma.guest.options import Options
from tests.rdma.guest.report import GuestError


@dataclass(frozen=True)
class Share:
    """A folder of this machine that the guest may write to, at its own path."""

    tag: str
    path: Path

    def mount(self) -> str:
        path = shlex.quote(str(self.path))
        options = "trans=virtio,version=9p2000.L,msize=512000,cache=mmap"
        return (
            f"$bb mkdir -p {path}; $bb mount -t 9p -o {options} {self.tag} {path} || "
            f"fail cannot mount {path}"
        )

    def unmount(self) -> str:
        path = shlex.quote(str(self.path))
        return f"$bb umount {path} 2>/dev/null || $bb umount -l {path}"


def shares(options: Options) -> list[Share]:
    """
    Raises:
        GuestError: for a folder that is not there.
    """
    found = []
    for index, folder in enumerate(options.rw):
        path = Path(folder).resolve()
        if not path.is_dir():
            raise GuestError(f"--rw {folder}: no such folder")
        found.append(Share(f"rw{index}", path))
    return found


def fill_control(
    folder: Path, options: Options, writable: list[Share], *, interactive: bool, failed: int
) -> None:
    """Writes what the guest's first process reads; `failed` is the status of no guest."""
    net = network(hosts=options.hosts, rails=options.rails, mtu=options.mtu, netns=options.netns)
    setup = ""
    if options.setup:
        path = shlex.quote(str(Path(options.setup).resolve()))
        setup = f"\n/bin/sh {path} >/dev/console 2>&1 || fail --setup failed"
    command = script("run.sh", {})
    if interactive:
        size = shutil.get_terminal_size()
        stty = f"$bb stty rows {size.lines} cols {size.columns}"
        command = script("shell.sh", {"STTY": stty})
    parts = {
        "SHARES": "\n".join(share.mount() for share in writable),
        "NETWORK": net.script + setup,
        "UNSHARE": "\n    ".join([*(share.unmount() for share in writable), "$bb sync"]),
        "COMMAND": command,
    }
    (folder / "stage2").write_text(script("stage2.sh", parts))
    (folder / "rdma-batch").write_text(net.rdma)
    told = {
        "RDMA_GUEST": "1",
        "RDMA_GUEST_HOSTS": str(options.hosts),
        "RDMA_GUEST_RAILS": str(options.rails),
        "RDMA_GUEST_DEVICES": " ".join(net.devices),
    }
    where = shlex.quote(options.cwd or os.getcwd())
    lines = [
        _environment(told),
        f"cd {where} || exit {failed}",
        "exec " + " ".join(shlex.quote(word) for word in options.command),
        "",
    ]
    (folder / "command").write_text("\n".join(lines))


def _environment(told: Mapping[str, str]) -> str:
    """Shell lines that set this process's environment, and what is told beyond it."""
    here = {key: value for key, value in os.environ.items() if key not in ("_", "SHLVL")}
    return "\n".join(
        f"export {key}={shlex.quote(value)}"
        for key, value in {**here, **told}.items()
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)
    )
