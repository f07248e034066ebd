"""Memory is lent again when no tensor shows it any more, and not before."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.runtime.rdt import pool as pools
from fabric_ray.runtime.rdt.exchange import Exchange
from fabric_ray.runtime.rdt.machine import memory_bytes
from tests.processes import within
from tests.unit.rdt.conftest import opened

N = 1 << 20


def lent(exchange: Exchange, n: int = N) -> torch.Tensor:
    found = exchange.pool.lend((n,), torch.uint8)
    assert found is not None
    assert found[1].nbytes == n
    return found[0]


def test_memory_comes_again_when_the_last_view_of_it_is_gone(reader: Exchange) -> None:
    tensor = lent(reader)
    address, view = tensor.data_ptr(), tensor[5:].view(-1)
    del tensor
    other = lent(reader)
    assert other.data_ptr() != address
    del view
    assert reader.pool.idle_bytes == N
    assert lent(reader).data_ptr() == address


def test_numpy_keeps_it_as_well(reader: Exchange) -> None:
    array = lent(reader).numpy()
    assert reader.pool.idle_bytes == 0
    del array
    assert reader.pool.idle_bytes == N


def test_no_more_lies_idle_than_the_limit(reader: Exchange) -> None:
    tensors = [lent(reader, 24 << 20) for _ in range(3)]
    tensors.clear()
    assert reader.pool.idle_bytes == 48 << 20
    within(10, "the third's end", lambda: reader.engine.stats()["regions"] == 2)


def test_a_tensor_has_its_shape_and_dtype(reader: Exchange) -> None:
    found = reader.pool.lend((3, 256, 100), torch.bfloat16)
    assert found is not None
    assert found[0].shape == (3, 256, 100)
    assert found[0].dtype == torch.bfloat16
    assert found[0].is_contiguous()


def test_small_tensors_have_memory_of_their_own(reader: Exchange) -> None:
    assert reader.pool.lend((pools.SMALLEST - 1,), torch.uint8) is None
    assert reader.pool.lend((0, 1 << 30), torch.uint8) is None


@given(st.integers(pools.SMALLEST, 1 << 40))
def test_a_block_holds_what_it_is_for_and_an_eighth_more_at_most(nbytes: int) -> None:
    assert nbytes <= pools.capacity(nbytes) <= nbytes + nbytes // 8 + 4096
    assert pools.capacity(pools.capacity(nbytes)) == pools.capacity(nbytes)


def test_threads_never_share_a_block(reader: Exchange) -> None:
    torn = []

    def use(value: int) -> None:
        for _ in range(200):
            tensor = lent(reader)
            tensor[:64] = value
            tensor[-64:] = value
            if not bool((tensor[:64] == value).all() and (tensor[-64:] == value).all()):
                torn.append(value)

    threads = [threading.Thread(target=use, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn
    assert reader.pool.idle_bytes <= 8 * N  # each has its last when it takes the next


def test_the_limit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pools.LIMIT_VARIABLE, "1000")
    assert pools.default_limit() == 1000
    monkeypatch.delenv(pools.LIMIT_VARIABLE)
    assert 0 < pools.default_limit() <= 2 << 30


def test_new_sizes_drive_out_what_has_lain_idle_longest(reader: Exchange) -> None:
    old = [lent(reader, 16 << 20) for _ in range(4)]  # all that may lie idle
    addresses = [tensor.data_ptr() for tensor in old]
    while old:
        old.pop(0)
    new = lent(reader, 24 << 20)
    address = new.data_ptr()
    del new
    assert reader.pool.idle_bytes == (24 << 20) + 2 * (16 << 20)
    assert lent(reader, 24 << 20).data_ptr() == address
    again = [lent(reader, 16 << 20) for _ in range(2)]
    assert {tensor.data_ptr() for tensor in again} == set(addresses[2:])


def test_a_block_beyond_the_limit_drives_out_nothing(reader: Exchange) -> None:
    lent(reader)
    lent(reader, 128 << 20)
    assert reader.pool.idle_bytes == N


def test_a_closed_exchange_keeps_no_memory_and_is_not_kept(reader: Exchange) -> None:
    exchange = opened("closed")
    tensor = lent(exchange)
    lent(exchange, 2 * N)
    exchange.close()
    assert exchange.pool.idle_bytes == 0
    del tensor
    assert exchange.pool.idle_bytes == 0
    alive = weakref.ref(exchange)
    del exchange
    gc.collect()
    assert alive() is None


V2 = {"proc/self/cgroup": "0::/pod/actor"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/pod/actor\n0::/"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (V2 | {"sys/fs/cgroup/pod/actor/memory.max": "4096"}, 4096),
        (V2 | {"sys/fs/cgroup/pod/memory.max": "8192"}, 8192),
        (V2 | {"sys/fs/cgroup/memory.max": "4096"}, 4096),
        (V1 | {"sys/fs/cgroup/memory/pod/actor/memory.limit_in_bytes": "4096"}, 4096),
        (V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "8192"}, 8192),
        (V2 | {"sys/fs/cgroup/pod/actor/memory.max": "max"}, None),
        ({}, None),
    ],
)
def test_what_a_container_may_use_counts_not_what_the_machine_has(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(tmp_path) == (limit or machine)
