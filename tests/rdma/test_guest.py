"""The guest itself: its devices, its output, its ends, and what faults look like there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rdma.boot import guest_run
from tests.rdma.guest.machine import EXIT_GUEST_FAILED, EXIT_TIMEOUT

SOURCE = Path(__file__).parent / "programs" / "write_imm.c"
# A completion had an error status, says write_imm.
FAILED_COMPLETION = 3


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


@pytest.mark.rdma_full
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


@pytest.mark.rdma_full
def test_a_set_up_that_fails_is_no_guest(tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text("exit 1\n")
    outcome = guest_run(["true"], setup=setup)
    assert outcome.status == EXIT_GUEST_FAILED
    assert "--setup failed" in outcome.stderr


@pytest.fixture(scope="module")
def write_imm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RDMA_WRITE_WITH_IMM` between two processes, every byte checked."""
    folder = tmp_path_factory.mktemp("programs")
    out = folder / SOURCE.stem
    compile_it = ["cc", "-O1", "-Wall", "-o", str(out), str(SOURCE), "-libverbs"]
    # Compiled in the guest, so that no header files have to be here.
    guest_run(compile_it, hosts=0, rails=0, rw=[folder], packages=["libibverbs-dev"]).check()
    return out


@pytest.mark.rdma_full
def test_writes_with_immediates_arrive_on_every_rail(write_imm: Path) -> None:
    script = (
        f"{write_imm} rxe_h0r0 rxe_h1r0 && {write_imm} rxe_h0r1 rxe_h1r1 -e && "
        f"{write_imm} rxe_h0r0 rxe_h0r0 -s 4096 -n 20"
    )
    outcome = guest_run(["sh", "-c", script], rails=2).check()
    assert outcome.stdout.count("all correct") == 6


@pytest.mark.rdma_full
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        pytest.param("ip link set h1r0 down", "transport retry counter exceeded", id="peer"),
        pytest.param("ip link set rail0 down", "transport retry counter exceeded", id="switch"),
        pytest.param("ip link set h0r0 down; sleep 0.2", "port error", id="own"),
    ],
)
def test_a_link_that_fails_ends_the_write(write_imm: Path, fault: str, text: str) -> None:
    outcome = guest_run([str(write_imm), "rxe_h0r0", "rxe_h1r0", "-x", fault])
    assert outcome.status == FAILED_COMPLETION, outcome.stderr
    assert text in outcome.stderr


@pytest.mark.rdma_full
def test_devices_serve_from_a_host_s_own_network_namespace(write_imm: Path) -> None:
    inside = [str(write_imm), "rxe_h0r0", "rxe_h1r0", "-n", "10"]
    command = ["ip", "netns", "exec", "host1", *inside]
    outcome = guest_run(command, options=["--netns"]).check()
    assert "all correct" in outcome.stdout
