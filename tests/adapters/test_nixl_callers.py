"""Code that calls NIXL, as it is published: NIXL's own Python layer, vLLM's transport, and every
call that vLLM and SGLang make."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fabric_ray.compat import shim_path
from fabric_ray.compat.nixl import bindings, nixl_agent, nixl_agent_config
from tests.adapters.sources import published
from tests.processes import Other, within

BLOCKS, BLOCK = 64, 4096


def their_api() -> ModuleType:
    """NIXL's published ``_api``, with these bindings in place of its own."""
    source = published("nixl_cu12", "nixl-cu12")
    assert source is not None
    package = ModuleType("their_nixl")
    package.__path__ = [str(source)]
    sys.modules["their_nixl"] = package
    sys.modules["their_nixl._bindings"] = package._bindings = bindings  # type: ignore[attr-defined]
    return importlib.import_module("their_nixl._api")


@pytest.fixture(autouse=True)
def without_nics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_RAY_TRANSPORT", "shm,tcp")


@pytest.fixture(scope="module")
def api() -> Iterator[ModuleType]:
    yield their_api()
    for name in [name for name in sys.modules if name.startswith("their_nixl")]:
        del sys.modules[name]


def test_the_agent_takes_what_nixls_takes(api: ModuleType) -> None:
    for kind in ("nixl_agent", "nixl_agent_config"):
        for name, theirs in vars(getattr(api, kind)).items():
            if not inspect.isfunction(theirs) or (name.startswith("_") and name != "__init__"):
                continue
            ours = getattr({"nixl_agent": nixl_agent}.get(kind, nixl_agent_config), name)
            if ours is nixl_agent.query_memory:  # and whatever else always raises
                continue
            wanted = list(inspect.signature(theirs).parameters)
            assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted, name


def calls(root: Path, receivers: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "nixl" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) in receivers
            ):
                yield node.func.attr, node


def test_every_call_of_vllm_and_sglang_is_taken() -> None:
    vllm = importlib.util.find_spec("vllm")
    sglang = published("sglang", "sglang")
    assert vllm is not None
    assert vllm.submodule_search_locations
    assert sglang is not None
    found = [
        *calls(Path(vllm.submodule_search_locations[0]), ("self.nixl_wrapper", "self._agent")),
        *calls(sglang / "srt" / "disaggregation" / "nixl", ("self.agent",)),
        *calls(sglang / "srt" / "mem_cache" / "storage" / "nixl", ("self.agent",)),
    ]
    names = {name for name, _ in found}
    assert {"prep_xfer_dlist", "make_prepped_xfer", "initialize_xfer", "get_new_notifs"} <= names
    for name, call in found:
        named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(getattr(nixl_agent, name)).bind(None, *call.args, **named)


def tier(connection: Connection, name: str, fill: int) -> None:
    """vLLM's transport for blocks of host memory; does as it is told."""
    os.environ["FABRIC_RAY_TRANSPORT"] = "shm,tcp"
    sys.path.insert(0, shim_path("nixl"))
    from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport

    memory = np.full((BLOCKS, BLOCK), fill, dtype=np.uint8)
    transport = NixlTransport(name, memoryview(memory), num_threads=2)
    assert transport.available
    connection.send((transport.get_agent_metadata(), transport.base_addr))
    while True:
        order, *args = connection.recv()
        if order == "meet":
            connection.send(transport.add_remote_peer(*args))
        elif order == "write":
            number = transport.write_blocks(*args)
            connection.send((number, *ended(transport, args[0])))
        elif order == "show":
            connection.send(memory[:, 0].tolist())
        elif order == "close":
            connection.send(transport.close())


def ended(transport: Any, peer: str) -> tuple[list[int], list[int], str | None]:
    """Polls until something is over; what."""
    polled: list[Any] = []

    def over() -> bool:
        polled.append(transport.poll(peer))
        return bool(polled[-1].done or polled[-1].failed or polled[-1].peer_fault)

    within(20, "the write", over)
    return list(polled[-1].done), list(polled[-1].failed), polled[-1].peer_fault


def test_vllms_transport_moves_blocks_and_names_a_dead_peer() -> None:
    with Other(tier, "left", 1) as left, Other(tier, "right", 2) as right:
        left.hear(120)
        metadata, base = right.hear(120)
        assert left.ask(("meet", "right", metadata, base, BLOCKS, BLOCK), 60) is None
        number, done, failed, fault = left.ask(("write", "right", [0, 5, 6], [63, 1, 2]))
        assert (done, failed, fault) == ([number], [], None)
        assert right.ask(("show",)) == [2, 1, 1] + [2] * 60 + [1]
        right.kill()
        number, done, failed, fault = left.ask(("write", "right", [0], [0]))
        assert not done
        assert fault == "NIXL_ERR_REMOTE_DISCONNECT"
        assert left.ask(("close",)) is None


PROGRAMS = os.environ.get("NIXL_SOURCES", "")


@pytest.mark.skipif(not PROGRAMS, reason="NIXL_SOURCES names no checkout of NIXL")
def test_nixls_own_tests_pass() -> None:
    paths = [shim_path("nixl"), *sys.path]
    environment = os.environ | {"PYTHONPATH": ":".join(paths)}
    # They count calls of a constructor that is below the layer that callers use.
    tests = ["test_nixl_api.py", "--deselect", "test_nixl_api.py::test_sync_mode_agent"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=Path(PROGRAMS) / "test" / "python",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout


OURS = """
import fabric_ray
a, b = (fabric_ray.TransferEngine(transport="shm") for _ in range(2))
with a, b:
    source, target = a.alloc(4096), b.alloc(4096)
    source.numpy()[:] = 7
    a.write(source, a.import_region(target.descriptor())).wait(20)
    assert (target.numpy() == 7).all()
"""
TORCH = """
import torch
assert float(torch.ones(4).sum()) == 4
"""
NIXL = """
from nixl_cu12._api import nixl_agent
agents = [nixl_agent(name) for name in ("one", "two")]
memory = bytearray(b"x" * 64), bytearray(64)
at = [np.frombuffer(m, dtype=np.uint8).ctypes.data for m in memory]
for agent, address in zip(agents, at):
    agent.register_memory([(address, 64, 0, "")], "DRAM")
agents[0].add_remote_agent(agents[1].get_agent_metadata())
descs = [agents[0].get_xfer_descs([(address, 64, 0)], "DRAM") for address in at]
handle = agents[0].initialize_xfer("WRITE", *descs, "two")
agents[0].transfer(handle)
while agents[0].check_xfer_state(handle) != "DONE":
    pass
assert memory[0] == memory[1]
agents[0].release_xfer_handle(handle)
agents[0].remove_remote_agent("two")
for agent, address in zip(agents, at):
    agent.deregister_memory(agent.get_reg_descs([(address, 64, 0, "")], "DRAM"))
del agent, agents, handle
"""


@pytest.mark.parametrize("order", [(OURS, TORCH, NIXL), (NIXL, TORCH, OURS), (TORCH, NIXL, OURS)])
def test_one_process_imports_and_uses_nixl_torch_and_this(order: tuple[str, ...]) -> None:
    source = published("nixl_cu12", "nixl-cu12")
    assert source is not None
    environment = os.environ | {"PYTHONPATH": ":".join([*sys.path, str(source.parent)])}
    # Without a GPU, NIXL 1.5.1 crashes when the interpreter ends, alone in its process as well.
    code = "import os\nimport numpy as np\n" + "".join(order * 2) + "\nos._exit(0)\n"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
