"""Faults that need devices or a network to fail: the native tests `verbs`, in a guest.

Each of those tests bears the name of the promise that it holds. Those of the module `rails` need
two NICs on either side.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.rdma.binaries import cases_of, native_test
from tests.rdma.boot import guest_run, need_guest

MODULES = ("faults", "limits", "peers", "rails", "registrations", "shares")
_RAILS = 2


def _environment() -> list[str]:
    names = [",".join(f"rxe_h{host}r{rail}" for rail in range(_RAILS)) for host in (0, 1)]
    return [f"FABRIC_TEST_NICS_A={names[0]}", f"FABRIC_TEST_NICS_B={names[1]}"]


def _run(tests: list[str], folder: Path, timeout: float) -> None:
    need_guest()
    log = folder / "log"
    binary = native_test("verbs")
    # One at a time: they take links down.
    options = ["--exact", "--include-ignored", "--test-threads", "1"]
    command = shlex.join(["env", *_environment(), str(binary), *options, *tests])
    outcome = guest_run(
        ["sh", "-c", f"{command} >{log} 2>&1"], rails=_RAILS, rw=[folder], timeout=timeout
    )
    said = log.read_text(errors="replace") if log.exists() else outcome.stderr
    failed = [line for line in said.splitlines() if line.endswith("... FAILED")]
    assert outcome.status == 0, "\n".join([outcome.reason, *failed, said[-6000:]])
    assert f"test result: ok. {len(tests)} passed; 0 failed; 0 ignored" in said


@pytest.mark.rdma
@pytest.mark.parametrize("module", MODULES)
def test_every_fault_ends_as_promised(module: str, tmp_path: Path) -> None:
    tests = cases_of(native_test("verbs"), module)
    assert tests, f"the native tests have no module {module}"
    _run(tests, tmp_path, timeout=420)
