"""Rails of unequal rates, one of which slows down and one of which is cut and returns, by policy.

Each policy gets the same timetable in the same boot; what is up at each moment is known from the
rates that were set, so figures are shares of that.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness.cases import KIB
from benchmarks.rdma.contenders import last, serve
from benchmarks.rdma.guest import run_scripts
from fabric_ray.bench.results import Family, Row, RowHeader, row_of_turns

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
_FAMILIES: dict[str, Family] = {"adaptive": "ours", "round-robin": "peer"}
_POLICIES = tuple(_FAMILIES)
_RUN_SECONDS = 150


class Step(NamedTuple):
    """What happens, and the rates of the rails that are up from then on, Mbit/s."""

    name: str
    script: str
    rates: tuple[float, ...]

    @property
    def up(self) -> float:
        """MB/s of payload."""
        return sum(self.rates) * _PAYLOAD / 8


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
    shares = (min(s.rates) * len(s.rates) / sum(s.rates) if blind else 1.0 for s in STEPS)
    megabytes = sum(share * s.up for share, s in zip(shares, STEPS, strict=True)) * _STEP_SECONDS
    return int(1.1 * megabytes * 1e6 / _BYTES)


def _script(policy: str) -> str:
    nics, targets = ([f"rxe_h{host}r{rail}" for rail in range(len(RATES))] for host in (0, 1))
    request = {"kind": "window", "bytes": _BYTES, "pages": _IN_FLIGHT, "notice": "wait"}
    warm, measured = (
        shlex.quote(json.dumps({**request, "operations": operations, "trace": trace}))
        for operations, trace in ((_IN_FLIGHT, False), (_operations(policy), True))
    )
    command = serve(nics, targets, _BYTES * _IN_FLIGHT, "--policy", policy)
    shape = "".join(
        f"tc qdisc replace dev h0r{rail} root tbf rate {rate:g}mbit burst 32kb limit 4mb\n"
        for rail, rate in enumerate(RATES)
    )
    # The clock of /proc/uptime is the engine's, in hundredths of a second.
    steps = "".join(
        f"echo step $(cut -d' ' -f1 /proc/uptime)\n{step.script}\nsleep {_STEP_SECONDS}\n"
        for step in STEPS
    )
    feed = f"( echo {warm}; sleep {_WARM_SECONDS}; echo {measured} )"
    return (
        f"{shape}{feed} | {command} & writer=$!\n"
        f"sleep {_WARM_SECONDS}\n{steps}echo step $(cut -d' ' -f1 /proc/uptime)\nwait $writer\n"
    )


class Part(NamedTuple):
    """One policy's figures of one step."""

    seconds: float
    """Of a megabyte, from a second after the change to the next."""
    details: dict[str, float | str]


def parts(policy: str, output: str) -> list[Part]:
    """By step.

    Raises:
        ValueError: the output has no figures.
    """
    lines = output.splitlines()
    steps = [float(line.split()[1]) * 1e9 for line in lines if line.startswith("step ")]
    replies = [json.loads(line) for line in lines if line.startswith("{")]
    if len(steps) != len(STEPS) + 1 or len(replies) != 2 or "trace" not in replies[-1]:
        raise ValueError(f"{policy}: no figures: {last(output)}")
    trace: list[tuple[int, int]] = replies[-1]["trace"]
    spans = zip(STEPS, steps, steps[1:], strict=False)
    return [_part(step, trace, begin, end) for step, begin, end in spans]


def _part(step: Step, trace: Sequence[tuple[int, int]], begin: float, end: float) -> Part:
    ends = sorted(ended for _, ended in trace)
    settled = sum(begin + 1e9 <= at < end for at in ends) * _BYTES
    took = sorted((b - a) / 1e6 for a, b in trace if begin <= a < end)
    enough = 0.95 * step.up * 1e6 / _BYTES
    recovered = next(
        (at for at in ends if at >= begin and sum(at - 1e9 <= e <= at for e in ends) >= enough),
        None,
    )
    details: dict[str, float | str] = {
        "share": settled / (step.up * 1e6 * (end - begin - 1e9) / 1e9)
    }
    if took:
        details |= {"median ms": statistics.median(took), "P99 ms": took[len(took) * 99 // 100]}
    details["0.95 after ms"] = "-" if recovered is None else (recovered - begin) / 1e6
    return Part((end - begin - 1e9) / 1e3 / max(settled, 1), details)


def unequal_rails() -> list[Row]:
    """A row for each step, of every policy.

    Raises:
        ValueError: if a policy printed no figures.
    """
    outputs: list[str] = []
    run_scripts(
        [_script(policy) for policy in _POLICIES],
        outputs,
        limit=_RUN_SECONDS,
        rails=len(RATES),
        options=["--mtu", str(_MTU)],
    )
    found = {policy: parts(policy, out) for policy, out in zip(_POLICIES, outputs, strict=True)}
    rows = []
    for index, step in enumerate(STEPS):
        here = {policy: found[policy][index] for policy in _POLICIES}
        taken = {policy: (_FAMILIES[policy], [part.seconds]) for policy, part in here.items()}
        rows.append(
            row_of_turns(
                RowHeader(key=f"rdma-unequal/{step.name}", unit="MB/s", amount=1e6),
                {**taken, "what is up": ("floor", [1 / step.up])},
                {policy: part.details for policy, part in here.items()},
            )
        )
    return rows
