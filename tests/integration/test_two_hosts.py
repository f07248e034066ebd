"""The commands of docs/deploy/two-hosts.md, on two hosts with a firewall in between."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.hosts import ADDRESSES, TwoHosts, missing, sweep

pytest.importorskip("ray")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deploy/two-hosts.md").read_text()
PORTS = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+)-(\d+) \|", PAGE, re.MULTILINE)]
STEPS = re.findall(r'```bash title="on (\w+)"\n(.*?)```', PAGE, re.DOTALL)

PATIENCE_S = 900
"""For a command, on a machine however busy."""

ENVIRONMENT = os.environ | {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Busy cores need longer than Ray allows by default.
    "RAY_agent_register_timeout_ms": "180000",
    "PYTHONPATH": str(ROOT),
}


@dataclass
class Desk:
    """A terminal on each host, for the commands of the page."""

    hosts: TwoHosts
    folder: Path
    exports: str = ""
    waiting: list[subprocess.Popen[str]] = field(default_factory=list)

    def type(self, host: str, text: str) -> str:
        """What it printed; it must end well."""
        done = subprocess.run(
            self._shell(host, text),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (host, text, done.stdout, done.stderr)
        return done.stdout

    def type_at_once(self, hosts: str, text: str) -> list[str]:
        with ThreadPoolExecutor(len(hosts)) as people:
            return list(people.map(lambda host: self.type(host, text), hosts))

    def leave(self, host: str, text: str) -> subprocess.Popen[str]:
        """The command, which goes on."""
        process = subprocess.Popen(
            self._shell(host, text),
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.waiting.append(process)
        return process

    def _shell(self, host: str, text: str) -> list[str]:
        # A namespace of mounts is entered at its root.
        return self.hosts.shell(host, f"cd {self.folder}\n{self.exports}\n{text}")


@pytest.fixture(scope="module")
def possible() -> None:
    if why := missing():
        pytest.skip(why)


@pytest.fixture
def desk(tmp_path: Path, possible: None) -> Iterator[Desk]:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with TwoHosts(PORTS) as hosts:
        desk = Desk(hosts, tmp_path)
        yield desk
    # Processes that still wait have ended with their host.
    for process in desk.waiting:
        process.communicate()


def invited(process: subprocess.Popen[str]) -> str:
    """The text that a doctor printed."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"--peer (fabric1-\S+)", line):
            return found[1]
    raise AssertionError("no doctor waits")


@pytest.mark.long
def test_what_the_page_says_works_as_it_is_typed(desk: Desk) -> None:
    printed = []
    doctor = None
    for where, text in STEPS:
        if text.startswith("export"):
            desk.exports += text
        elif "--listen" in text:
            doctor = desk.leave(where, text)
        elif "--peer" in text:
            assert doctor is not None
            printed.append(desk.type(where, text.replace("fabric1-...", invited(doctor))))
            assert doctor.wait(PATIENCE_S) == 0
        else:
            printed += desk.type_at_once(where if where != "both" else "AB", text)
    visit, _, _, push, transfer, *_ = printed
    assert len(re.findall("every byte", visit)) == 2, visit
    assert "tcp" in visit
    # Where Ray put its actors is Ray's choice.
    assert re.search(r"\b0 to 1, (tcp|shm)\b", push), push
    assert re.search(r"every byte as in the reference +yes +yes", push), push
    assert "arrived over tcp" in transfer
    for address in ADDRESSES:
        assert address in transfer


HELD = """
import sys
from tests.hosts import TwoHosts
with TwoHosts([(1, 2)]) as hosts:
    print(*hosts.processes, *hosts.names, flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them_even_if_it_is_killed(possible: None) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", HELD],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    a, b, *names = maker.stdout.readline().split()
    held = [os.pidfd_open(int(pid)) for pid in (a, b)]
    maker.kill()
    maker.communicate()
    try:
        for process in held:
            assert select.select([process], [], [], 60)[0], "a host outlives its maker"
    finally:
        for process in held:
            os.close(process)
    assert all(Path("/run/netns", name).exists() for name in names)
    sweep()
    assert not any(Path("/run/netns", name).exists() for name in names)


@pytest.mark.parametrize("closed", ["A", pytest.param("B", marks=pytest.mark.long)])
def test_a_firewall_that_drops_packets_is_named_by_the_doctor(desk: Desk, closed: str) -> None:
    def behind(host: str) -> str:
        # As many as the doctor needs, and no more.
        ports = "30000-30001" if host == closed else "20000-20001"
        return f"export FABRIC_RAY_TOKEN=t FABRIC_RAY_PORTS={ports}\nfabric-ray doctor"

    doctor = desk.leave("A", f"{behind('A')} --listen")
    visit = desk.hosts.shell("B", f"{behind('B')} --peer {invited(doctor)}")
    done = subprocess.run(
        visit, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    # A host behind the firewall can connect, but accepts no connection.
    assert re.search(rf"connect to {ADDRESSES['AB'.index(closed)]}:3000[01]: no answer", said), said
    assert "have the firewall of that host let in the port above" in said
    assert said.count("every byte") == (1 if closed == "B" else 0)
