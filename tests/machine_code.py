"""What NVRTC made of a file of kernels: its ELF, and its instructions by NVIDIA's disassembler."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.lacks import lacks

#: In an ELF file of machine code: an attribute of two words; those that count registers, and bytes
#: of a thread's stack.
_TWO_WORDS, _REGCOUNT, _FRAME_SIZE = 4, 0x2F, 0x11
#: Of a multiprocessor since sm_80. Each warp takes its registers by 256.
_REGISTERS, _BY = 65536, 256

_KERNEL = re.compile(r"\s*\.section\s+\.text\.(\w+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+\{?\s*(?:@!?U?P\w+ )?([A-Z][\w.]*)")
#: How memory is ordered, as SASS writes it: instructions behind one another, others that touch no
#: memory left out.
ORDERS = {
    "load acquire.sys": r"LDG\.E\.64\.STRONG\.SYS CCTL\.IVALL",
    "add acq_rel.gpu": r"MEMBAR\.ALL\.GPU ATOMG\.E\.ADD\.64\.STRONG\.GPU CCTL\.IVALL",
    "fence sc.sys": r"MEMBAR\.SC\.SYS",
    "store release.sys": r"MEMBAR\.ALL\.SYS STG\.E\.64\.STRONG\.SYS",
    "16-byte store.sys": r"MEMBAR\.SC\.SYS (CCTL\.IVALL )?STG\.E\.128\.STRONG\.SYS",
}
_MEMORY = re.compile(r"(LD|ST|ATOM|RED|MEMBAR|FENCE|CCTL)")


@dataclass
class Kernel:
    """A kernel's machine code."""

    registers: int
    """Of a thread."""
    frame: int
    """Bytes of a thread's stack: what did not fit into registers."""
    shared: int
    """Bytes of shared memory of a block."""
    instructions: list[str] = field(default_factory=list)
    """Their names with suffixes, and ``:`` where other code may jump to."""

    def resident(self, threads: int) -> int:
        """Blocks of so many threads for which a multiprocessor has the registers."""
        each = -(-self.registers * 32 // _BY) * _BY
        return _REGISTERS // each // (threads // 32)

    @property
    def orders(self) -> set[str]:
        """Of :data:`ORDERS`, those that it has."""
        touched = " ".join(name for name in self.instructions if _MEMORY.match(name))
        return {order for order, form in ORDERS.items() if re.search(rf"\b{form}\b", touched)}

    @property
    def loads_at_once(self) -> int:
        """Loads of 16 bytes that bypass L1, begun before anything is stored: at most so many."""
        most = now = 0
        for name in self.instructions:
            if name == "LDG.E.NA.128":
                now += 1
                most = max(most, now)
            elif name == ":" or name.startswith(("ST", "BRA")):
                now = 0
        return most

    @property
    def wide_stores(self) -> int:
        """Stores of 16 bytes that bypass L1."""
        return self.instructions.count("STG.E.NA.128")


def kernels_of(code: bytes) -> dict[str, Kernel]:
    """The kernels of a cubin, without their instructions."""

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
    found: dict[int, dict[str, int]] = {_REGCOUNT: {}, _FRAME_SIZE: {}}
    end = at + length
    while at < end:
        form, attribute, value = words("BBH", at)
        at += 4
        if form != _TWO_WORDS:
            continue
        if attribute in found:
            symbol, count = words("II", at)
            name = text(places[of_symbols] + words("I", symbols + 24 * symbol)[0])
            found[attribute][name] = count
        at += value
    registers, frames = found[_REGCOUNT], found[_FRAME_SIZE]

    def shared(name: str) -> int:
        section = named.get(f".nv.shared.{name}")
        return section[3] if section else 0

    return {
        name: Kernel(count, frames.get(name, 0), shared(name)) for name, count in registers.items()
    }


@functools.cache
def _disassembler() -> Path:
    found = shutil.which("nvdisasm")
    if found:
        return Path(found)
    for package in ("triton/backends/nvidia/bin", "nvidia/cu13/bin", "nvidia/cuda_nvdisasm/bin"):
        spec = importlib.util.find_spec(package.split("/")[0])
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder).parent / package / "nvdisasm"
            if path.exists():
                return path
    lacks("FABRIC_RAY_NVDISASM", "nvdisasm isn't installed: pip install triton")


def disassembled(code: bytes) -> dict[str, Kernel]:
    """The kernels of a cubin, with their instructions. Skips the test without a disassembler."""
    kernels = kernels_of(code)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [_disassembler(), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    into: list[str] = []
    for line in done.stdout.splitlines():
        if kernel := _KERNEL.match(line):
            into = kernels[kernel[1]].instructions
        elif instruction := _INSTRUCTION.match(line):
            into.append(instruction[1])
        elif line.startswith(".L_"):
            into.append(":")
    return kernels
