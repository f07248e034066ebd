"""The two measurements: one rail beside perftest, and four rails beside one."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders import perf
from benchmarks.rdma.cases import KIB, MIB, Aim, Case, Row
from benchmarks.rdma.contenders import Contender, Engine, Perftest
from benchmarks.rdma.turns import measure

# A second or so for each, where the CPU is emulated.
CASES = (Case(KIB, 20_000), Case(64 * KIB, 1_000), Case(MIB, 60))

RAILS = 4
# Slow enough that the link is the limit, and not an emulated CPU that does the work of four NICs.
_RATE = "16mbit"
# The packets that soft-RoCE lets wait for one queue pair must pass before a sender takes them for
# lost: 64 of 2 KiB take 70 ms. With an MTU of 9000 they would be of 4 KiB.
_MTU = 2304
# 4.096 us x 2^16; by default perftest sends again after 67 ms.
_PATIENT = ("-u", "16")
SHAPED = Case(MIB, 16, kind="shaped")


def contenders() -> list[Contender]:
    """The reference first."""
    return [Perftest(), *([] if perf.missing() else [Engine()])]


def rail_contenders() -> list[Contender]:
    """The reference first: one rail."""
    if perf.missing():
        return []
    names = [[f"rxe_h{host}r{rail}" for rail in range(RAILS)] for host in (0, 1)]
    one = Engine("fabric-rust verbs, one rail")
    four = Engine(f"fabric-rust verbs, {RAILS} rails", *names)
    return [one, four, Perftest(_PATIENT)]


def beside_perftest(*, turns: int = 5, cases: Sequence[Case] = CASES) -> list[Row]:
    """Ours and `ib_write_bw` over one rail.

    Raises:
        ValueError: as `measure`.
    """
    return measure(cases, contenders(), turns=turns)


def four_rails(*, turns: int = 5) -> list[Row]:
    """Four rails together, one of them, and `ib_write_bw` on one, over links of equal rates.

    Raises:
        ValueError: as `measure`.
    """
    shape = "".join(
        f"tc qdisc add dev h0r{rail} root tbf rate {_RATE} burst 32kb limit 4mb\n"
        for rail in range(RAILS)
    )
    options = ["--mtu", str(_MTU)]
    return measure(
        [SHAPED], rail_contenders(), turns=turns, rails=RAILS, first=shape, options=options
    )


def aims() -> list[Aim]:
    """What the design asks for."""
    ours, reference = Engine().name, Perftest.name
    beside = [
        Aim(case.key, ours, reference, 0.9 if case.bytes < 64 * KIB else 0.95) for case in CASES
    ]
    if perf.missing():
        return beside
    one, four, _ = rail_contenders()
    return [*beside, Aim(SHAPED.key, four.name, one.name, 3.5)]
