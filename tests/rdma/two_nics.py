"""Native tests in the guest, between two NICs that must have carried them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from tests.rdma.binaries import cases_of, native_test
from tests.rdma.boot import guest_run, need_guest

_NICS = ("rxe_h0r0", "rxe_h1r0")
SECONDS = 200
TIMEOUT = 2 * (SECONDS + 60)
"""For the test: a guest that doesn't boot is tried twice."""


def passes_between_two_nics(
    tmp_path: Path, test: str, module: str, variables: Mapping[str, str]
) -> None:
    """Runs a module of an integration test; all of it passes, and both NICs send packets."""
    need_guest()
    binary = native_test(test)
    tests = cases_of(binary, module)
    assert len(tests) > 5
    nics = {"FABRIC_TEST_NICS_A": _NICS[0], "FABRIC_TEST_NICS_B": _NICS[1]}
    env = shlex.join(f"{key}={value}" for key, value in {**variables, **nics}.items())
    suite = shlex.join([str(binary), "--exact", "--test-threads", "1", *tests])
    counters = " ".join(
        f"/sys/class/infiniband/{nic}/ports/1/hw_counters/sent_pkts" for nic in _NICS
    )
    log, packets = tmp_path / "log", tmp_path / "packets"
    outcome = guest_run(
        ["sh", "-c", f"env {env} {suite} >{log} 2>&1; s=$?; cat {counters} >{packets}; exit $s"],
        rw=[tmp_path],
        timeout=SECONDS,
    )
    said = log.read_text(errors="replace") if log.exists() else outcome.stderr[-4000:]
    assert outcome.status == 0, f"{outcome.reason}\n{said[-6000:]}"
    assert f"test result: ok. {len(tests)} passed; 0 failed; 0 ignored" in said
    sent = [int(count) for count in packets.read_text().split()]
    assert all(count > 100 for count in sent), f"{_NICS} sent {sent} packets"
