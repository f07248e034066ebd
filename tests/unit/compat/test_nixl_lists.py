"""NIXL's lists of descriptors, prepared sides, and errors of an agent."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray import TransferEngine
from fabric_ray.compat.addresses import AddressSpace
from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config
from fabric_ray.compat.nixl.bindings import (
    DRAM_SEG,
    VRAM_SEG,
    descriptors_from_bytes,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotFoundError,
    nixlNotSupportedError,
    nixlRegDList,
    nixlXferDList,
)
from fabric_ray.compat.nixl.prepared import Prepared

ROWS = [(1000, 105, 0), (2000, 30, 1)]


def test_lists_travel_as_versioned_bytes() -> None:
    plain = nixlXferDList(VRAM_SEG, ROWS)
    labelled = nixlRegDList(DRAM_SEG, [(*row, f"label {row[0]}") for row in ROWS])
    for descs in (plain, labelled):
        again = descriptors_from_bytes(descs.to_bytes())
        assert type(again) is type(descs)
        assert again == descs
        assert pickle.loads(pickle.dumps(descs)) == descs
    assert labelled[1] == (2000, 30, 1, b"label 2000")
    assert labelled.trim() == nixlXferDList(DRAM_SEG, np.array(ROWS))
    assert plain != labelled.trim()


@given(st.binary(max_size=200))
def test_other_bytes_are_no_list_and_no_metadata(data: bytes) -> None:
    with pytest.raises(nixlMismatchError):
        descriptors_from_bytes(data)


@given(st.data())
def test_a_list_with_a_broken_byte_is_a_list_or_refused(data: st.DataObject) -> None:
    encoded = bytearray(nixlRegDList(DRAM_SEG, [(*row, "x") for row in ROWS]).to_bytes())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(nixlMismatchError):
        descriptors_from_bytes(bytes(encoded))


@pytest.mark.parametrize("desc", [(1, 2), (1, 2, 3, 4), [1, 2, 3], (-1, 2, 3), (1 << 64, 1, 1)])
def test_malformed_descriptors_are_refused(desc: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        nixlXferDList(DRAM_SEG, [desc])


def test_blocks_of_runs_are_numbered_through() -> None:
    with TransferEngine(name="runs", transport="shm") as engine:
        space = AddressSpace([(0, engine.alloc(4096)), (8192, engine.alloc(4096))])
        runs = np.array([[0, 16, 0, 64, 50], [8192, 8, 0, 8, 512], [100, 5, 0, 1, 1]])
        written = [
            (first + i * stride, nbytes)
            for first, nbytes, _, stride, count in runs.tolist()
            for i in range(count)
        ]
        side = Prepared(None, space, runs)
        places, nbytes = side.take()
        assert len(side) == len(written)
        first = space.first[places.region] + places.offset
        assert list(zip(first.tolist(), nbytes.tolist(), strict=True)) == written
        for bad in ([-1], [len(written)], [0.5], [[0]]):
            with pytest.raises(nixlInvalidParamError):
                side.take(np.array(bad))
        with pytest.raises(nixlNotFoundError):
            Prepared(None, space, np.array([[0, 16, 0, 64, 65]]))
        with pytest.raises(nixlInvalidParamError):
            Prepared(None, space, np.array([[0, 16, 0, 64, 0]]))


def test_errors_of_an_agent_name_the_cause() -> None:
    with pytest.raises(ValueError, match="name"):
        nixl_agent("")
    agent = nixl_agent("alone", nixl_agent_config(backends=[]))
    with pytest.raises(nixlInvalidParamError, match="create_backend"):
        agent.get_agent_metadata()
    with pytest.raises(nixlNotFoundError, match="UVX"):
        agent.create_backend("UVX")
    agent.create_backend("UCX", {"num_threads": "8"})
    with pytest.raises(nixlMismatchError, match="both ends"):
        agent.add_remote_agent(b"nixlSerDes|")
    with pytest.raises(nixlNotFoundError, match="unknown"):
        agent.send_notif("unknown", b"hello")
    with pytest.raises(nixlNotSupportedError, match="central"):
        agent.send_local_metadata()
    with pytest.raises(nixlNotSupportedError):
        agent.register_memory([(0, 4096, 3, "")], "FILE")
    agent.send_notif("alone", b"to myself")
    assert agent.get_new_notifs() == {"alone": [b"to myself"]}
    assert agent.get_new_notifs() == {}


def test_registering_all_or_nothing() -> None:
    agent = nixl_agent("careful")
    memory = np.zeros(4096, dtype=np.uint8)
    at = memory.ctypes.data
    good, bad = (at, 4096, 0, ""), (0, 4096, 0, "")
    with pytest.raises(nixlInvalidParamError):
        agent.register_memory([good, bad], "DRAM")
    descs = agent.get_reg_descs([good], "DRAM")
    assert descs is not None
    with pytest.raises(nixlNotFoundError):
        agent.deregister_memory(descs)
    agent.deregister_memory(agent.register_memory(descs))
    with pytest.raises(TypeError):
        agent.register_memory([at], "DRAM")
