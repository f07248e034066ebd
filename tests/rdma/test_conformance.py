"""The native conformance suite over RDMA devices, between two hosts with one or several rails.

Each test of the suite bears the name of the promise that it holds; here are only the worlds that it
runs in.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rdma.binaries import cases_of, native_test
from tests.rdma.boot import Outcome, guest_run, need_guest

# Over ofi_rxm an engine drives one NIC: with several, the provider can crash the process. What
# libfabric does with several rails is shown by its tcp provider, whose rails are the interfaces
# below the devices.
_WITH_SEVERAL_RAILS = ("verbs", "libfabric_tcp")
# Both ends close at the same moment: ofi_rxm then uses a freed endpoint (libfabric issue 11828).
_CRASHES_OFI_RXM = "closing_in_any_order_is_safe"
_SECONDS_PER_RUN = 300
_BOOT_SECONDS = 60


@dataclass(frozen=True)
class Run:
    """A module of the suite, and the NICs of the first and of all other engines."""

    module: str
    hosts: int
    rails: int
    a: tuple[str, ...]
    b: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.module}-{len(self.a)}to{len(self.b)}"

    @property
    def is_rdma(self) -> bool:
        return self.module != "libfabric_tcp"

    def tests(self, binary: Path) -> list[str]:
        """The names of the tests that it runs."""
        cases = cases_of(binary, self.module)
        if self.module == "libfabric_verbs":
            return [case for case in cases if not case.endswith(f"::{_CRASHES_OFI_RXM}")]
        return cases


def _between_hosts(module: str, rails: int) -> Run:
    a, b = (tuple(_nic(module, host, rail) for rail in range(rails)) for host in (0, 1))
    return Run(module, 2, rails, a, b)


def _nic(module: str, host: int, rail: int) -> str:
    return f"h{host}r{rail}" if module == "libfabric_tcp" else f"rxe_h{host}r{rail}"


def _unequal(module: str, a: int) -> Run:
    """Four NICs that all reach each other, `a` of them with the first engine."""
    nics = tuple(_nic(module, host, 0) for host in range(4))
    return Run(module, 4, 1, nics[:a], nics[a:])


RUNS = [
    _between_hosts("verbs", 1),
    _between_hosts("libfabric_verbs", 1),
    *(
        run
        for module in _WITH_SEVERAL_RAILS
        for run in (
            _between_hosts(module, 2),
            _between_hosts(module, 4),
            _unequal(module, 1),
            _unequal(module, 3),
        )
    ),
]


@dataclass(frozen=True)
class Report:
    """What a run has left in the folder that the guest may write to."""

    status: int
    log: str
    # RoCE packets by NIC, while it ran.
    packets: dict[str, int]


def _shell(run: Run, binary: Path, tests: Sequence[str], folder: Path) -> str:
    """Runs the suite and keeps its output, its status and the packets that the NICs have sent."""
    nics = (*run.a, *run.b)
    counters = " ".join(
        f"/sys/class/infiniband/{nic}/ports/1/hw_counters/sent_pkts"
        if run.is_rdma
        else f"/sys/class/net/{nic}/statistics/tx_packets"
        for nic in nics
    )
    variables = {
        "FABRIC_TEST_NICS_A": ",".join(run.a),
        "FABRIC_TEST_NICS_B": ",".join(run.b),
        # A provider that is missing fails the test, which would pass with a word elsewhere.
        "FABRIC_TEST_REQUIRE": "1",
        # rdma_rxe has at most 32767 entries in a completion queue; 1.17 asks for more.
        "FI_UNIVERSE_SIZE": "16",
    }
    env = shlex.join(f"{key}={value}" for key, value in variables.items())
    # All names, for a name of a module is also the end of another's.
    suite = shlex.join([str(binary), "--exact", "--include-ignored", "--test-threads", "1", *tests])
    out = folder / run.name
    return (
        f"cat {counters} >{out}.before\n"
        f"timeout {_SECONDS_PER_RUN} env {env} {suite} >{out}.log 2>&1; echo $? >{out}.status\n"
        f"cat {counters} >{out}.after\n"
    )


def _report(run: Run, folder: Path, outcome: Outcome) -> Report:
    def read(kind: str) -> str:
        path = folder / f"{run.name}.{kind}"
        if not path.exists():
            pytest.fail(f"{run.name} left no {kind}: {outcome.reason}\n{outcome.stderr[-4000:]}")
        return path.read_text(errors="replace")

    before, after = ([int(n) for n in read(kind).split()] for kind in ("before", "after"))
    sent = [now - then for now, then in zip(after, before, strict=True)]
    packets = dict(zip((*run.a, *run.b), sent, strict=True))
    return Report(int(read("status")), read("log"), packets)


class Guests:
    """One guest for all runs with the same hosts and rails; to start one takes a while."""

    def __init__(self, wanted: Sequence[Run], folder: Path) -> None:
        self._wanted = wanted
        self._folder = folder
        self._reports: dict[Run, Report] = {}

    def report(self, run: Run) -> Report:
        if run not in self._reports:
            together = [r for r in self._wanted if (r.hosts, r.rails) == (run.hosts, run.rails)]
            folder = self._folder / f"{run.hosts}x{run.rails}"
            folder.mkdir()
            binary = native_test("conformance")
            script = "".join(_shell(one, binary, one.tests(binary), folder) for one in together)
            outcome = guest_run(
                ["sh", "-c", script],
                hosts=run.hosts,
                rails=run.rails,
                rw=[folder],
                packages=["libfabric1"],
                # libfabric's queues of a dozen engines with four rails each take a gigabyte or two.
                options=["--memory", "4096M"],
                timeout=_BOOT_SECONDS + _SECONDS_PER_RUN * len(together),
            )
            for one in together:
                self._reports[one] = _report(one, folder, outcome)
        return self._reports[run]


@pytest.fixture(scope="module")
def guests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guests:
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    values = [call.params.get("run") for call in calls if call is not None]
    runs = [value for value in values if isinstance(value, Run)]
    return Guests(runs, tmp_path_factory.mktemp("conformance"))


@pytest.mark.timeout(2 * _BOOT_SECONDS + 4 * _SECONDS_PER_RUN)
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=run.name, marks=pytest.mark.rdma) for run in RUNS],
)
def test_every_promise_holds_between_nics(run: Run, guests: Guests) -> None:
    need_guest("libfabric1")
    tests = run.tests(native_test("conformance"))
    assert tests, f"the conformance suite has no module {run.module}"
    report = guests.report(run)
    assert report.status == 0, _end(report.log)
    assert f"test result: ok. {len(tests)} passed; 0 failed; 0 ignored" in report.log
    # TCP between addresses of one kernel leaves by its loopback interface.
    idle = [nic for nic, packets in report.packets.items() if run.is_rdma and packets == 0]
    assert not idle, f"nothing went through {', '.join(idle)}: {report.packets}"


def _end(log: str) -> str:
    failed = [line for line in log.splitlines() if line.endswith("... FAILED")]
    return "\n".join([*failed, log[-6000:]])
