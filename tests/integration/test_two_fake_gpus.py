"""Memory of two GPUs in one process, which are not there (``tests/fake_gpu``)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.fake_gpu import build

ROOT = Path(__file__).resolve().parents[2]

#: Writes from the memory of one GPU to that of the other.
WRITE = """
    import ctypes, sys

    cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    assert cuda.cuInit(0) == 0

    from fabric_ray import TransferEngine

    NBYTES, RELAXED = 1 << 20, 2

    def memory(device):
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        mode = ctypes.c_int(RELAXED)
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert cuda.cuCtxPushCurrent_v2(context) == 0
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(NBYTES)) == 0
        assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        return address.value

    with TransferEngine(transport="cuda_ipc") as a, TransferEngine(transport="cuda_ipc") as b:
        here = a.register_address(memory(0), NBYTES)
        there = b.register_address(memory(1), NBYTES)
        found = a.import_region(there.descriptor())
        for _ in range(3):
            a.write(here, found).wait()
        a.read(found, here).wait()
        print("staged", cuda.fake_staged_copies())
"""


def test_copies_between_gpus_go_straight(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITE), str(build(tmp_path))],
        cwd=ROOT,
        env={**os.environ, "FABRIC_RAY_FAKE_GPUS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "staged 0\n"


#: Of each process: one of its GPUs has a context.
CONTEXT = """
    import ctypes, pickle, subprocess, sys

    cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    assert cuda.cuInit(0) == 0
    NBYTES, RELAXED = 1 << 20, 2
    context, address, mode = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(RELAXED)

    def use(device):
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert cuda.cuCtxPushCurrent_v2(context) == 0
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def is_used(device):
        active, flags = ctypes.c_int(), ctypes.c_uint()
        cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        return active.value

    from fabric_ray import TransferEngine
"""

#: Memory of the last of three GPUs, for a process that sees two.
OWNER = (
    CONTEXT
    + """
    use(2)
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(NBYTES)) == 0
    cuda.fake_bytes.restype = ctypes.c_void_p
    with TransferEngine(transport="cuda_ipc", token=b"gpus") as engine:
        region = engine.register_address(address.value, NBYTES)
        given = pickle.dumps(region.descriptor()).hex()
        other = ["env", "FABRIC_RAY_FAKE_GPUS=2", sys.executable, "-c", *sys.argv[2:0:-1], given]
        subprocess.run(other, check=True)
        print(ctypes.string_at(cuda.fake_bytes(address), NBYTES) == b"7" * NBYTES)
"""
)

WRITER = (
    CONTEXT
    + """
    use(1)
    with TransferEngine(transport="cuda_ipc", token=b"gpus") as engine:
        source = engine.alloc(NBYTES)
        source.numpy()[:] = ord("7")
        target = engine.import_region(pickle.loads(bytes.fromhex(sys.argv[2])))
        engine.write(source, target).wait(60)
    print(is_used(0), is_used(1))
"""
)


def test_memory_of_a_gpu_that_a_process_does_not_see_takes_one_that_it_uses(tmp_path: Path) -> None:
    owner, writer = textwrap.dedent(OWNER), textwrap.dedent(WRITER)
    done = subprocess.run(
        [sys.executable, "-c", owner, str(build(tmp_path)), writer],
        cwd=ROOT,
        env={**os.environ, "FABRIC_RAY_FAKE_GPUS": "3", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "0 1\nTrue\n"
