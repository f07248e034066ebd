"""Grants: parts of a region for one peer, or for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fabric_ray import EngineAddress, Peer, Region, TransferEngine
from fabric_ray.errors import InvalidArgument, OutOfBounds, Refused

Open = Callable[..., TransferEngine]

NAMES: dict[str, Callable[[TransferEngine, TransferEngine], Peer | EngineAddress | str]] = {
    "peer": lambda owner, peer: owner.peer(peer.address),
    "address": lambda _, peer: peer.address,
    "id": lambda _, peer: peer.id,
}


def write(by: TransferEngine, to: Region, nbytes: int | None = None) -> None:
    there = by.import_region(to.descriptor())
    src = by.alloc(there.nbytes)
    src.numpy()[:] = 7
    by.write(src, there, nbytes).wait(10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_mr_3_a_grant_is_for_its_part_and_its_peer(
    open_engine: Open, transport: str, name: str
) -> None:
    owner, friend, other = (open_engine(n, transport=transport) for n in ("owner", "b", "c"))
    memory = owner.register(np.zeros(4096, np.uint8))
    grant = memory.grant(1024, 512, peer=NAMES[name](owner, friend))
    assert grant.nbytes == 512
    assert grant.addr == memory.addr + 1024
    with pytest.raises(Refused, match="granted to another engine"):
        write(other, grant)
    assert not memory.numpy().any()
    write(friend, grant)
    assert (memory.numpy()[1024:1536] == 7).all()
    assert int(memory.numpy().sum()) == 7 * 512


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"nbytes": 0}, InvalidArgument, "name at least one byte"),
        ({"offset": 4096}, InvalidArgument, "name at least one byte"),
        ({"offset": 4097}, OutOfBounds, "4097"),
        ({"ttl": 0}, InvalidArgument, "a ttl above 0"),
        ({"ttl": -1.0}, InvalidArgument, "a ttl above 0"),
        ({"ttl": float("nan")}, InvalidArgument, "a ttl above 0"),
        ({"peer": "b"}, InvalidArgument, "32 hex digits"),
        ({"peer": 7}, TypeError, "an EngineAddress"),
    ],
)
def test_what_can_not_be_granted_is_said(
    open_engine: Open, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    memory = open_engine().alloc(4096)
    with pytest.raises(error, match=says):
        memory.grant(**arguments)


def test_a_file_is_granted_by_registering_its_part(open_engine: Open, tmp_path: Any) -> None:
    engine = open_engine()
    region = engine.register_file(tmp_path / "spill", nbytes=4096, create=True)
    with pytest.raises(InvalidArgument, match="register that part of the file"):
        region.grant(0, 64)
