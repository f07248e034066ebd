"""Kernels compile for every architecture that is named, once for each machine."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fabric_ray.errors import CompileError, InvalidArgument, ResourceError
from fabric_ray.kernels import (
    ARCHITECTURES,
    Cache,
    Device,
    Nvrtc,
    channel,
    current_architecture,
    source,
    sources,
    structs,
)
from fabric_ray.kernels import cache as cache_module
from fabric_ray.kernels.sources import FOLDER, Source
from fabric_ray.kernels.structs import FLOATS
from tests.lacks import lacks
from tests.machine_code import Kernel, disassembled, kernels_of

BROKEN = Source("broken.cu", '#include "a.cuh"\n__global__ void f() { g(); }\n', (("a.cuh", ""),))
SMALL = Source("small.cu", 'extern "C" __global__ void f(int* x) { *x = 1; }\n', ())


THREADS = 256


@dataclass(frozen=True)
class Facts:
    """What must hold of a kernel's machine code on every architecture."""

    blocks: int
    """Of so many threads, fit on a multiprocessor beside one another."""
    loads: int
    """Of 16 bytes that a thread has on its way at a time: what moves rows has."""
    orders: frozenset[str]
    """How it orders memory, by names of ``ORDERS``: no weaker, and in no narrower scope."""
    wide: bool = True
    """Whether it stores rows by 16 bytes. Sums of half the width leave by 8."""


WAITS, PUSHES = frozenset({"load acquire.sys"}), frozenset({"fence sc.sys", "16-byte store.sys"})
#: Of steps that are one launch two blocks fit, so that one waits while another's runs, and two of
#: workers, each of which keeps as much on its way.
STEPS = Facts(2, 8, WAITS | PUSHES | {"add acq_rel.gpu"})
FACTS = {
    "run_steps": STEPS,
    **{f"sum_{of}_{to}": STEPS for of in FLOATS.values() for to in FLOATS.values()},
    **{f"sum_f32_{to}": replace(STEPS, wide=False) for to in ("bf16", "f16")},
    **{
        f"work_{of}": Facts(2, 8, WAITS | {"fence sc.sys", "store release.sys"})
        for of in FLOATS.values()
    },
    "push_commands": Facts(4, 0, WAITS | PUSHES, wide=False),
    "await_command": Facts(4, 0, WAITS, wide=False),
    "await_word": Facts(4, 0, WAITS, wide=False),
}


def facts_of(kernel: Kernel, wanted: Facts) -> Facts:
    """What holds of a kernel: equal to what is wanted, if no fact is weaker."""
    return Facts(
        min(kernel.resident(THREADS), wanted.blocks),
        kernel.loads_at_once,
        frozenset(kernel.orders),
        wide=kernel.wide_stores > 0,
    )


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    try:
        return Nvrtc()
    except CompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "architecture",
    # By every change for the one whose registers are counted.
    [
        pytest.param(name, marks=[] if name == "sm_90a" else [pytest.mark.long])
        for name in ARCHITECTURES
    ],
)
@pytest.mark.parametrize("file", sources())
def test_kernels_compile_for_every_architecture(
    compiler: Nvrtc, tmp_path: Path, file: str, architecture: str
) -> None:
    if architecture.rstrip("a") not in compiler.architectures():
        pytest.skip(f"NVRTC {compiler.version} doesn't know {architecture}")
    code = Cache(tmp_path, compiler).get(source(file), architecture).code
    assert code.startswith(b"\x7fELF")
    kernels = kernels_of(code)
    assert {*kernels} == {*{**structs.ARGUMENTS, **channel.ARGUMENTS}[file]}
    # What doesn't fit into registers would lie in memory.
    assert not any(kernel.frame for kernel in kernels.values())
    # Two blocks leave most of a multiprocessor's 164 KiB, or more, to other kernels.
    assert max(kernel.shared for kernel in kernels.values()) <= 16 << 10
    fit = {name: kernel.resident(THREADS) for name, kernel in kernels.items()}
    assert all(fit[name] >= FACTS[name].blocks for name in kernels), fit
    found = disassembled(code)
    assert {n: facts_of(k, FACTS[n]) for n, k in found.items()} == {n: FACTS[n] for n in found}


