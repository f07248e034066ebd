"""Two doctors, as on two hosts: handshake, writes both ways, and what they say when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_ray import TransferEngine
from fabric_ray.cli.ending import Code
from fabric_ray.cli.main import app
from fabric_ray.doctor import Finding, Host, Report, visit
from fabric_ray.doctor.line import (
    Bye,
    Check,
    Checked,
    End,
    Hello,
    Invitation,
    Line,
    Open,
    Opened,
    Write,
    Wrote,
)
from fabric_ray.doctor.visit import _pairs
from fabric_ray.doctor.writes import Link
from fabric_ray.engine import EngineAddress
from fabric_ray.errors import FabricError, InvalidArgument, PeerLost, TransferTimeout

COMMAND = str(Path(sys.executable).with_name("fabric-ray"))


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FABRIC_RAY_TOKEN", raising=False)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def waiting(pool: ThreadPoolExecutor, host: Host) -> Future[Report]:
    return pool.submit(host.wait, 30)


@contextmanager
def visitor(host: Host, *, welcomed: bool = True) -> Iterator[Line]:
    """A visitor written by hand, whose visit has begun if it is the first one."""
    with TransferEngine(name="visitor", token=host.invitation.secret) as engine:
        line = Line(engine)
        line.connect(host.engine.address, 30)
        line.send(Hello(engine.address.to_bytes(), "0"), 10)
        assert not welcomed or line.receive(10) is not None
        yield line


def send_undecodable(line: Line, host: Host) -> None:
    line.engine.send(line.engine.peer(host.engine.address), b"nothing", timeout=10).wait()


def named(report: Report, code: str) -> list[Finding]:
    return [f for f in report.findings if f.code == code]


def test_bytes_go_both_ways_over_every_transport_and_both_are_told(
    pool: ThreadPoolExecutor,
) -> None:
    with Host() as host:
        told = waiting(pool, host)
        report = visit(str(host.invitation), budget=60)
        assert told.result(30).findings == report.findings
    assert report.healthy, report
    (handshake,) = named(report, "handshake")
    assert "proven with the token" in handshake.detail
    writes = named(report, "write")
    me = host.engine.address.name
    for transport in ("shm", "tcp"):
        there, back = (f for f in writes if f.subject.startswith(transport))
        assert there.subject == f"{transport} to {transport} of {me}"
        assert back.subject == f"{transport} of {me} to {transport}"
        for finding in (there, back):
            assert "every byte compared" in finding.detail
            assert finding.speed is not None
            assert finding.speed.bytes_per_s > 0 < finding.speed.latency_us


@pytest.mark.long
def test_bytes_that_were_changed_on_their_way_are_a_failure(pool: ThreadPoolExecutor) -> None:
    class Faulty(Host):
        def _check(self) -> Checked:
            assert self._target is not None
            self._target[1].numpy()[12345] ^= 1
            return super()._check()

    with Faulty() as host:
        told = waiting(pool, host)
        report = visit(str(host.invitation), budget=60)
        told.result(30)
    assert not report.healthy
    wrong = [f for f in report.findings if f.status == "fail"]
    name = host.engine.address.name
    assert [f.subject for f in wrong] == [f"{t} to {t} of {name}" for t in ("shm", "tcp")]
    assert all("differ" in f.detail for f in wrong)


@pytest.mark.long
def test_a_token_that_differs_is_named_and_the_doctor_waits_on(pool: ThreadPoolExecutor) -> None:
    with Host(token=b"of one") as host:
        told = waiting(pool, host)
        assert host.invitation.secret is None
        with pytest.raises(InvalidArgument, match="set the same token"):
            visit(str(host.invitation))
        (refused,) = visit(str(host.invitation), token=b"of another").findings
        assert (refused.code, refused.status) == ("handshake", "fail")
        assert "tokens differ" in refused.detail
        assert "FABRIC_RAY_TOKEN on both" in refused.remedy
        assert visit(str(host.invitation), token=b"of one", budget=60).healthy
        assert told.result(30).healthy


def test_a_host_that_does_not_answer_fails_with_a_remedy() -> None:
    with Host() as host:
        text = str(host.invitation)
    (finding,) = visit(text).findings
    assert finding.status == "fail"
    assert "start it there again" in finding.remedy


def test_a_visitor_that_does_not_come_is_an_error() -> None:
    with Host() as host, pytest.raises(TransferTimeout, match=r"no visitor came.*FABRIC_RAY_PORTS"):
        host.wait(0.01)


def test_a_visitor_that_dies_ends_the_visit(pool: ThreadPoolExecutor) -> None:
    with Host() as host:
        told = waiting(pool, host)
        with visitor(host):
            pass
        with pytest.raises(PeerLost):
            told.result(20)


def test_a_second_visitor_is_rejected(pool: ThreadPoolExecutor) -> None:
    with Host() as host:
        told = waiting(pool, host)
        with visitor(host):
            (finding,) = visit(str(host.invitation)).findings
            assert "another host is visiting" in finding.detail
        with pytest.raises(PeerLost):
            told.result(20)


def test_a_second_visitor_that_leaves_does_not_end_the_first_visit(
    pool: ThreadPoolExecutor,
) -> None:
    with Host() as host:
        told = waiting(pool, host)
        with visitor(host) as first:
            with visitor(host, welcomed=False) as second:
                send_undecodable(second, host)
            first.send(Bye([]), 10)
        assert told.result(30).findings == ()


@pytest.mark.long
def test_messages_that_cannot_be_decoded_do_not_end_the_wait(pool: ThreadPoolExecutor) -> None:
    with Host() as host:
        told = waiting(pool, host)
        with TransferEngine(name="stranger", token=host.invitation.secret) as engine:
            line = Line(engine)
            line.connect(host.engine.address, 30)
            send_undecodable(line, host)
            line.send(Hello(b"no address", "0"), 10)
            line.send(Hello(host.engine.address.to_bytes(), "0"), 10)
        assert visit(str(host.invitation), budget=60).healthy
        assert told.result(30).healthy


def test_a_version_that_is_not_understood_is_named_when_no_visitor_came() -> None:
    with Host() as host, TransferEngine(name="old", token=host.invitation.secret) as engine:
        send_undecodable(Line(engine), host)
        with pytest.raises(TransferTimeout, match=r"no visitor came.*install the same version"):
            host.wait(0.01)


def test_time_that_is_over_is_no_success_and_what_began_in_time_is_no_failure(
    pool: ThreadPoolExecutor,
) -> None:
    with Host() as host:
        told = waiting(pool, host)
        report = visit(str(host.invitation), budget=0)
        assert told.result(30).findings == report.findings
    writes = named(report, "write")
    assert writes
    assert not report.healthy
    assert all("not tried" in f.detail and "--budget" in f.remedy for f in writes), writes


@pytest.mark.parametrize("what", ["cut", "changed", "another", "nothing", "long"])
def test_a_text_that_is_no_invitation_is_refused(what: str) -> None:
    with Host() as host:
        text = str(host.invitation)
    wrong = {
        "cut": text[:-9],
        "changed": text[:40] + ("B" if text[40] == "A" else "A") + text[41:],
        "another": "10.0.0.1:8000",
        "nothing": "",
        "long": text + "A" * 5000,
    }[what]
    with pytest.raises(InvalidArgument, match="doctor --listen"):
        visit(wrong)


def test_an_invitation_survives_the_line_breaks_of_a_terminal() -> None:
    with TransferEngine() as engine:
        invitation = Invitation(engine.address.to_bytes(), b"secret")
    text = str(invitation)
    assert Invitation.read(f"  {text[:50]}\n  {text[50:]}\n") == invitation
    assert EngineAddress.from_bytes(Invitation.read(text).address) == engine.address


def test_rails_are_paired_and_a_transport_of_one_side_is_named() -> None:
    here = [Link("shm"), Link("tcp"), *(Link("verbs", f"mlx5_{i}") for i in range(3))]
    there = [End("tcp", "", None), End("verbs", "a", None), End("verbs", "b", None)]
    there += [End("libfabric", "efa0", None)]
    found = list(_pairs(here, there, same_host=False))
    words = [f.subject if isinstance(f, Finding) else f.words("B") for f in found]
    assert words == [
        "tcp to tcp of B",
        "verbs mlx5_0 to verbs a of B",
        "verbs mlx5_1 to verbs b of B",
        "verbs mlx5_2 to verbs a of B",
        "libfabric",
    ]
    last = found[-1]
    assert isinstance(last, Finding)
    assert (last.status, last.detail) == ("warn", "it can't be used: there is none here")


def ran(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "doctor", *arguments]
    env = os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_the_commands_connect_and_print_json() -> None:
    listening = [COMMAND, "doctor", "--listen", "--json", "--wait", "100"]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first: Any = json.loads(process.stdout.readline())
        assert first["command"] == f"fabric-ray doctor --peer {first['peer']}"
        done = ran("--json", "--peer", first["peer"])
        report, told = json.loads(done.stdout), json.loads(process.stdout.read())
    assert (done.returncode, process.returncode) == (Code.DONE, Code.DONE), done.stderr
    assert report["healthy"] is told["healthy"] is True
    assert told["findings"] == report["findings"]
    assert any(f["speed"] and f["speed"]["bytes_per_s"] > 0 for f in report["findings"])


@pytest.mark.long
def test_the_commands_end_with_the_code_of_their_answer() -> None:
    late = ran("--listen", "--wait", "1")
    assert (late.returncode, "no visitor came" in late.stderr) == (Code.NO, True)
    text = late.stdout.split("--peer ")[1].split()[0]
    gone = ran("--peer", text)
    assert (gone.returncode, "listen" in gone.stdout) == (Code.NO, True)
    wrong = ran("--peer", "10.0.0.1")
    assert (wrong.returncode, "cannot read the address" in wrong.stderr) == (Code.IMPOSSIBLE, True)
    both = ran("--peer", text, "--listen")
    assert both.returncode == Code.IMPOSSIBLE
    taken = ran("--listen", FABRIC_RAY_PORTS="3-2")
    assert (taken.returncode, "FABRIC_RAY_PORTS" in taken.stderr) == (Code.IMPOSSIBLE, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "--budget", "5"], "give --budget to --peer"),
        (["--wait", "5"], "--wait is for --listen"),
        (["--peer", "fabric1-", "--wait", "5"], "--wait is for --listen"),
        (["--listen", "--nics", "no_such_*"], "NIC no_such_*: nothing matches"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *options])
    assert (done.exit_code, words in done.output) == (Code.IMPOSSIBLE, True), done.output


def test_errors_of_the_other_host_have_its_name(pool: ThreadPoolExecutor) -> None:
    with Host() as host:
        told = waiting(pool, host)
        with visitor(host) as line:
            with pytest.raises(
                FabricError, match=rf"on {host.engine.address.name}: .*no target is open"
            ):
                line.ask(Check(), Checked, 10)
            for end in (End("verbs", "no_such_nic", None), End("cuda_ipc", "", None)):
                with pytest.raises(FabricError, match=r"on .*: .* not among the links"):
                    line.ask(Open(end), Opened, 10)
            small, counter = line.engine.alloc(64), line.engine.counter()
            lent = small.descriptor().to_bytes(), counter.ref.to_bytes()
            with pytest.raises(FabricError, match="got 64 bytes, expected"):
                line.ask(Write(End("tcp", "", None), *lent), Wrote, 10)
        with pytest.raises(PeerLost):
            told.result(20)
