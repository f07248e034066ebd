"""Memory is lent again when no tensor shows it any more, and not before."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.runtime.rdt import pool as pools
from fabric_ray.runtime.rdt.exchange import Exchange
from tests.processes import within

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
    assert 0 < pools.default_limit() <= 4 << 30
