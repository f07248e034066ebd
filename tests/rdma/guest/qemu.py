"""QEMU's command line, and whether KVM serves here."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rdma.guest.options import Options


def choose_accel(wanted: str) -> str:
    """`kvm` or `tcg`.

    /dev/kvm alone is no proof: there are hosts whose KVM has no support by the CPU and interprets a
    guest's kernel, far slower than QEMU's own emulation.
    """
    if wanted != "auto":
        return wanted
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return "tcg"
    return "kvm" if flags and {"vmx", "svm"} & set(flags.group(1).split()) else "tcg"


def die_with_parent() -> None:
    """In the child: end when this process ends, however it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def machine_arguments(
    options: Options, accel: str, kernel: Path, layers: Sequence[str]
) -> list[str]:
    """The CPU, the memory and what is started; `layers` are 9p tags, the uppermost first."""
    vmlinux = kernel / "vmlinux"
    image = vmlinux if vmlinux.exists() else kernel / "vmlinuz"
    append = [
        "console=ttyS0 panic=-1",
        f"rg.layers={','.join(layers)}",
        "mitigations=off random.trust_cpu=on net.ifnames=0",
        "" if options.verbose else "quiet loglevel=4",
        options.append,
    ]
    # Not five-level page tables: only slower where the CPU is emulated.
    cpu = (
        ["kvm", "-cpu", "host"] if accel == "kvm" else ["tcg,thread=multi", "-cpu", "max,la57=off"]
    )
    return [
        *("-accel", *cpu, "-M", "q35", "-smp", str(options.cpus), "-m", options.memory),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-kernel", str(image), "-initrd", str(kernel / "initramfs")),
        *("-append", " ".join(append)),
        *("-device", "virtio-serial-pci"),
    ]


def port_arguments(ports: Mapping[str, int]) -> list[str]:
    """A serial port of the guest for each file descriptor."""
    arguments = []
    for name, fd in ports.items():
        arguments += [
            *("-add-fd", f"fd={fd},set={fd}"),
            *("-chardev", f"file,id={name},path=/dev/fdset/{fd},append=on"),
            *("-device", f"virtserialport,chardev={name},name=rg.{name}"),
        ]
    return arguments


def folder_arguments(tag: str, path: Path, *, writable: bool) -> list[str]:
    comma = str(path).replace(",", ",,")
    mode = "" if writable else ",readonly=on"
    return [
        *("-fsdev", f"local,id={tag},path={comma},security_model=none,multidevs=remap{mode}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    ]
