"""Ports that no other program takes meanwhile, and addresses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_asked = 0


def free_ports(count: int = 1) -> tuple[int, int]:
    """The first and the last of neighbouring free ports, other ones at each call. They lie below
    those that the kernel chooses for sockets without a port."""
    global _asked
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Other processes of this machine begin elsewhere.
    first = 2000 + (os.getpid() * 16 + _asked) % (least - 2100)
    for base in range(first, least - count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for i, probe in enumerate(probes):
                probe.bind(("", base + i))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        _asked += base + count - first
        return base, base + count - 1
    raise RuntimeError(f"no {count} neighbouring ports are free from {first} on")


def has_ipv6() -> bool:
    """Whether the loopback interface has ``::1``."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
