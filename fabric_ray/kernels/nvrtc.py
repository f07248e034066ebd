"""NVRTC, the compiler of kernels: a library that is looked for when it is first needed."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence

from fabric_ray.errors import CompileError
from fabric_ray.extras import how_to_install
from fabric_ray.kernels.sources import Source

#: Names a library to be used instead of those that are looked for.
VARIABLE = "FABRIC_RAY_NVRTC"
_MAJORS = (13, 12)


class Nvrtc:
    """The compiler.

    It is the library that ``FABRIC_RAY_NVRTC`` names, or that of torch's CUDA version if torch is
    imported, or the newest that is installed: with torch, as ``nvidia-cuda-nvrtc``, or with a
    toolkit.

    Raises:
        CompileError: there is none; the text says where it was looked for, and what installs it.
    """

    def __init__(self, path: str | None = None) -> None:
        named = path or os.environ.get(VARIABLE)
        tried = []
        for candidate in [named] if named else _candidates():
            try:
                self._library = ctypes.CDLL(candidate)
            except OSError as error:
                tried.append(f"{candidate}: {error}")
                continue
            self.path = candidate
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
            self.version = (major.value, minor.value)
            return
        hint = f"see what {VARIABLE} names" if named else how_to_install("cuda")
        raise CompileError(
            f"kernels can't be compiled without NVRTC; {hint} (tried {'; '.join(tried)})",
            log="",
        )

    def architectures(self) -> tuple[str, ...]:
        """What it compiles for, without the suffixes ``a`` and ``f``: ``sm_80`` and so on."""
        n = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(n))
        found = (ctypes.c_int * n.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(f"sm_{arch}" for arch in found)

    def compile(self, source: Source, architecture: str, options: Sequence[str] = ()) -> bytes:
        """Machine code (a cubin).

        Args:
            architecture: ``sm_90a``, for example.
            options: further ones of NVRTC's.

        Raises:
            CompileError: with the compiler's ``log``.
        """
        headers = [text.encode() for _, text in source.headers]
        names = [name.encode() for name, _ in source.headers]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.text.encode(),
            source.name.encode(),
            len(headers),
            (ctypes.c_char_p * len(headers))(*headers),
            (ctypes.c_char_p * len(names))(*names),
        )
        try:
            given = [option.encode() for option in (f"--gpu-architecture={architecture}", *options)]
            array = (ctypes.c_char_p * len(given))(*given)
            result = self._library.nvrtcCompileProgram(program, len(given), array)
            if result != 0:
                log = self._text(program, "nvrtcGetProgramLog").decode(errors="replace").strip()
                raise CompileError(
                    f"{source.name} doesn't compile for {architecture} with NVRTC "
                    f"{self.version[0]}.{self.version[1]} ({self._said(result)}):\n{log}",
                    log=log,
                )
            return self._text(program, "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, get: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{get}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(get, program, text)
        return text.raw.rstrip(b"\0") if get.endswith("Log") else text.raw

    def _said(self, result: int) -> str:
        return str(self._library.nvrtcGetErrorString(result).decode())

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise CompileError(f"{name} failed: {self._said(result)}", log="")


def _candidates() -> Iterator[str]:
    """Libraries to try, those of torch's CUDA version first: its driver runs what they compile."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    first = [int(cuda.split(".")[0])] if cuda else []
    for major in dict.fromkeys([*first, *_MAJORS]):
        yield from (*_in_packages(major), f"libnvrtc.so.{major}")
    yield "libnvrtc.so"
    yield "/usr/local/cuda/lib64/libnvrtc.so"


def _in_packages(major: int) -> Iterator[str]:
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        yield from sorted(glob.glob(f"{glob.escape(folder)}/*/lib/libnvrtc.so.{major}"))
