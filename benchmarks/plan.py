"""What planning a push of public models takes, and how good the plans are.

``python -m benchmarks plan``: a row for each push, made by ``fabric-ray plan`` in a process of its
own, since peak memory can't be reset within one.
"""

from __future__ import annotations

import subprocess
import sys
from json import loads
from typing import Annotated, Any, NamedTuple

import typer

from fabric_ray.bench.record import Resume, recorded
from fabric_ray.bench.results import Row, RowHeader, row_of_turns
from fabric_ray.cli import published
from fabric_ray.cli.published import PUBLISHED

_COMMAND = (sys.executable, "-c", "from fabric_ray.cli.main import app; app()", "plan", "--json")


class Case(NamedTuple):
    model: str
    trainer: str
    rollout: str
    dtype: str

    @property
    def key(self) -> str:
        return f"plan/{'/'.join(self)}"


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


def measure(case: Case) -> dict[str, Any]:
    """What ``fabric-ray plan --json`` says of one push."""
    options = ("--trainer", case.trainer, "--rollout", case.rollout, "--dtype", case.dtype)
    command = (*_COMMAND, case.model, *options)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = loads(done.stdout)
    return result


def row(case: Case, found: dict[str, Any]) -> Row:
    """Seconds of a processor in each step; planning and encoding is the figure."""
    balance, spent = found["balance"], found["spent"]
    layouts, edges, plan = (
        sum(spent[name]["cpu_seconds"] for name in names if name in spent)
        for names in (("layouts",), ("edges",), ("plan", "encoding"))
    )
    details = {
        "trainers": found["trainer"],
        "rollouts": found["rollout"],
        "pushed GB": balance["nbytes"] / 1e9,
        "layouts s": layouts,
        "edges s": edges,
        "peak memory MB": found["peak_nbytes"] / 1e6,
        "encoded MB": found["encoded_nbytes"] / 1e6,
        "senders": f"{balance['sender_imbalance']:.3f}",
        "receivers": f"{balance['receiver_imbalance']:.3f}",
        "pairs": balance["link_imbalance"],
        "floor of the push s": found["floor_seconds"],
    }
    return row_of_turns(
        RowHeader(key=case.key, unit="s"), {"plan": ("ours", [plan])}, {"plan": details}
    )


def main(
    model: Annotated[list[str] | None, typer.Option(help="Of these alone")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="In these alone")] = None,
    resume: Resume = None,
) -> None:
    """What planning pushes of public models takes, and how good the plans are."""
    with recorded("plan", resume) as results:
        for case in CASES:
            asked = (not model or case.model in model) and (not dtype or case.dtype in dtype)
            if asked and not results.has(case.key):
                results.say(case.key)
                results.add(row(case, measure(case)))


if __name__ == "__main__":
    typer.run(main)
