"""Memory that another process has exported, as torch's queues hand it on (``tests/fake_gpu``)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.fake_gpu import build

ROOT = Path(__file__).resolve().parents[2]

#: Hands its memory to a process that registers it, and says what came there.
OWN = """
    import ctypes, subprocess, sys

    NBYTES, RELAXED = 1 << 20, 2
    cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    assert cuda.cuInit(0) == 0
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
    handle = (ctypes.c_char * 64)()
"""

EXPORT = (
    OWN
    + """
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(NBYTES)) == 0
    assert cuda.cuIpcGetMemHandle(handle, address) == 0
    cuda.fake_bytes.restype = ctypes.c_void_p
    other = [sys.executable, "-c", sys.argv[2], sys.argv[1], "", handle.raw.hex()]
    subprocess.run(other, check=True)
    print(ctypes.string_at(cuda.fake_bytes(address), NBYTES) == b"7" * NBYTES)
"""
)

#: Registers memory that it has imported; another engine writes to it.
IMPORT = (
    OWN
    + """
    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 64)]

    given = Handle.from_buffer_copy(bytes.fromhex(sys.argv[3]))
    assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, 1) == 0
    from fabric_ray import TransferEngine

    ways = "cuda_ipc,shm"
    with TransferEngine(transport=ways) as a, TransferEngine(transport=ways) as b:
        region = a.register_address(address.value, NBYTES)
        source = b.alloc(NBYTES)
        source.numpy()[:] = ord("7")
        b.write(source, b.import_region(region.descriptor())).wait(60)
"""
)


def test_memory_that_this_process_can_not_export_is_staged(tmp_path: Path) -> None:
    own, other = textwrap.dedent(EXPORT), textwrap.dedent(IMPORT)
    done = subprocess.run(
        [sys.executable, "-c", own, str(build(tmp_path)), other],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "True\n"
