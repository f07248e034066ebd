"""Where an engine listens: the addresses it tells, named ports, and transfers over each of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_ray import TransferEngine
from fabric_ray.engine import EngineConfig
from fabric_ray.errors import InvalidArgument, ResourceError
from fabric_ray.rpc import Server
from tests.ports import free_ports, has_ipv6

Open = Callable[..., TransferEngine]
TOKEN = b"of these tests"
ROOT = Path(__file__).parents[3]


Places = set[tuple[str, int]]
"""Addresses and ports."""
Listening = Callable[[], Places]


def all_listeners() -> Places:
    """Where this process listens over TCP."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(fd))
        except OSError:
            continue
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path("/proc/net", name).read_text().splitlines()[1:]:
            local, state, inode = (row.split()[i] for i in (1, 3, 9))
            if state != "0A" or f"socket:[{inode}]" not in mine:
                continue
            address, port = local.split(":")
            # Words of four bytes, each in the order of this machine.
            words = np.frombuffer(bytes.fromhex(address), dtype=">u4").astype("=u4")
            found.add((socket.inet_ntop(family, words.tobytes()), int(port, 16)))
    return found


@pytest.fixture
def listening() -> Listening:
    """Where this process listens that it didn't before the test."""
    before = all_listeners()
    return lambda: all_listeners() - before


def moves_bytes(a: TransferEngine, b: TransferEngine) -> None:
    """Counted writes, and a read."""
    rng = np.random.default_rng(9)
    src, dst, back = a.alloc(3 << 20), b.alloc(3 << 20), a.alloc(3 << 20)
    src.numpy()[:] = rng.integers(0, 256, src.nbytes, dtype=np.uint8)
    there, counter = a.import_region(dst.descriptor()), b.counter()
    half = src.nbytes // 2
    a.write(src, there, nbytes=half, imm=counter.ref, timeout=20)
    a.write(src, there, src_offset=half, dst_offset=half, nbytes=half, imm=counter.ref, timeout=20)
    counter.wait(2, timeout=20)
    assert (dst.numpy() == src.numpy()).all()
    a.read(there, back, timeout=20).wait(20)
    assert (back.numpy() == src.numpy()).all()


@pytest.mark.parametrize(
    "bind",
    [("127.0.0.1",), ("::1",), ("127.0.0.2",), ("127.0.0.1", "::1")],
    ids=" and ".join,
)
def test_bytes_go_over_the_addresses_that_are_bound(
    open_engine: Open, listening: Listening, bind: Any
) -> None:
    if "::1" in bind and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback interface")
    a = open_engine("a", transport="tcp", bind=bind)
    b = open_engine("b", transport="tcp", bind=bind)
    before = {address for address, _ in listening()}
    assert before == set(bind)
    moves_bytes(a, b)
    moves_bytes(b, a)


def test_an_engine_reaches_one_that_listens_by_ipv6_alone(open_engine: Open) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback interface")
    a = open_engine("a", transport="tcp", bind=("127.0.0.1",))
    b = open_engine("b", transport="tcp", bind=("::1",))
    moves_bytes(a, b)


def test_with_a_token_an_engine_listens_on_addresses_and_not_on_all(
    open_engine: Open, listening: Listening
) -> None:
    open_engine(transport="tcp", token=TOKEN)
    at = listening()
    assert len({port for _, port in at}) == 1
    addresses = {address for address, _ in at}
    assert "127.0.0.1" in addresses
    assert not addresses & {"0.0.0.0", "::"}


NEW_ADDRESS = """
ip link set lo up
ip link add one type veth peer name other
sysctl -qw net.ipv6.conf.one.dad_transmits=600
ip link set one up; ip link set other up
ip addr add 10.9.0.1/24 dev one
ip addr add fd09::1/64 dev one
ip -6 addr show dev one tentative | grep -q fd09::1
exec "$0" -c '
from fabric_ray import TransferEngine
from tests.unit.engine.test_where_it_listens import all_listeners
with TransferEngine(transport="tcp", token=b"t"):
    print(*{address for address, _ in all_listeners()})
'
"""


def test_an_address_whose_duplicates_are_still_looked_for_is_listened_on() -> None:
    apart = ["unshare", "--net", "bash", "-ec"]
    # In a namespace that can't be made, or has no IPv6, there is none.
    try:
        subprocess.run([*apart, NEW_ADDRESS.split("exec")[0]], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network of its own with IPv6 here: {error}")
    script = [*apart, NEW_ADDRESS, sys.executable]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"127.0.0.1", "10.9.0.1", "fd09::1"}, done.stderr


@pytest.mark.parametrize("every", ["0.0.0.0", "::"])
def test_all_addresses_are_listened_on_when_they_are_named(
    open_engine: Open, listening: Listening, every: str
) -> None:
    if every == "::" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    a = open_engine("a", transport="tcp", token=TOKEN, bind=(every, "127.0.0.1"))
    b = open_engine("b", transport="tcp", token=TOKEN)
    assert every in {address for address, _ in listening()}
    moves_bytes(a, b)
    moves_bytes(b, a)


def test_ports_that_are_named_are_taken_in_turn_and_given_back(
    open_engine: Open, listening: Listening
) -> None:
    first, last = free_ports(2)
    options: dict[str, Any] = {"transport": "tcp", "token": TOKEN, "ports": (first, last)}
    a, b = open_engine("a", **options), open_engine("b", **options)
    assert {port for _, port in listening()} == {first, last}
    with pytest.raises(
        ResourceError, match=rf"ports {first} to {last} at .*taken already; .*ports"
    ):
        open_engine("c", **options)
    # Not left out, although there are other transports: a firewall waits for these.
    with pytest.raises(ResourceError, match="taken already"):
        open_engine("c", **{**options, "transport": "auto"})
    moves_bytes(a, b)
    # Of a connection that is over, this end lingers for a minute.
    b.close()
    again = open_engine("b", **{**options, "ports": last})
    moves_bytes(a, again)


def test_the_environment_names_ports(
    open_engine: Open,
    listening: Listening,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, last = free_ports(2)
    monkeypatch.setenv("FABRIC_RAY_PORTS", f"{first} - {last}")
    assert EngineConfig.resolve(None, {}).ports == (first, last)
    open_engine(transport="tcp")
    assert listening() == {("127.0.0.1", first)}
    monkeypatch.setenv("FABRIC_RAY_PORTS", str(last))
    open_engine(transport="tcp")
    assert {port for _, port in listening()} == {first, last}


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ((9000, 8000), "name the first port, then the last"),
        ((0, 10), "greater than or equal to 1"),
        ((1, 65536), "less than or equal to 65535"),
        (70000, "less than or equal to 65535"),
        ("8000-", "give one port, or the first and the last: 20000-20099"),
        ("http", "give one port, or the first and the last: 20000-20099"),
        ((8000,), "[Ff]ield required"),
    ],
)
def test_what_is_no_range_of_ports_is_refused(ports: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"ports=.*{words}"):
        TransferEngine(ports=ports)


def test_an_rpc_server_takes_the_next_of_the_ports() -> None:
    first, last = ports = free_ports(2)
    options: dict[str, Any] = {"key": TOKEN, "bind": ["127.0.0.1"], "ports": ports}
    servers = [Server(bytes, **options), Server(bytes, **options)]
    try:
        assert [s.port for s in servers] == [first, last]
        with pytest.raises(ResourceError, match=f"ports {first} to {last}: .*more, in `ports`"):
            Server(bytes, **options)
    finally:
        for server in servers:
            server.close()
