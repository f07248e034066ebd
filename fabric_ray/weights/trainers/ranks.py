"""Which ranks do what in a Megatron-style trainer (Megatron-Core's ``parallel_state``)."""

from __future__ import annotations

from itertools import product

import msgspec

from fabric_ray.weights.families.errors import InvalidRanks
from fabric_ray.weights.families.placing import Grid

_AXES = ("tp", "cp", "ep", "dp", "pp")


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel sizes of a trainer, and the order in which its ranks are numbered.

    The ranks of a pipeline stage are cut in two ways: ``tp * cp * dp`` for everything but experts,
    ``etp * ep * edp`` for experts, where ``edp`` is what remains.

    Raises:
        InvalidRanks: the sizes don't fit together.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """Ranks that share an expert; ``tp`` if absent."""
    vpp: int = 1
    """Parts of the model that each stage holds (virtual pipeline parallelism)."""
    order: str = "-".join(_AXES)
    """The axes, the one along which ranks are neighbours first."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        return self.stage_size // (self.expert_tp * self.ep)

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.stage_size * self.pp

    def grid(self, stage: int) -> Grid:
        """The ranks of a stage, as replicas of a tensor-parallel group."""
        step = self.steps()
        start = stage * step["pp"]
        return Grid(
            tuple(
                tuple(
                    start + tp * step["tp"] + cp * step["cp"] + dp * step["dp"]
                    for tp in range(self.tp)
                )
                for dp, cp in product(range(self.dp), range(self.cp))
            )
        )

    def expert_grid(self, stage: int, group: int) -> Grid:
        """The ranks of a stage that hold the experts of one expert-parallel group."""
        step = self.expert_steps()
        start = stage * step["pp"] + group * step["ep"]
        return Grid(
            tuple(
                tuple(start + tp * step["tp"] + dp * step["dp"] for tp in range(self.expert_tp))
                for dp in range(self.expert_dp)
            )
        )

    def steps(self) -> dict[str, int]:
        """How far apart neighbours along each axis are numbered, for everything but experts."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return _steps(self.order, sizes)

    def expert_steps(self) -> dict[str, int]:
        """The same for experts."""
        sizes = {"tp": self.expert_tp, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        return _steps(self.order, sizes)


def _steps(order: str, sizes: dict[str, int]) -> dict[str, int]:
    """How far apart neighbours along each axis are numbered."""
    steps, step = {}, 1
    for axis in order.split("-"):
        steps[axis] = step
        step *= sizes.get(axis, 1)
    return steps


def _check(p: Parallel) -> None:
    problem = _problem(p)
    if problem is not None:
        raise InvalidRanks(problem, family="megatron")


def _problem(p: Parallel) -> str | None:
    sizes = {axis: getattr(p, axis) for axis in (*_AXES, "vpp")} | {"etp": p.expert_tp}
    for axis, size in sizes.items():
        if size < 1:
            return f"{axis}={size} must be 1 or more"
    if sorted(p.order.split("-")) != sorted(_AXES):
        return (
            f"order {p.order!r} must name each of {', '.join(_AXES)} once, as 'tp-cp-ep-dp-pp' does"
        )
    if p.vpp > 1 and p.pp == 1:
        return f"vpp={p.vpp} needs a pipeline; use vpp=1 or a pp above 1"
    if p.stage_size % (p.expert_tp * p.ep):
        return (
            f"etp={p.expert_tp} times ep={p.ep} doesn't divide the {p.stage_size} ranks of a stage "
            f"(tp={p.tp}, cp={p.cp}, dp={p.dp}); use a smaller etp or ep, or a larger dp"
        )
    if p.pp > 1 and p.steps()["pp"] != p.expert_steps()["pp"]:
        return (
            f"in order {p.order!r} experts' pipeline stages would be other ranks than those of "
            "the rest; put pp last, or make etp times ep equal tp times cp"
        )
    return None
