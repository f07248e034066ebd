"""From a plan to the time that its push takes."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import msgspec

from fabric_ray._native import simulate as _simulate
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Plan
from fabric_ray.weights.forecast import Push, pushed_sides
from fabric_ray.weights.simulation.setting import STAGES, Setting
from fabric_ray.weights.simulation.tasks import Task, Tasks, tensors
from fabric_ray.weights.steps import StepAssignment

MAX_WRITES = 10_000_000
"""That are simulated in minutes."""
_WATERMARK = 256 << 20
_NS = 1e9

_Step = tuple[list[int], tuple[int, int, int, int], int, int, int]


class Simulated(msgspec.Struct, frozen=True):
    """What came of a simulated push; times are virtual seconds."""

    seconds: float
    """Until the last rollout has all of its bytes."""
    floor_seconds: float
    """The busiest rank's bytes over its NICs: no push is faster."""
    critical: dict[str, float]
    """The push's time by :data:`STAGES`: what was waited for, from its end back to its begin."""
    busy: dict[str, float]
    """What a trainer spends on each stage but ``write``, on average; stages overlap."""
    waiting: float
    """What a trainer waits for the others once it has sent everything, on average."""
    peak_nbytes: int
    """The most temporary memory that a trainer holds."""
    watermark: int
    tensors: float
    """Of a trainer, on average; a layer's experts are one tensor."""
    calls: float
    """Of a trainer that submit something, on average."""
    requests: float
    """Of a trainer: work requests, on average."""
    posted: int
    """Work requests of all trainers in the simulation, where those of one call are taken together
    to pages."""
    digest: int
    """Equal for equal pushes: the simulation is deterministic."""

    @property
    def ratio(self) -> float:
        """Time over floor."""
        return self.seconds / self.floor_seconds


def simulate(push: Push, plan: Plan, setting: Setting) -> Simulated:
    """Simulates a push that was planned.

    Args:
        plan: of that push, by :func:`fabric_ray.weights.forecast.forecast`.

    Raises:
        InvalidArgument: a tensor takes more temporary memory than the watermark; sizes that mean
            nothing.
    """
    balance, page = plan.balance(), setting.cluster.page
    if balance.nbytes // page > MAX_WRITES:
        least = -(-balance.nbytes // MAX_WRITES)
        raise InvalidArgument(
            f"page: got {page} bytes, which makes {balance.nbytes // page:,} writes, expected at "
            f"most {MAX_WRITES:,}; give {least} bytes ({least / 2**20:.3g} MiB) or more"
        )
    held, (sent, _) = pushed_sides(push)
    tasks = Tasks(held, sent, push.formats, setting)
    ranks = plan.ranks("source")
    of = [tasks.of(rank) for rank in ranks]
    watermark = setting.watermark
    if watermark is None:
        watermark = max(_WATERMARK, *(t.unit.nbytes for these in of for t in these), 0)
    divided = [
        _steps(plan.sending_order(rank), t, watermark) for rank, t in zip(ranks, of, strict=True)
    ]
    simulated = _simulate(plan._core, [steps for steps, _ in divided], _network(setting))
    busiest = max(*balance.sent.values(), *balance.received.values())
    rate = setting.cluster.gbps * setting.cluster.nics / 8 * 1e9
    return _result(simulated, busiest / rate, watermark, fmean(n for _, n in divided))


def _steps(order: list[int], tasks: list[Task], watermark: int) -> tuple[list[_Step], int]:
    """The steps of a rank, with what each takes; and how many tensors that is."""
    task_of = {task.unit.name: task for task in tasks}
    group = {task.unit.values: task.group for task in tasks}
    group |= {t.unit.scales: t.group for t in tasks if t.unit.scales is not None}
    assignment = StepAssignment([task.unit for task in tasks], watermark)
    containers: dict[int, list[int]] = {}
    for container in sorted(order, key=lambda c: group.get(c, 0)):
        containers.setdefault(assignment.step_of(container), []).append(container)
    out: list[_Step] = []
    for number, (units, ring_slice) in enumerate(
        zip(assignment.members, assignment.ring_slices(), strict=True)
    ):
        these = [task_of[unit.name] for unit in units]
        ready = [round(sum(task.ready[stage] for task in these) * _NS) for stage in range(4)]
        out.append(
            (
                containers.get(number, []),
                (ready[0], ready[1], ready[2], ready[3]),
                sum(unit.nbytes for unit in units),
                ring_slice.after + 1,
                max((task.group for task in these), default=0),
            )
        )
    return out, tensors(unit.name for units in assignment.members for unit in units)


def _network(setting: Setting) -> dict[str, float]:
    cluster, costs = setting.cluster, setting.costs
    return {
        "nics": cluster.nics,
        "rate": cluster.gbps / 8,
        "latency": round(cluster.latency * _NS),
        "call": round(costs.submit * _NS),
        "request": round(costs.request * _NS),
        "page": cluster.page,
    }


def _result(
    simulated: dict[str, Any], floor: float, watermark: int, tensors_each: float
) -> Simulated:
    seconds = simulated["time"] / _NS
    busy = zip(STAGES[:-1], zip(*simulated["busy"], strict=True), strict=False)
    return Simulated(
        seconds=seconds,
        floor_seconds=floor,
        critical={s: ns / _NS for s, ns in zip(STAGES, simulated["path"], strict=True)},
        busy={stage: fmean(ns) / _NS for stage, ns in busy},
        waiting=seconds - fmean(simulated["ended"]) / _NS,
        peak_nbytes=simulated["peak"],
        watermark=watermark,
        tensors=tensors_each,
        calls=fmean(simulated["calls"]),
        requests=fmean(simulated["requests"]),
        posted=simulated["posted"],
        digest=simulated["digest"],
    )
