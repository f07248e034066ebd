"""The guest itself: its devices, its output and its ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rdma.boot import guest_run
from tests.rdma.guest.machine import EXIT_GUEST_FAILED, EXIT_TIMEOUT


@pytest.mark.rdma
def test_a_command_has_devices_a_folder_and_its_own_status(tmp_path: Path) -> None:
    script = (
        'echo "$RDMA_GUEST_DEVICES"; cat /sys/class/infiniband/*/ports/1/state; echo aside >&2; '
        f"ibv_devices >{tmp_path}/devices; exit 7"
    )
    outcome = guest_run(["sh", "-c", script], rails=2, rw=[tmp_path])
    assert outcome.status == 7, outcome.stderr
    devices = ["rxe_h0r0", "rxe_h1r0", "rxe_h0r1", "rxe_h1r1"]
    assert outcome.stdout.splitlines() == [" ".join(devices), *["4: ACTIVE"] * 4]
    assert "aside" in outcome.stderr
    seen = (tmp_path / "devices").read_text()
    assert [name for name in devices if name in seen] == devices


@pytest.mark.rdma
@pytest.mark.parametrize(
    ("command", "timeout", "status", "text"),
    [
        pytest.param(["/no/such/command"], 120, 127, "not found", id="no such command"),
        pytest.param(["sleep", "1000"], 20, EXIT_TIMEOUT, "time limit", id="time limit"),
        pytest.param(
            ["sh", "-c", "echo c >/proc/sysrq-trigger; sleep 60"],
            120,
            EXIT_GUEST_FAILED,
            "sysrq",
            id="the guest crashes",
        ),
    ],
)
def test_every_end_has_a_status_and_says_why(
    command: list[str], timeout: float, status: int, text: str
) -> None:
    outcome = guest_run(command, timeout=timeout)
    assert (outcome.status, text in outcome.stderr) == (status, True), outcome.stderr


@pytest.mark.rdma
def test_a_set_up_that_fails_is_no_guest(tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text("exit 1\n")
    outcome = guest_run(["true"], setup=setup)
    assert outcome.status == EXIT_GUEST_FAILED
    assert "--setup failed" in outcome.stderr


@pytest.mark.rdma
def test_a_host_has_a_network_namespace_of_its_own() -> None:
    command = ["ip", "netns", "exec", "host1", "ip", "-o", "-4", "address"]
    outcome = guest_run(command, options=["--netns"]).check()
    assert "10.78.0.2/" in outcome.stdout
    assert "10.78.0.1/" not in outcome.stdout
