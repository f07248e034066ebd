"""What a user of the package sees over RDMA devices: a weight push, the doctor, a program's words.

An emulated CPU takes half a minute to import numpy and pydantic in two processes, so one boot does
all of it.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.boot import ROOT, guest_run, need_guest

PUSH = ROOT / "tests/rdma/programs/push.py"
RELAY = ROOT / "tests/rdma/programs/relay.py"
_DOCTOR = [str(Path(sys.executable).with_name("fabric-ray")), "doctor", "--json", "--budget", "60"]


def _script(folder: Path, steps: dict[str, str]) -> str:
    """Runs each step and keeps its output and status."""
    lines = []
    for name, command in steps.items():
        out = folder / name
        lines.append(f"( {command} ) >{out}.out 2>{out}.err; echo $? >{out}.status")
    return "\n".join(lines)


class _Steps:
    def __init__(self, folder: Path, stderr: str) -> None:
        self._folder = folder
        self._stderr = stderr

    def status(self, name: str) -> int:
        path = self._folder / f"{name}.status"
        if not path.exists():
            pytest.fail(f"{name} did not end:\n{self._stderr[-4000:]}")
        return int(path.read_text())

    def output(self, name: str) -> str:
        """What a step printed; fails if it failed."""
        status = self.status(name)
        text = (self._folder / f"{name}.out").read_text(errors="replace")
        if status:
            err = (self._folder / f"{name}.err").read_text(errors="replace")
            pytest.fail(f"{name} ended with {status}:\n{text[-3000:]}\n{err[-3000:]}")
        return text

    def findings(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """What the doctor found, by code, whatever its status."""
        self.status(name)
        report = json.loads((self._folder / f"{name}.out").read_text())
        codes: dict[str, list[dict[str, Any]]] = {}
        for finding in report["findings"]:
            codes.setdefault(finding["code"], []).append(finding)
        return codes


def _push(transport: str, a: str, b: str) -> str:
    return shlex.join([sys.executable, str(PUSH), transport, a, b])


def _run(steps: dict[str, str], folder: Path, *, rails: int, timeout: float) -> _Steps:
    need_guest("libfabric1")
    outcome = guest_run(
        ["sh", "-c", _script(folder, steps)],
        rails=rails,
        rw=[folder],
        packages=["libfabric1"],
        timeout=timeout,
    )
    return _Steps(folder, outcome.stderr)


@pytest.mark.rdma
def test_weights_are_pushed_over_two_rails(tmp_path: Path) -> None:
    push = _push("verbs", "rxe_h0r0,rxe_h0r1", "rxe_h1r0,rxe_h1r1")
    steps = _run({"push": push}, tmp_path, rails=2, timeout=300)
    said = steps.output("push")
    assert "transport verbs" in said
    assert "3 versions, every byte as expected" in said


@pytest.mark.rdma
def test_rollouts_pass_a_version_on_and_give_it_to_one_who_joins(tmp_path: Path) -> None:
    relay = shlex.join([sys.executable, str(RELAY), "verbs", "rxe_h0r0", "rxe_h1r0"])
    said = _run({"relay": relay}, tmp_path, rails=1, timeout=600).output("relay")
    assert "transport verbs" in said
    assert "4 rollouts at version 3, every byte as expected" in said


@pytest.mark.rdma
def test_the_doctor_sends_bytes_over_every_pair_and_names_seeded_faults(tmp_path: Path) -> None:
    doctor = shlex.join(_DOCTOR)
    # Root is exempt from the limit as long as it may lock everything.
    locked = "ulimit -l 64; setpriv --bounding-set=-ipc_lock"
    steps = _run(
        {
            "healthy": doctor,
            "down": f"ip link set h1r0 down; sleep 1; {doctor}; s=$?; ip link set h1r0 up; exit $s",
            "memlock": f"{locked} {doctor}",
            "nameless": f"ip addr flush dev h0r0; sleep 1; {doctor}",
        },
        tmp_path,
        rails=1,
        timeout=600,
    )
    healthy = steps.findings("healthy")
    assert steps.status("healthy") == 0, healthy
    sent = {f["subject"]: f["status"] for f in healthy["write"]}
    assert sent["verbs rxe_h0r0 to verbs rxe_h1r0"] == "ok"
    assert sent["verbs rxe_h1r0 to verbs rxe_h0r0"] == "ok"
    down = steps.findings("down")
    assert steps.status("down") == 1
    assert [f["subject"] for f in down["port-down"]] == ["rxe_h1r0 port 1"]
    assert "ip link set h1r0 up" in down["port-down"][0]["remedy"]
    assert steps.findings("memlock")["memlock"][0]["status"] == "fail"
    gids = [f for f in steps.findings("nameless")["gid"] if f["subject"].startswith("rxe_h0r0")]
    assert all("10.77" not in f["detail"] for f in gids)
