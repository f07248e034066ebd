"""What planning a push of public models takes, and how good the plans are.

Run ``python -m benchmarks.plan``: a row for each push, made by ``fabric-ray plan`` in a process of
its own, since peak memory can't be reset within one. With ``--json`` it prints one object a line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any, NamedTuple

from fabric_ray.cli import published
from fabric_ray.cli.published import PUBLISHED

_COMMAND = (sys.executable, "-c", "from fabric_ray.cli.main import app; app()", "plan", "--json")


class Case(NamedTuple):
    model: str
    trainer: str
    rollout: str
    dtype: str


# fabric-lib, section 7.3: 256 trainers to 128 rollouts.
_PAPER = "fsdp=16,pp=2,ep=8"
_LATENT, _GROUPED = "tp=1,dp=32,ep=32,engines=4", "tp=4,dp=8,ep=32,engines=4"

PAPER = (
    Case("kimi-k2", _PAPER, _LATENT, "fp8:128x128"),
    Case("kimi-k2", _PAPER, _LATENT, "bfloat16"),
    Case("deepseek-v3", _PAPER, _LATENT, "fp8:128x128"),
    Case("qwen3-235b-a22b", _PAPER, _GROUPED, "fp8:128x128"),
    Case("glm-4.5-air", _PAPER, _GROUPED, "fp8:channel"),
)
# The configurations of the miles article on weight pushes to SGLang.
MILES = tuple(Case(*row[:4]) for row in PUBLISHED if row.source == published.MILES)
CASES = (*PAPER, *MILES)

_ROW = "| {model} | {trainer} | {rollout} | {dtype} | {figures} |"


def measure(case: Case) -> dict[str, Any]:
    """What ``fabric-ray plan --json`` says of one push."""
    options = ("--trainer", case.trainer, "--rollout", case.rollout, "--dtype", case.dtype)
    command = (*_COMMAND, case.model, *options)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def told(r: dict[str, Any]) -> str:
    """A measurement as a row."""

    balance = r["balance"]

    def cpu(*steps: str) -> str:
        return f"{sum(r['spent'][s]['cpu_seconds'] for s in steps if s in r['spent']):.1f} s"

    figures = (
        _bytes(balance["nbytes"]),
        cpu("layouts"),
        cpu("edges"),
        cpu("plan", "encoding"),
        _bytes(r["peak_nbytes"]),
        _bytes(r["encoded_nbytes"]),
        f"{balance['sender_imbalance']:.3f}",
        f"{balance['receiver_imbalance']:.3f}",
        f"{balance['link_imbalance']:.1f}",
        f"{r['floor_seconds']:.3f} s",
    )
    return _ROW.format(figures=" | ".join(figures), **r)


HEAD = (
    "| model | trainers | rollouts | dtype | pushed | layouts | edges | plan | peak memory "
    "| encoded | senders | receivers | pairs | floor |\n" + "|---" * 14 + "|"
)


def _bytes(n: int) -> str:
    unit, name = (1e12, "TB") if n >= 1e12 else (1e9, "GB") if n >= 1e9 else (1e6, "MB")
    return f"{n / unit:.2f} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted({c.model for c in CASES}), action="append")
    parser.add_argument("--dtype", choices=sorted({c.dtype for c in CASES}), action="append")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    cases = [
        case
        for case in CASES
        if case.model in (args.model or [case.model]) and case.dtype in (args.dtype or [case.dtype])
    ]
    if not args.json:
        print(HEAD)
    for case in cases:
        result = measure(case)
        print(json.dumps(result) if args.json else told(result), flush=True)


if __name__ == "__main__":
    main()