#: A kernel that does each of these once.
MOVES = Source(
    "moves.cu",
    """#include "common/blocks.cuh"
#include "common/fifo.cuh"
#include "common/rows.cuh"
using namespace fr;
struct Moves { u8* to; const u8* from; u64* meeting; u64* done; Fifo fifo; u32 nbytes; };
FR_KERNEL(moves, Moves) {
  copy_row(whole_warp(), p.to, p.from, p.nbytes);
  sync_blocks(p.meeting);
  Fifo fifo = p.fifo;
  u64 index;
  if (fifo.claim(1, &index)) fifo.publish(index, drain_command());
  store_release(p.done, 1);
}
""",
    tuple({**dict(source("moe/steps.cu").headers), **dict(source("moe/work.cu").headers)}.items()),
)
MOVED = Facts(1, 8, WAITS | PUSHES | {"add acq_rel.gpu", "store release.sys"})


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        *(
            pytest.param(right, wrong, marks=pytest.mark.long)
            for right, wrong in (
                ("FR_DEVICE Vec16 load_unit(const Vec16* from) { return load_stream(from); }", ""),
                ("FR_DEVICE void store_unit(Vec16* to, Vec16 value) { store_stream(to, value); }",
                 "FR_DEVICE void store_unit(Vec16* to, Vec16 value) { to->x = value.x; "
                 "to->y = value.y; to->z = value.z; to->w = value.w; }"),
                ("constexpr u32 DEPTH = 8;", "constexpr u32 DEPTH = 4;"),
                ("if (unit == 16)\n    done = copy_units<DEEP, Vec16>",
                 "if (unit == 16)\n    done = copy_units<DEEP, u32>"),
                ("ld.acquire.sys.global.u64", "ld.acquire.gpu.global.u64"),
                ("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64"),
                ("st.release.sys.global.u64", "st.relaxed.sys.global.u64"),
                ("atom.add.acq_rel.gpu.global.u64", "atom.add.relaxed.gpu.global.u64"),
                ("__threadfence_system()", "__threadfence()"),
                ("st.volatile.global.v2.u64 [%0], {%1, %2};",
                 "st.volatile.global.u64 [%0], %1; st.volatile.global.u64 [%0+8], %2;"),
            )
        ),
    ],
)  # fmt: skip
def test_a_weaker_instruction_is_seen(
    compiler: Nvrtc, tmp_path: Path, right: str, wrong: str
) -> None:
    headers = MOVES.headers
    if right:
        headers = tuple((name, text.replace(right, wrong)) for name, text in headers)
        assert headers != MOVES.headers
    code = Cache(tmp_path, compiler).get(replace(MOVES, headers=headers), "sm_90a").code
    (kernel,) = disassembled(code).values()
    assert (facts_of(kernel, MOVED) == MOVED) == (not right), facts_of(kernel, MOVED)


#: What a kernel's metadata say: bytes of a thread's stack and of its arguments, vectors spilled.
AMD_SIZES = re.compile(
    r"\.(private_segment_fixed_size|kernarg_segment_size|vgpr_spill_count): +(\d+)"
)


@pytest.mark.long
@pytest.mark.parametrize("file", sources())
def test_kernels_compile_for_amd_without_memory_of_each_thread(tmp_path: Path, file: str) -> None:
    compiler = shutil.which("hipcc")
    if compiler is None:
        lacks("FABRIC_RAY_HIPCC", "hipcc isn't installed: apt install hipcc, or install ROCm")
    out = tmp_path / "out.s"
    flags = "-x hip --offload-arch=gfx90a --offload-device-only -std=c++17 -O3 -Wall -Werror -S"
    # hipcc adds what a linker takes.
    unused = "-Wno-unused-command-line-argument"
    command = [compiler, *flags.split(), unused, "-I", FOLDER, "-o", out, FOLDER / file]
    subprocess.run(command, check=True, timeout=250)
    sizes: dict[str, list[int]] = {}
    for name, value in AMD_SIZES.findall(out.read_text()):
        sizes.setdefault(name, []).append(int(value))
    kernels = {**structs.ARGUMENTS, **channel.ARGUMENTS}[file]
    assert len(sizes["private_segment_fixed_size"]) == len(kernels)
    assert not any(sizes["private_segment_fixed_size"] + sizes["vgpr_spill_count"]), sizes
    least = min(ctypes.sizeof(taken) for taken in kernels.values())
    assert min(sizes["kernarg_segment_size"]) >= least, "the compiler left arguments out"


def test_every_kernel_is_launched() -> None:
    assert {*structs.ARGUMENTS, *channel.ARGUMENTS} == {*sources()}
    assert len({Path(name).stem for name in sources()}) == len(sources())


def test_a_source_that_does_not_compile_is_told_with_the_compilers_log(compiler: Nvrtc) -> None:
    with pytest.raises(CompileError, match=r"broken\.cu doesn't compile for sm_80") as error:
        compiler.compile(BROKEN, "sm_80")
    assert 'identifier "g" is undefined' in error.value.log
    assert error.value.log in str(error.value)
    with pytest.raises(CompileError, match="sm_1"):
        compiler.compile(SMALL, "sm_1")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_ray.kernels.nvrtc._candidates", lambda: ["libnot-there.so"])
    monkeypatch.delenv("FABRIC_RAY_NVRTC", raising=False)
    with pytest.raises(CompileError, match=r"pip install 'nvidia-cuda-nvrtc>=.*libnot-there"):
        Nvrtc()
    monkeypatch.setenv("FABRIC_RAY_NVRTC", "/nowhere/libnvrtc.so")
    with pytest.raises(CompileError, match=r"what FABRIC_RAY_NVRTC names.*nowhere"):
        Nvrtc()


