"""What planning a push of public models takes, and how good the plans are.

``python -m benchmarks plan``: a row for each push, made by ``fabric-ray plan`` in a process of its
own, since peak memory can't be reset within one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from json import loads
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.sheets import Json, Markdown, Output, Sheet, keeping
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


def measure(case: Case) -> dict[str, Any]:
    """What ``fabric-ray plan --json`` says of one push."""
    options = ("--trainer", case.trainer, "--rollout", case.rollout, "--dtype", case.dtype)
    command = (*_COMMAND, case.model, *options)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = loads(done.stdout)
    return result


def table(found: Sequence[dict[str, Any]]) -> Sheet:
    """A row for each push."""
    sheet = Sheet(
        title="plans of public models",
        columns=(
            *("model", "trainers", "rollouts", "dtype", "pushed", "layouts", "edges", "plan"),
            *("peak memory", "encoded", "senders", "receivers", "pairs", "floor"),
        ),
        figures={"plans": found},
    )
    for r in found:
        balance, spent = r["balance"], r["spent"]
        steps = (("layouts",), ("edges",), ("plan", "encoding"))
        cpu = (sum(spent[s]["cpu_seconds"] for s in names if s in spent) for names in steps)
        sheet.rows.append(
            (
                *(r[name] for name in ("model", "trainer", "rollout", "dtype")),
                _bytes(balance["nbytes"]),
                *(f"{seconds:.1f} s" for seconds in cpu),
                _bytes(r["peak_nbytes"]),
                _bytes(r["encoded_nbytes"]),
                f"{balance['sender_imbalance']:.3f}",
                f"{balance['receiver_imbalance']:.3f}",
                f"{balance['link_imbalance']:.1f}",
                f"{r['floor_seconds']:.3f} s",
            )
        )
    return sheet


def _bytes(n: int) -> str:
    unit, name = (1e12, "TB") if n >= 1e12 else (1e9, "GB") if n >= 1e9 else (1e6, "MB")
    return f"{n / unit:.2f} {name}"


def main(
    model: Annotated[list[str] | None, typer.Option(help="Of these alone")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="In these alone")] = None,
    json: Json = None,
    markdown: Markdown = False,
) -> None:
    """What planning pushes of public models takes, and how good the plans are."""
    out = Output("plan", json, markdown=markdown)
    found: list[dict[str, Any]] = []

    def measured() -> Sheet:
        with keeping(lambda: table(found)):
            for case in CASES:
                if (not model or case.model in model) and (not dtype or case.dtype in dtype):
                    out.say(f"{case.model}, {case.trainer} to {case.rollout}, {case.dtype}")
                    found.append(measure(case))
        return table(found)

    out.add(measured)
    out.end()


if __name__ == "__main__":
    typer.run(main)
