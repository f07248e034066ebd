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
