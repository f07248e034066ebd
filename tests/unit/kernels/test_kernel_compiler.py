"""Kernels compile for every architecture that is named, once for each machine."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from tests.lacks import lacks

BROKEN = Source("broken.cu", '#include "a.cuh"\n__global__ void f() { g(); }\n', (("a.cuh", ""),))
SMALL = Source("small.cu", 'extern "C" __global__ void f(int* x) { *x = 1; }\n', ())


#: So that four blocks of 256 threads fit beside one another: fewer keep too little on its way. Of
#: steps that are one launch there are two, with more on its way in each.
REGISTERS = 65536 // (4 * 256)
FEW_BLOCKS = {"moe/steps.cu": 2}
#: In an ELF file of machine code: an attribute of two words; those that count registers, and bytes
#: of a thread's stack.
TWO_WORDS, REGCOUNT, FRAME_SIZE = 4, 0x2F, 0x11


def attributes(code: bytes, wanted: int) -> dict[str, int]:
    """An attribute of each kernel and function, from ``.nv.info``."""

    def words(form: str, at: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{form}", code, at)

    def text(at: int) -> str:
        return code[at : code.index(b"\0", at)].decode()

    size, n, names = words("HHH", 58)
    # Of each section: its name, where it lies, its length, and the section of its names.
    every = [words("II8xQQQI", words("Q", 40)[0] + i * size) for i in range(n)]
    places = [place for _, _, _, place, _, _ in every]
    named = {text(places[names] + name): section for name, *section in every}
    _, _, symbols, _, of_symbols = named[".symtab"]
    _, _, at, length, _ = named[".nv.info"]
    taken, end = {}, at + length
    while at < end:
        form, attribute, value = words("BBH", at)
        at += 4
        if form != TWO_WORDS:
            continue
        if attribute == wanted:
            symbol, count = words("II", at)
            name = text(places[of_symbols] + words("I", symbols + 24 * symbol)[0])
            taken[name] = count
        at += value
    return taken


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
    kernels = {**structs.ARGUMENTS, **channel.ARGUMENTS}[file]
    taken = attributes(code, REGCOUNT)
    assert {*kernels} == {*taken}
    # What doesn't fit into registers would lie in memory.
    assert not any(attributes(code, FRAME_SIZE).values())
    if architecture == "sm_90a":
        assert max(taken.values()) <= REGISTERS * 4 // FEW_BLOCKS.get(file, 4), taken


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
