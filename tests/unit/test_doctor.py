"""What the doctor says about this machine, and about seeded faults."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fabric_ray import TransferEngine
from fabric_ray.cli.findings import show
from fabric_ray.doctor import Finding, Report, examine
from fabric_ray.doctor.devices import Gid, Library, Offer, Port, Survey, devices, nowhere
from fabric_ray.doctor.examine import links
from fabric_ray.doctor.system import device_files, hugepages, memlock, ptrace, system
from fabric_ray.doctor.writes import Link, writes

FOREVER = resource.RLIM_INFINITY
HERE = Library(found=True, what="libibverbs.so.1")
MISSING = Library(found=False, what="libibverbs.so.1 can't be used: no such file")
GOOD = Gid(3, "10.0.0.1", "RoCE v2", "eth2", chosen=True, why="RoCE v2 over IPv4")
BAD = Gid(0, "fe80::1", "RoCE v1", "eth2", chosen=False, why="RoCE v1 is not routed")


def port(state: str = "ACTIVE", *, chosen: bool = True, gids: tuple[Gid, ...] = (GOOD,)) -> Port:
    return Port("mlx5_0", 1, state, "Ethernet", chosen=chosen, why="because", gids=gids)


def found(*ports: Port, verbs: Library = HERE, offers: tuple[Offer, ...] = ()) -> Survey:
    return Survey(verbs, ports, MISSING, offers)


def named(survey: Survey, code: str) -> Finding:
    return next(f for f in devices(survey) if f.code == code)


def test_bytes_go_over_every_transport_of_this_machine() -> None:
    report = examine(budget=20)
    assert report.healthy, report
    sent = {f.subject: f for f in report.findings if f.code == "write"}
    for transport in ("shm", "tcp"):
        assert sent[transport].status == "ok"
        assert "every byte compared" in sent[transport].detail


class TokenPerEngineLink(Link):
    """Both engines open, and neither lets the other in."""

    def open(self, name: str, token: bytes, timeout: float, **options: Any) -> TransferEngine:
        return super().open(name, secrets.token_bytes(16), timeout, **options)


def test_a_write_that_fails_says_why_its_sender_could_not_send() -> None:
    (finding,) = writes([TokenPerEngineLink("tcp")], 20)
    assert (finding.code, finding.status, finding.subject) == ("write", "fail", "tcp")
    assert "token" in finding.detail


def test_a_link_that_can_not_be_opened_is_named() -> None:
    (finding,) = writes([Link("verbs", "no_such_device")], 5)
    assert (finding.code, finding.status, finding.subject) == (
        "open",
        "fail",
        "verbs no_such_device",
    )
    assert "verbs" in finding.detail


def test_time_that_is_over_is_no_success() -> None:
    findings = list(writes([Link("shm")], 1e-9))
    assert [f.status for f in findings if f.code == "write"] == ["fail"]


def test_ports_that_are_named_are_not_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("FABRIC_RAY_PORTS", str(taken.getsockname()[1]))
        (finding,) = writes([Link("tcp")], 20)
    assert finding.status == "ok", finding


@pytest.mark.parametrize(
    ("survey", "code", "status", "words"),
    [
        (found(port(), verbs=MISSING), "libibverbs", "fail", "ibverbs-providers"),
        (found(verbs=MISSING), "libibverbs", "absent", ""),
        (found(port("DOWN", chosen=False)), "port-down", "fail", "ip link set eth2 up"),
        (found(port(chosen=False, gids=(BAD,))), "no-gid", "fail", "gid_index"),
        (found(port(chosen=False)), "port", "absent", ""),
        (found(port()), "port", "ok", ""),
        (found(), "devices", "absent", ""),
    ],
)
def test_faults_of_nics_are_named(survey: Survey, code: str, status: str, words: str) -> None:
    finding = named(survey, code)
    assert finding.status == status
    assert words in finding.remedy


def test_a_nic_that_was_asked_for_and_is_not_there_is_a_failure() -> None:
    offers = (Offer("efa", "efa", "rdmap0", None, rdma=True, chosen=True, why=""),)
    survey = found(port(), offers=offers)
    (missing,) = nowhere(survey, ["mlx5_*", "rdmap0", "mlx6_0"])
    assert (missing.subject, missing.status) == ("NIC mlx6_0", "fail")
    assert "mlx5_0, rdmap0" in missing.detail
    (missing,) = nowhere(found(), ["*"])
    assert "this host has: none" in missing.detail


def test_only_what_would_be_used_is_tried() -> None:
    offers = tuple(
        Offer("efa", "efa", name, None, rdma=True, chosen=name == "a", why="") for name in "ab"
    )
    survey = found(port(), port(chosen=False, gids=(BAD,)), offers=offers)
    assert [e.label for e in links(survey)] == ["shm", "tcp", "verbs mlx5_0", "libfabric a"]
    assert [e.label for e in links(survey, nics=["a"])] == ["shm", "tcp", "libfabric a"]
    assert [e.label for e in links(survey, nics=["mlx5*"])][:3] == ["shm", "tcp", "verbs mlx5_0"]


@pytest.mark.parametrize(
    ("soft", "hard", "has_nics", "status", "words"),
    [
        (FOREVER, FOREVER, True, "ok", ""),
        (8 << 20, FOREVER, True, "fail", "ulimit -l"),
        (8 << 20, 8 << 20, True, "fail", "limits.conf"),
        (8 << 20, 8 << 20, False, "absent", ""),
    ],
)
def test_locked_memory(soft: int, hard: int, has_nics: bool, status: str, words: str) -> None:
    finding = memlock(soft, hard, has_nics=has_nics, exempt=False)
    assert finding.status == status
    assert words in finding.remedy
    assert memlock(soft, hard, has_nics=has_nics, exempt=True).status == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
def test_a_device_file_that_may_not_be_opened_is_named_with_its_group() -> None:
    # Not below tmp_path, which is closed to others.
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "dev/infiniband"
        folder.mkdir(parents=True)
        Path(root).chmod(0o755)
        assert not list(device_files(Path(root)))
        for name, mode in (("uverbs0", 0o660), ("uverbs1", 0o600), ("uverbs2", 0o666)):
            (folder / name).touch()
            (folder / name).chmod(mode)
            os.chown(folder / name, 0, 4321)
        (folder / "uverbs3").symlink_to("/nowhere/at/all")
        found = as_another_user(root)
    assert {f["subject"]: f["status"] for f in found} == {
        "/dev/infiniband/uverbs0": "fail",
        "/dev/infiniband/uverbs1": "fail",
        "/dev/infiniband/uverbs2": "ok",
        "/dev/infiniband/uverbs3": "fail",
    }
    assert "user 4444 may not open it: mode 0660, user 0, group 4321" in found[0]["detail"]
    assert "--group-add 4321" in found[0]["remedy"]
    assert "udev" in found[1]["remedy"]
    assert "No such file" in found[3]["detail"]


def as_another_user(root: str) -> Any:
    """Findings about device files of a user in no group."""
    code = (
        "import os, sys, json, msgspec; from pathlib import Path;"
        "from fabric_ray.doctor.system import device_files;"
        "os.setgroups([]); os.setgid(4444); os.setuid(4444);"
        "print(json.dumps(msgspec.to_builtins(list(device_files(Path(sys.argv[1]))))))"
    )
    command = [sys.executable, "-c", code, root]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def test_huge_pages_and_ptrace_are_read_from_the_kernel(tmp_path: Path) -> None:
    assert hugepages(tmp_path).status == "warn"
    modes = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    modes.parent.mkdir(parents=True)
    modes.write_text("always within_size advise [never] deny force\n")
    assert hugepages(tmp_path, "5.15.0-91-generic").status == "warn"
    assert "echo advise > /sys/kernel/mm/" in hugepages(tmp_path, "6.0.1").remedy
    assert hugepages(tmp_path, "6.1.0-18-amd64").status == "ok"
    modes.write_text("always within_size advise never [deny] force\n")
    assert hugepages(tmp_path, "6.1.0-18-amd64").status == "warn"
    modes.write_text("always within_size [advise] never deny force\n")
    assert hugepages(tmp_path).status == "ok"
    scope = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    scope.parent.mkdir(parents=True)
    for value, status in (("0", "ok"), ("1", "ok"), ("2", "warn"), ("3", "warn")):
        scope.write_text(value + "\n")
        assert ptrace(tmp_path).status == status


def test_gpu_memory_that_no_nic_can_reach_is_a_failure(tmp_path: Path) -> None:
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104\n")
    codes = {f.code: f.status for f in system(has_nics=True, root=tmp_path)}
    assert codes["peermem"] == "fail"
    assert codes["gdrcopy"] == "warn"
    codes = {f.code: f.status for f in system(has_nics=False, root=tmp_path)}
    assert codes["peermem"] == "absent"
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    codes = {f.code: f.status for f in system(has_nics=True, root=tmp_path)}
    assert codes["peermem"] == "ok"


def test_the_table_says_in_words_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    offers = tuple(
        Offer("tcp", "net", name, None, rdma=False, chosen=False, why="efa is in use")
        for name in ("lo", "a")
    )
    one = Report(tuple(devices(found(port(gids=(GOOD, BAD)), offers=offers))), 0.1)
    show(Console(width=200), one, everything=False)
    text = capsys.readouterr().out
    assert "1 addresses (GIDs) of RDMA ports and 2 libfabric interfaces of other providers" in text
    assert BAD.why not in text
    show(Console(width=200), Report(tuple(devices(found(offers=offers))), 0.1), everything=False)
    assert "GID" not in capsys.readouterr().out
    show(Console(width=200), one, everything=True)
    text = capsys.readouterr().out
    assert "not needed" not in text
    assert BAD.why in text


def test_the_command_prints_json_and_an_exit_code() -> None:
    command = [
        str(Path(sys.executable).with_name("fabric-ray")),
        "doctor",
        "--json",
        "--budget",
        "15",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["healthy"] else 1)
    assert {f["code"] for f in report["findings"]} >= {"memlock", "write", "libibverbs"}
