"""Writes between devices of the soft-RoCE guest: one rail beside perftest, four beside one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from benchmarks.contenders import perf
from benchmarks.harness.cases import KIB, MIB
from benchmarks.rdma.contenders import Case, Contender, Engine, Perftest
from benchmarks.rdma.guest import measure, packages
from benchmarks.rdma.unequal import unequal_rails
from fabric_ray.bench.record import Resume, Turns, recorded
from fabric_ray.bench.results import Row
from tests.rdma.boot import why_no_guest

# A second or so for each, where the CPU is emulated.
CASES = (
    Case(KIB, 20_000, aim="0.9 of ib_write_bw"),
    Case(64 * KIB, 1_000, aim="0.95 of ib_write_bw"),
    Case(MIB, 60, aim="0.95 of ib_write_bw"),
)
RAILS = 4
ONE, FOUR = "fabric-rust verbs, one rail", f"fabric-rust verbs, {RAILS} rails"
# Slow enough that the link is the limit, and not an emulated CPU that does the work of four NICs.
_RATE = "16mbit"
# The packets that soft-RoCE lets wait for one queue pair must pass before a sender takes them for
# lost: 64 of 2 KiB take 70 ms. With an MTU of 9000 they would be of 4 KiB.
_MTU = 2304
# 4.096 us x 2^16; by default perftest sends again after 67 ms.
_PATIENT = ("-u", "16")
SHAPED = Case(MIB, 16, kind="shaped", aim="3.5 of one rail")


def contenders() -> list[Contender]:
    return [*([] if perf.missing() else [Engine()]), Perftest()]


def beside_perftest(
    add: Callable[[Row], object], cases: Sequence[Case] = CASES, *, turns: int = 5
) -> None:
    """Ours and `ib_write_bw` over one rail.

    Raises:
        ValueError: as `measure`.
    """
    measure(cases, contenders(), add, turns=turns)


def four_rails(add: Callable[[Row], object], *, turns: int = 5) -> None:
    """Four rails together, one of them, and `ib_write_bw` on one, over links of equal rates.

    Raises:
        ValueError: as `measure`.
    """
    nics, targets = ([f"rxe_h{host}r{rail}" for rail in range(RAILS)] for host in (0, 1))
    rivals = [Engine(FOUR, nics, targets), Engine(ONE, family="peer"), Perftest(_PATIENT)]
    shape = "".join(
        f"tc qdisc add dev h0r{rail} root tbf rate {_RATE} burst 32kb limit 4mb\n"
        for rail in range(RAILS)
    )
    options = ["--mtu", str(_MTU)]
    measure([SHAPED], rivals, add, turns=turns, rails=RAILS, first=shape, options=options)


def main(
    turns: Turns = 5,
    rails: Annotated[bool, typer.Option(help="Measure four rails beside one as well")] = True,
    unequal: Annotated[bool, typer.Option(help="Unequal rails that slow down and fail")] = False,
    single: Annotated[bool, typer.Option(help="Measure one rail beside perftest")] = True,
    resume: Resume = None,
) -> None:
    """Measure writes between devices of the soft-RoCE guest, beside perftest."""
    reason = why_no_guest(*packages(contenders()))
    if reason is not None:
        typer.echo(f"no soft-RoCE guest: {reason}", err=True)
        raise typer.Exit(2)
    with recorded("rdma", resume) as results:
        why = perf.missing()
        if why:
            results.say(f"{why}; run `{perf.OBTAIN}`")
        missing = [case for case in CASES if not results.has(case.header.key)]
        if single and missing:
            beside_perftest(results.add, missing, turns=turns)
        if rails and not why and not results.has(SHAPED.header.key):
            four_rails(results.add, turns=turns)
        if unequal and not why and not any(key.startswith("rdma-unequal") for key in results.rows):
            results.add(*unequal_rails())


if __name__ == "__main__":
    typer.run(main)
