"""Rails of unequal rates, one of which slows down and one of which is cut and returns, by policy.

Each policy gets the same timetable in the same boot; what is up at each moment is known from the
rates that were set, so figures are shares of that.
"""

from __future__ import annotations

import json
import shlex
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.contenders import perf
from benchmarks.rdma.cases import KIB, Part
from benchmarks.rdma.contenders import last
from tests.rdma.boot import guest_run

# 4:4:4:1, as 400/400/400/100 Gb/s. 64 packets, which soft-RoCE lets wait for one queue pair, pass
# the slowest in 87 ms; after 134 ms they would be sent again.
RATES = (24.0, 24.0, 24.0, 6.0)
_SLOW = 6.0
_MTU = 1280
# Of a packet, what is not payload: RoCE's headers and checksum, IP and Ethernet.
_PAYLOAD = 1024 / (1024 + 78)
_BYTES, _IN_FLIGHT = 512 * KIB, 8
_STEP_SECONDS = 8
# Engines of emulated CPUs take a while to meet.
_WARM_SECONDS = 10
_POLICIES = ("adaptive", "round-robin")
_BOOT_SECONDS, _RUN_SECONDS = 60.0, 150.0


class Step(msgspec.Struct, frozen=True):
    """What happens, and the rates of the rails that are up from then on, Mbit/s."""

    name: str
    script: str
    rates: tuple[float, ...]

    @property
    def up(self) -> float:
        return sum(self.rates)


STEPS = (
    Step("4:4:4:1", "true", RATES),
    Step(
        "rail 1 slows to a quarter",
        f"tc qdisc change dev h0r1 root tbf rate {_SLOW:g}mbit burst 32kb limit 4mb",
        (RATES[0], _SLOW, RATES[2], RATES[3]),
    ),
    Step("rail 2 is cut", "ip link set h0r2 down", (RATES[0], _SLOW, RATES[3])),
    Step("rail 2 is back", "ip link set h0r2 up", (RATES[0], _SLOW, RATES[2], RATES[3])),
)


def _operations(policy: str) -> int:
    """As many as take all steps, and a bit more, but less than the minute that a reply may take."""
    blind = policy != "adaptive"
    # In turns every rail gets as much as the slowest.
    rates = (min(s.rates) * len(s.rates) if blind else s.up for s in STEPS)
    return int(1.1 * sum(rates) * _STEP_SECONDS * _PAYLOAD / 8 * 1e6 / _BYTES)


def _script(policy: str) -> str:
    names = [",".join(f"rxe_h{host}r{rail}" for rail in range(len(RATES))) for host in (0, 1)]
    request = {"kind": "window", "bytes": _BYTES, "pages": _IN_FLIGHT, "notice": "wait"}
    requests = [
        json.dumps({**request, "operations": operations, "trace": trace})
        for operations, trace in ((_IN_FLIGHT, False), (_operations(policy), True))
    ]
    command = [perf.find_program() or "fabric-perf", "engine", "serve", "--transport", "verbs"]
    command += ["--nics", names[0], "--target-nics", names[1], "--policy", policy]
    command += ["--region", str(_BYTES * _IN_FLIGHT)]
    shape = "".join(
        f"tc qdisc replace dev h0r{rail} root tbf rate {rate:g}mbit burst 32kb limit 4mb\n"
        for rail, rate in enumerate(RATES)
    )
    # The clock of /proc/uptime is the engine's, in hundredths of a second.
    steps = "".join(
        f"echo step $(cut -d' ' -f1 /proc/uptime)\n{step.script}\nsleep {_STEP_SECONDS}\n"
        for step in STEPS
    )
    warm, measured = (shlex.quote(text) for text in requests)
    feed = f"( echo {warm}; sleep {_WARM_SECONDS}; echo {measured} )"
    return (
        f"{shape}{feed} | {shlex.join(command)} & writer=$!\n"
        f"sleep {_WARM_SECONDS}\n{steps}echo step $(cut -d' ' -f1 /proc/uptime)\nwait $writer\n"
    )


def _parts(policy: str, output: str) -> list[Part]:
    lines = output.splitlines()
    steps = [float(line.split()[1]) * 1e9 for line in lines if line.startswith("step ")]
    replies = [json.loads(line) for line in lines if line.startswith("{")]
    if len(steps) != len(STEPS) + 1 or len(replies) != 2 or "trace" not in replies[-1]:
        raise ValueError(f"{policy}: no figures: {last(output)}")
    trace: list[tuple[int, int]] = replies[-1]["trace"]
    return [
        _part(policy, step, trace, (begin, end))
        for step, begin, end in zip(STEPS, steps, steps[1:], strict=False)
    ]


def _part(
    policy: str, step: Step, trace: Sequence[tuple[int, int]], span: tuple[float, float]
) -> Part:
    begin, end = span
    capacity = step.up * _PAYLOAD / 8 * 1e6 / 1e9
    ends = sorted(ended for _, ended in trace)
    settled = [at for at in ends if begin + 1e9 <= at < end]
    took = [(b - a) / 1e6 for a, b in trace if begin <= a < end] or [float("nan")]
    enough = 0.95 * capacity * 1e9 / _BYTES
    recovered = next(
        (at for at in ends if at >= begin and sum(at - 1e9 <= e <= at for e in ends) >= enough),
        None,
    )
    return Part(
        policy=policy,
        step=step.name,
        share=len(settled) * _BYTES / (capacity * (end - begin - 1e9)),
        median_ms=statistics.median(took),
        p99_ms=sorted(took)[len(took) * 99 // 100],
        recovered_ms=None if recovered is None else (recovered - begin) / 1e6,
    )


def unequal_rails() -> list[Part]:
    """Every policy through all steps.

    Raises:
        ValueError: if a policy printed no figures.
    """
    with tempfile.TemporaryDirectory(prefix="fabric-ray-rdma-") as name:
        folder = Path(name)
        runs = "".join(
            f"timeout {_RUN_SECONDS:g} sh -c {shlex.quote(_script(policy))} "
            f">{folder / policy}.out 2>&1\n"
            for policy in _POLICIES
        )
        outcome = guest_run(
            ["sh", "-c", runs],
            rails=len(RATES),
            rw=[folder],
            timeout=_BOOT_SECONDS + _RUN_SECONDS * len(_POLICIES),
            options=["--append", "tsc=reliable", "--mtu", str(_MTU)],
        )
        found: list[Part] = []
        for policy in _POLICIES:
            path = folder / f"{policy}.out"
            if not path.exists():
                raise ValueError(f"{outcome.reason}: {last(outcome.stderr)}")
            found += _parts(policy, path.read_text(errors="replace"))
    return found
