"""Several streams of one link use all links of a bundle, where one stream has one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from typing_extensions import Self

from fabric_ray import CounterRef, RegionDescriptor, TransferEngine
from tests import hosts

LINKS = 4
RATE = "400mbit"
"""Of each link: far less than a core sends."""
NBYTES = 48 << 20
ADDRESSES = {"A": "10.9.0.1", "B": "10.9.0.2"}
PATIENCE_S = 120


class Bundle:
    """Two namespaces with links between them. The ports of a connection choose its link, as in
    bonds and in networks with paths of equal cost."""

    def __init__(self) -> None:
        tag = hosts.new_tag()
        self._names = {end: tag + end for end in ADDRESSES}

    def __enter__(self) -> Self:
        hosts.sweep()
        try:
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wire(self) -> None:
        for end, name in self._names.items():
            hosts.ip(f"netns add {name}")
            hosts.ip(f"-n {name} link set lo up")
            hosts.ip(f"-n {name} addr add {ADDRESSES[end]}/32 dev lo")
            self.run(end, "sysctl -qw net.ipv4.fib_multipath_hash_policy=1")
        for n in range(LINKS):
            peer = f"type veth peer name m{n} netns {self._names['B']}"
            hosts.ip(f"-n {self._names['A']} link add m{n} {peer}")
        for at, (end, name) in enumerate(self._names.items()):
            for n in range(LINKS):
                hosts.ip(f"-n {name} addr add 10.9.{n + 1}.{at}/31 dev m{n}")
                hosts.ip(f"-n {name} link set m{n} up")
                self._shape(end, f"m{n}")
        for at, (end, name) in enumerate(self._names.items()):
            other = ADDRESSES["AB".replace(end, "")]
            hops = " ".join(f"nexthop via 10.9.{n + 1}.{1 - at} dev m{n}" for n in range(LINKS))
            hosts.ip(f"-n {name} route add {other}/32 src {ADDRESSES[end]} {hops}")

    def _shape(self, end: str, link: str) -> None:
        limits = f"rate {RATE} burst 256kb latency 20ms"
        try:
            self.run(end, f"tc qdisc add dev {link} root tbf {limits}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"links have no limits here: {error.stderr.strip()}")

    def run(self, end: str, command: str) -> str:
        inside = self.inside(end, *command.split())
        return subprocess.run(inside, check=True, capture_output=True, text=True).stdout

    def inside(self, end: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._names[end], *command]

    def start(self, end: str, streams: int) -> subprocess.Popen[str]:
        """This file as a program, at one end."""
        settings = {
            "FABRIC_RAY_TRANSPORT": "tcp",
            "FABRIC_RAY_BIND": ADDRESSES[end],
            "FABRIC_RAY_TOKEN": "of both ends of the bundle",
            "FABRIC_RAY_TCP_STREAMS": str(streams),
        }
        return subprocess.Popen(
            self.inside(end, sys.executable, __file__, end),
            env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def sent(self) -> list[int]:
        """Bytes that A has sent over each link."""
        counts = " ".join(f"/sys/class/net/m{n}/statistics/tx_bytes" for n in range(LINKS))
        return [int(count) for count in self.run("A", f"cat {counts}").split()]

    def close(self) -> None:
        for name in self._names.values():
            hosts.forget(name)


def receive() -> None:
    """Prints what the sender needs, then whether its bytes are right."""
    with TransferEngine() as engine:
        inbox, counter = engine.alloc(NBYTES), engine.counter()
        print(inbox.descriptor().to_bytes().hex(), counter.ref.to_bytes().hex(), flush=True)
        counter.wait(1, timeout=PATIENCE_S)
        print(inbox.numpy().tobytes() == content(), flush=True)
        input()


def send() -> None:
    """Prints the seconds that one write took."""
    descriptor, counter = input().split()
    with TransferEngine() as engine:
        source = engine.alloc(NBYTES)
        memoryview(source.numpy())[:] = content()
        there = engine.import_region(RegionDescriptor.from_bytes(bytes.fromhex(descriptor)))
        count = CounterRef.from_bytes(bytes.fromhex(counter))
        start = time.monotonic()
        engine.write(source, there, imm=count).wait(PATIENCE_S)
        print(time.monotonic() - start, flush=True)


def content() -> bytes:
    """`NBYTES` bytes of which no two pages are alike."""
    return b"".join(n.to_bytes(8, "little") * 512 for n in range(NBYTES // 4096))


@pytest.mark.parametrize("streams", [1, 12])
def test_streams_use_all_links_of_a_bundle(streams: int) -> None:
    if why := hosts.missing():
        pytest.skip(why)
    with Bundle() as bundle:
        target, writer = (bundle.start(end, streams) for end in "BA")
        assert target.stdout is not None
        told = target.stdout.readline()
        before = bundle.sent()
        seconds, _ = writer.communicate(told, PATIENCE_S)
        assert writer.returncode == 0
        shares = [(b - a) / NBYTES for a, b in zip(before, bundle.sent(), strict=True)]
        assert target.communicate("\n", PATIENCE_S)[0] == "True\n"
    print(f"{streams} streams: {NBYTES / float(seconds) / 1e6:.0f} MB/s, {shares}")
    if streams == 1:
        # All but handshakes and acknowledgements goes over the link of its stream.
        assert max(shares) > 0.95
    else:
        # Of 12 streams, a link has 10 by chance once in 7,000 runs.
        assert max(shares) < 0.8


if __name__ == "__main__":
    receive() if sys.argv[1] == "B" else send()
