"""Two network namespaces of this machine, joined by a link of a given rate."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

ADDRESSES = ("10.98.0.1", "10.98.0.2")


@contextmanager
def shaped_link(gbps: float) -> Iterator[Sequence[str]]:
    """Yields the names of the namespaces; each end has its address of :data:`ADDRESSES`.

    Args:
        gbps: what each end may send, Gb/s; tc's token bucket holds it to that.
    """
    names = [f"bench{os.getpid()}{side}" for side in "ab"]
    # What passes between two ticks of the kernel's timer, 4 ms.
    burst = max(1 << 20, int(gbps * 1e9 / 8 * 0.004))
    try:
        for name in names:
            _ip(f"netns add {name}")
        _ip(f"-n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip(f"-n {name} addr add {address}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 mtu 9000 up")
            shape = f"tbf rate {gbps}gbit burst {burst} latency 50ms"
            _run(["tc", "-n", name, *f"qdisc add dev eth0 root {shape}".split()])
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip(f"netns del {name}")


def _ip(line: str) -> None:
    _run(["ip", *line.split()])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
