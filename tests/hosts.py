"""Two hosts on one machine, as far as a program can tell, and a router between them.

Each has namespaces of its own for network, processes, names, mounts and IPC: no shared memory, no
common process ids, no common loopback interface. The router lets pass what goes to, or comes from,
the ports that are named, and drops everything else without a word, as firewalls do. It does so by
rules of routing, which need no netfilter.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Self

ADDRESSES = ("10.0.0.1", "10.0.0.2")
_ROUTERS = ("10.0.0.129", "10.0.0.130")


def missing() -> str | None:
    """Why there can be no such hosts here; ``None`` if there can."""
    if os.geteuid() != 0:
        return "network namespaces are root's"
    for tool in ("ip", "unshare", "nsenter", "sysctl", "bash"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    name = new_tag()
    try:
        ip(f"netns add {name}")
        ip(f"-n {name} rule add ipproto tcp dport 1-2 pref 9 blackhole")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here, or no rules of routing by port: {error.stderr.strip()}"
    finally:
        forget(name)
    return None


def new_tag() -> str:
    """A name for namespaces, with the id of this process, short enough for a host's."""
    return f"fr{os.getpid()}x{uuid.uuid4().hex[:4]}"


def sweep() -> None:
    """Removes the namespaces of tests that were killed."""
    folder = Path("/run/netns")
    for name in os.listdir(folder) if folder.is_dir() else ():
        owner = re.match(r"fr(\d+)x[0-9a-f]{4}[ABR]?$", name)
        if owner and not Path("/proc", owner[1]).exists():
            forget(name)


def forget(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        ip(f"netns del {name}")


def ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True)


class TwoHosts:
    """Hosts "A" and "B" at :data:`ADDRESSES`.

    Args:
        ports: the first and the last of each range that passes.
    """

    def __init__(self, ports: Sequence[tuple[int, int]]) -> None:
        self._ports = ports
        self._tag = new_tag()
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._inits: dict[str, int] = {}

    def __enter__(self) -> Self:
        sweep()
        try:
            self._wire()
            for host in "AB":
                self._settle(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """The first of each host."""
        return list(self._inits.values())

    @property
    def names(self) -> list[str]:
        """Of the namespaces of their networks."""
        return [f"{self._tag}{part}" for part in "ABR"]

    def _wire(self) -> None:
        router = f"{self._tag}R"
        for name in self.names:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        for host, own, via in zip("AB", ADDRESSES, _ROUTERS, strict=True):
            name = f"{self._tag}{host}"
            ip(f"-n {router} link add to{host} type veth peer name eth0 netns {name}")
            ip(f"-n {name} addr add {own}/32 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {router} addr add {via}/32 dev to{host}")
            ip(f"-n {router} link set to{host} up")
            ip(f"-n {name} route add {via}/32 dev eth0")
            ip(f"-n {name} route add default via {via} src {own}")
            ip(f"-n {router} route add {own}/32 dev to{host}")
        forward = ["ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1"]
        subprocess.run(forward, check=True)
        for first, last in self._ports:
            for side in ("dport", "sport"):
                ip(f"-n {router} rule add ipproto tcp {side} {first}-{last} pref 10 lookup main")
        ip(f"-n {router} rule add ipproto tcp pref 20 blackhole")

    def _settle(self, host: str) -> None:
        # Names must resolve without a server, or every look-up waits for one.
        hosts = "127.0.0.1 localhost\\n" + "".join(
            f"{address} {self._tag}{name}\\n" for name, address in zip("AB", ADDRESSES, strict=True)
        )
        script = (
            "set -e; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray;"
            "mount -t tmpfs tmpfs /dev/shm;"
            f"printf '{hosts}' >/tmp/ray/hosts; mount --bind /tmp/ray/hosts /etc/hosts;"
            ": >/tmp/ray/resolv; mount --bind /tmp/ray/resolv /etc/resolv.conf;"
            f"hostname {self._tag}{host}; echo up;"
            # The first process of a host reaps the others. It ends when the other end of its input
            # is closed, also if these tests were killed.
            "exec 3<&0; cat <&3 >/dev/null & wait $!"
        )
        apart = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        holder = subprocess.Popen(
            ["ip", "netns", "exec", f"{self._tag}{host}", "unshare", *apart, "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._holders[host] = holder
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        self._inits[host] = int(children.read_text().split()[0])

    def shell(self, host: str, script: str) -> list[str]:
        """The command that runs a script of bash on a host."""
        inside = ["nsenter", "-t", str(self._inits[host]), "-m", "-u", "-i", "-n", "-p", "--"]
        # What is typed as `fabric-ray`, `ray` and `python` is that of these tests.
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        return [*inside, "env", f"PATH={path}", "bash", "-euc", script]

    def close(self) -> None:
        """Ends all processes of both hosts."""
        for holder in self._holders.values():
            # --kill-child: with the first process of its namespace go all others.
            holder.kill()
            holder.wait()
            for end in (holder.stdin, holder.stdout):
                if end is not None:
                    end.close()
        for name in self.names:
            forget(name)
