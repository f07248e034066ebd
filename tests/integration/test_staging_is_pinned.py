"""Staging memory for GPUs is pinned, whatever used it before (``tests/fake_gpu``)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fake_gpu import build

ROOT = Path(__file__).resolve().parents[2]

#: Files are staged first, at both ends, then GPU memory through the same staging memory.
STAGE = """
    import ctypes, sys
    from pathlib import Path

    cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    cuda.fake_registered.restype = ctypes.c_uint64
    assert cuda.cuInit(0) == 0

    from fabric_ray import TransferEngine

    NBYTES, RELAXED = 1 << 20, 2
    context, mode = ctypes.c_void_p(), ctypes.c_int(RELAXED)
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    kept = []

    def gpu(engine):
        address = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(NBYTES)) == 0
        kept.append(engine.register_address(address.value, NBYTES))
        return kept[-1]

    def file(engine, name):
        path = Path(sys.argv[3]) / name
        kept.append(engine.register_file(path, nbytes=NBYTES, create=True))
        return kept[-1]

    transport = sys.argv[2]
    with TransferEngine(transport=transport) as a, TransferEngine(transport=transport) as b:
        if transport == "file":
            a.write(file(a, "a"), a.import_region(file(a, "b").descriptor())).wait(30)
            assert cuda.fake_registered() == 0
            a.write(gpu(a), a.import_region(file(a, "b").descriptor())).wait(30)
        else:
            src, dst = a.alloc(NBYTES), b.alloc(NBYTES)
            a.write(src, a.import_region(file(b, "b").descriptor())).wait(30)
            a.write(file(a, "a"), a.import_region(dst.descriptor())).wait(30)
            assert cuda.fake_registered() == 0
            a.write(src, a.import_region(gpu(b).descriptor())).wait(30)
            a.write(gpu(a), a.import_region(dst.descriptor())).wait(30)
        print(cuda.fake_registered() >> 20)
    kept.clear()
    a = b = src = dst = None
    print(cuda.fake_registered())
"""


@pytest.mark.parametrize(("transport", "mib"), [("tcp", 16), ("shm", 16), ("file", 8)])
def test_staging_memory_that_files_used_first_is_pinned_for_a_gpu(
    transport: str, mib: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STAGE), str(build(tmp_path)), transport]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [str(mib), "0"], done.stdout + done.stderr