def test_importing_kernels_needs_neither_torch_nor_a_compiler() -> None:
    program = (
        "import sys, fabric_ray.kernels as k\n"
        "k.sources(); k.source('moe/steps.cu')\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('torch' in sys.modules, 'nvrtc' in maps, 'libcuda' in maps)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_launched() -> None:
    with pytest.raises(ResourceError, match="need a CUDA GPU"):
        Device(0)
    with pytest.raises(ResourceError, match="need a CUDA GPU"):
        current_architecture(0)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"moe/nothing\.cu; there are .*moe/steps\.cu"):
        source("moe/nothing.cu")


def test_headers_of_headers_belong_to_a_source() -> None:
    names = [name for name, _ in source("common/channel.cu").headers]
    assert {"common/fifo.cuh", "common/command_layout.h", "common/vendor_cuda.cuh"} <= {*names}
    assert names == sorted(names)


def test_what_was_compiled_is_kept(compiler: Nvrtc, tmp_path: Path) -> None:
    cache = Cache(tmp_path, compiler)
    first, again = cache.get(SMALL, "sm_80"), Cache(tmp_path, compiler).get(SMALL, "sm_80")
    assert (first.cached, again.cached) == (False, True)
    assert first.code == again.code
    others = [
        cache.get(replace(SMALL, text=SMALL.text.replace("1", "2")), "sm_80"),
        cache.get(replace(SMALL, headers=(("x.cuh", ""),)), "sm_80"),
        cache.get(SMALL, "sm_90a"),
        cache.get(SMALL, "sm_80", ["--use_fast_math"]),
    ]
    assert not any(other.cached for other in others)
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_compiled_again(
    compiler: Nvrtc, tmp_path: Path, damage: bytes | None
) -> None:
    cache = Cache(tmp_path, compiler)
    code = cache.get(SMALL, "sm_80").code
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] if damage is None else damage)
    again = cache.get(SMALL, "sm_80")
    assert (again.cached, again.code) == (False, code)
    assert cache.get(SMALL, "sm_80").cached


COMPILE = """
import sys
from pathlib import Path
from fabric_ray.kernels import Cache, source
code = Cache(Path(sys.argv[1])).get(source("common/channel.cu"), "sm_90a").code
print(len(code))
"""


@pytest.mark.long
def test_many_compilers_at_a_time_leave_one_whole_entry(compiler: Nvrtc, tmp_path: Path) -> None:
    def one(_: int) -> str:
        command = [sys.executable, "-c", COMPILE, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout

    with ThreadPoolExecutor(4) as pool:
        lengths = {*pool.map(one, range(4))}
    cached = Cache(tmp_path, compiler).get(source("common/channel.cu"), "sm_90a")
    assert cached.cached
    assert lengths == {f"{len(cached.code)}\n"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_that_can_not_be_written_is_named(compiler: Nvrtc, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ResourceError, match="FABRIC_RAY_KERNEL_CACHE"):
        Cache(taken / "below", compiler).get(SMALL, "sm_80")


HOMELESS = """
import logging
from fabric_ray.kernels import Cache, Nvrtc
from fabric_ray.kernels.sources import Source

small = Source("small.cu", 'extern "C" __global__ void f(int* x) { *x = 1; }\\n', ())
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("fabric_ray.kernels").addHandler(handler)
cache = Cache()
first, second = (cache.get(small, "sm_80") for _ in range(2))
assert (first.cached, second.cached) == (False, True)
assert first.code == second.code
assert not cache.get(small, "sm_90").cached
(warning,) = heard
print(warning)
"""


@pytest.mark.parametrize("home", ["can't be written", "none"])
def test_without_a_home_kernels_are_kept_in_memory(
    compiler: Nvrtc, tmp_path: Path, home: str
) -> None:
    unset = (cache_module.VARIABLE, "XDG_CACHE_HOME", "HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", HOMELESS]
    if home == "none":
        # A user id that the password file doesn't have, as containers are given.
        stranger = ["unshare", "--user", "--map-user=12345"]
        if subprocess.run([*stranger, "true"], capture_output=True).returncode != 0:
            pytest.skip("this user may not make user namespaces")
        command = [*stranger, *command]
    else:
        (tmp_path / "file").write_text("")
        environment["HOME"] = str(tmp_path / "file")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert cache_module.VARIABLE in done.stdout


def test_the_cache_lies_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache_module.VARIABLE, str(tmp_path / "here"))
    assert Cache().folder == tmp_path / "here"
    monkeypatch.delenv(cache_module.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache().folder == tmp_path / "fabric-ray" / "kernels"
