"""Registered memory stays where it is: no peer reaches freed memory, no tensor lacks what came."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as torch_processes

from fabric_ray import TransferEngine
from fabric_ray.compat.nixl import nixl_agent, nixl_agent_config
from fabric_ray.engine.memory import fix_storage
from fabric_ray.errors import InvalidArgument
from tests.processes import within

processes: Any = torch_processes  # untyped
Open = Callable[..., TransferEngine]


def shared(tensor: Any) -> bool:
    """Has torch move a tensor to memory that other processes may share."""
    return bool(tensor.share_memory_().is_shared())


MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "share_memory_": shared,
    "a queue's pickle": ForkingPickler.dumps,
    "a parameter of it": lambda t: shared(torch.nn.Parameter(t, requires_grad=False)),
    "a part of it": lambda t: ForkingPickler.dumps(t[1:3]),
}


@pytest.fixture(params=sorted(MOVES))
def move(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], Any]:
    return MOVES[request.param]


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategies(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """How torch shares memory now, and the other way."""
    before = processes.get_sharing_strategy()
    processes.set_sharing_strategy(request.param)
    [other] = {"file_descriptor", "file_system"} - {request.param}
    yield request.param, other
    processes.set_sharing_strategy(before)


def stays(tensor: torch.Tensor, move: Callable[[torch.Tensor], Any]) -> None:
    at = tensor.data_ptr()
    with pytest.raises(InvalidArgument, match="share_memory_"):
        move(tensor)
    assert tensor.data_ptr() == at


@pytest.mark.parametrize("as_array", [False, True])
def test_mr_1_ic_2_a_registered_tensor_does_not_move_away_from_what_peers_write(
    open_engine: Open, move: Callable[[torch.Tensor], Any], strategies: object, as_array: bool
) -> None:
    a, b = open_engine("a"), open_engine("b")
    tensor = torch.zeros(1000)
    array: Any = tensor.numpy()
    region = b.register(memoryview(array[10:]) if as_array else tensor[10:])
    stays(tensor, move)
    source, counter = a.alloc(region.nbytes), b.counter()
    source.tensor(torch.float32)[:] = 7
    a.write(source, a.import_region(region.descriptor()), imm=counter.ref).wait(10)
    counter.expect(1).wait(10)
    assert (tensor[10:] == 7).all()


def test_mr_1_an_array_is_not_resized_while_a_part_of_it_is_registered(open_engine: Open) -> None:
    array = np.zeros(1000, np.uint8)
    region = open_engine().register(array[100:200])
    with pytest.raises(ValueError, match="resize"):
        array.resize(1 << 20, refcheck=False)
    assert region.addr == array.ctypes.data + 100


@pytest.mark.parametrize("listed", [False, True])
def test_mr_1_tensors_that_an_agent_registered_stay_in_place(
    move: Callable[[torch.Tensor], Any], listed: bool
) -> None:
    agent = nixl_agent("a", nixl_agent_config(backends=["UCX"]))
    tensors = [torch.zeros(1000), torch.zeros(1000)]
    descs = agent.register_memory(agent.get_reg_descs(tensors) if listed else tensors)
    assert descs is not None
    for tensor in tensors:
        stays(tensor, move)
    agent.deregister_memory(descs)


def test_a_tensor_can_be_shared_when_its_registrations_have_ended(open_engine: Open) -> None:
    engine, tensor = open_engine(), torch.arange(1000.0)
    regions = [engine.register(tensor), engine.register(tensor[5:])]
    for region in regions:
        stays(tensor, shared)
        region.deregister()
    del region, regions

    def is_shared() -> bool:
        gc.collect()
        try:
            return shared(tensor)
        except InvalidArgument:
            return False

    within(10, "the end of the registrations", is_shared)
    assert tensor.equal(torch.arange(1000.0))


def test_a_shared_tensor_is_shared_again_only_as_it_was(
    open_engine: Open, strategies: tuple[str, str]
) -> None:
    tensor = torch.zeros(1000)
    shared(tensor)
    region = open_engine().register(tensor)
    ForkingPickler.dumps(tensor)
    assert region.addr == tensor.data_ptr()
    processes.set_sharing_strategy(strategies[1])
    stays(tensor, ForkingPickler.dumps)


def test_a_forked_child_may_move_its_copy(open_engine: Open) -> None:
    tensor = torch.zeros(1000)
    region = open_engine().register(tensor)
    child = os.fork()
    if not child:
        os._exit(not shared(tensor))
    assert os.waitpid(child, 0)[1] == 0
    assert region.addr == tensor.data_ptr()


def test_mr_1_a_gpu_storage_is_not_resized() -> None:
    # On the meta device, since there may be no GPU here.
    storage = torch.empty(1000, device="meta").untyped_storage()
    fixed = fix_storage(storage)
    storage.resize_(4000)
    with pytest.raises(InvalidArgument, match="registered"):
        storage.resize_(0)
    del fixed
    storage.resize_(0)
