"""The device's end of the command FIFO, and waits, run on the processor."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Channel, Words
from fabric_ray.kernels.channel import add_command
from fabric_ray.kernels.sources import FOLDER
from tests import channel_kernels as checks
from tests.host_kernels import THREADS, Host, cxx


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    host = Host(tmp_path_factory.mktemp("channel"))
    host.library("common/channel.cu")
    return host


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 500])
def test_every_command_comes_once_and_whole(host: Host, n: int, at_once: bool) -> None:
    checks.check_push(host, "cpu", n=n, capacity=32, at_once=at_once)


@pytest.mark.parametrize("n", [1, 5, 200])
def test_warps_of_one_block_push_beside_one_another(tmp_path: Path, n: int) -> None:
    """The last warps have no command: they meet neither their own lanes nor the others."""
    checks.check_push(Host(tmp_path, threads=4 * THREADS), "cpu", n=n, capacity=32, at_once=True)


def test_a_full_fifo_is_never_written_over_and_the_wait_ends(host: Host) -> None:
    checks.check_full(host, "cpu")


def test_a_command_is_complete_when_the_host_says_so(host: Host) -> None:
    checks.check_wait_command(host, "cpu")


def test_rs_4_a_wait_for_a_word_always_ends(host: Host) -> None:
    checks.check_wait_word(host, "cpu")


def test_rs_1_a_table_comes_with_its_word_or_not_at_all(host: Host) -> None:
    checks.check_fetch(host, "cpu")


def test_mr_1_tokens_of_an_exchange_that_begins_too_early_are_none(host: Host) -> None:
    checks.check_begin(host, "cpu")


def test_a_command_comes_after_what_is_read_with_it(host: Host) -> None:
    checks.check_tell(host, "cpu")


@pytest.mark.parametrize("capacity", [0, 16, 33])
def test_a_capacity_that_can_not_be_is_refused(host: Host, capacity: int) -> None:
    with pytest.raises(InvalidArgument, match="power of two"):
        Channel(host, Words(0, 0, 0, capacity))
    with pytest.raises(InvalidArgument, match="no FIFO"):
        Channel(host).wait_command(None, None)  # type: ignore[arg-type]


#: As native/proxy lays them out: kind 60, flag 59, channel 54, rank 44, slot 32, and low half of
#: word 0; length 48, addend 32, and high half of word 1.
COMMANDS = {
    "write": (1 << 60 | 3 << 54 | 1023 << 44 | 7, 32767 << 48 | (1 << 32) - 1),
    "write_add": (
        2 << 60 | 1 << 59 | 31 << 54 | 5 << 44 | 4095 << 32 | 2,
        0 << 48 | 0xFFFE << 32 | 1,
    ),
    "add": (3 << 60 | 2 << 54 | 1 << 44 | 9 << 32 | 0xFFFFFFFD, 0xFFFFFFFF),
    "add_in_order": add_command(7, 3, (1 << 32) - 1),
    "drain": (4 << 60, 0),
    "drain_up_to": (4 << 60 | 1 << 59 | 5, 0),
    "barrier": (5 << 60 | 1 << 59 | 6 << 54, 0),
}
PROGRAM = """
#include "common/command.cuh"
using namespace fr;
extern "C" void encode(u64* words) {
  const Command all[] = {
    write_command(Target{1023, 3}, 7 * 16, (1ull << 36) - 16, 512 << 10),
    write_add_command(Target{5, 31}, 2 * 16, 16, 16, Add{4095, true, -2}),
    add_command(Target{1, 2}, Add{9, false, -3}),
    add_command(Target{7, 0}, Add{3, true, (1ll << 32) - 1}),
    drain_command(),
    drain_command((1ull << 32) + 5),
    barrier_command(6, true),
  };
  for (const Command& one : all)
    for (u64 word : one.words) *words++ = word;
}
"""


def test_the_layout_of_commands_is_the_proxys() -> None:
    """Field by field, kind by kind."""
    native = FOLDER.parents[1] / "native" / "proxy" / "src" / "command.rs"
    rust, header = native.read_text(), (FOLDER / "common" / "command_layout.h").read_text()
    ours = {name: int(value) for name, value in re.findall(r"#define FR_CMD_(\w+) (\d+)", header)}
    theirs = {
        name: int(value)
        for name, value in re.findall(
            r"const (WRITE|WRITE_ATOMIC|ATOMIC|DRAIN|BARRIER|UNIT): u64 = (\d+);", rust
        )
    }
    theirs["LAP_BIT"] = int(re.findall(r"const LAP: u64 = 1 << (\d+);", rust)[0])
    field = r'Field \{ name: "(\w+)", word: (\d+), shift: (\d+), bits: (\d+) \}'
    for name, *values in re.findall(field, rust):
        for what, value in zip(("WORD", "SHIFT", "BITS"), values, strict=True):
            theirs[f"{name.upper()}_{what}"] = int(value)
    assert ours == theirs


def test_commands_are_encoded_as_the_proxy_decodes_them(tmp_path: Path) -> None:
    compiler = cxx()
    (tmp_path / "encode.cc").write_text(PROGRAM)
    out = tmp_path / "encode.so"
    subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-I",
            FOLDER,
            "-o",
            out,
            tmp_path / "encode.cc",
        ],
        check=True,
        timeout=120,
    )
    words = (ctypes.c_uint64 * (2 * len(COMMANDS)))()
    ctypes.CDLL(str(out)).encode(words)
    pairs = dict(zip(COMMANDS, zip(words[::2], words[1::2], strict=True), strict=True))
    assert pairs == COMMANDS


@pytest.mark.parametrize("bad", [(1024, 0, 1), (0, 4096, 1), (0, 0, 1 << 32), (-1, 0, 1)])
def test_a_command_that_does_not_fit_is_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument, match="a command's"):
        add_command(*bad)
