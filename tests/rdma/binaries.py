"""Native programs for the guest, built outside: an emulated CPU would take forty times as long."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.rdma.boot import ROOT

NATIVE = ROOT / "native"


# TESTED_CRATES of the Makefile: with other crates, other features and everything built anew.
_WORKSPACE = ["--workspace", "--exclude", "fabric-microbench"]


@cache
def native_test(test: str) -> Path:
    """The executable of one integration test; in CARGO_TARGET_DIR if that is set."""
    return _executable(["test", "--no-run", *_WORKSPACE, "--test", test], test)


def cases_of(binary: Path, module: str) -> list[str]:
    """The names of a test binary's tests below a module, sorted; none of them is run."""
    done = subprocess.run(
        [str(binary), "--list", "--format", "terse"], capture_output=True, text=True, check=True
    )
    names = [line.removesuffix(": test") for line in done.stdout.splitlines()]
    return sorted(name for name in names if name.startswith(f"{module}::"))


def _executable(arguments: list[str], name: str) -> Path:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.fail("cargo is missing; scripts/check-tools says how to install it")
    done = subprocess.run(
        [cargo, *arguments, "--quiet", "--message-format", "json-render-diagnostics"],
        cwd=NATIVE,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.fail(f"cargo could not build {name}:\n{done.stderr[-6000:]}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or message["target"]["name"] != name:
            continue
        if message["executable"]:
            return Path(message["executable"])
    raise AssertionError(f"cargo built {name} and named no executable")
