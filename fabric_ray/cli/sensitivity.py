"""A simulated push's time over what it depends on, as a plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fabric_ray.cli.picture import save
from fabric_ray.errors import InvalidArgument
from fabric_ray.plan import Plan
from fabric_ray.weights.forecast import Push
from fabric_ray.weights.simulation import Setting, Simulated, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NICS = (1, 2, 4)
_WATERMARKS = tuple(n << 20 for n in (32, 64, 128, 256, 1024, 4096))
_WAYS = {False: ("shards are sent", "o-"), True: ("whole tensors are gathered", "s--")}

Points = list[tuple[float, Simulated]]


def sensitivity(push: Push, plan: Plan, setting: Setting, title: str, path: Path) -> None:
    """Draws a push's time over NICs and over the watermark, gathered and not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    nics, watermark = figure.subplots(1, 2, sharey=True)
    for gather, (label, style) in _WAYS.items():
        base = replace(setting, gather=gather)
        over_nics = points(push, plan, _with_nics(base))
        _line(nics, over_nics, label, style)
        _line(watermark, points(push, plan, _with_watermarks(base)), label, style)
        if not gather:
            floors = [(x, told.floor_seconds * 1e3) for x, told in over_nics]
            nics.plot(*zip(*floors, strict=True), ":", color="grey", label="floor")
            watermark.axhline(_floor(plan, setting), ls=":", color="grey", label="floor")
    nics.set(xlabel=f"NICs of {setting.cluster.gbps:g} Gb/s a rank", ylabel="ms", xticks=_NICS)
    watermark.set(xlabel="watermark, MiB", xscale="log")
    watermark.set_xticks([w >> 20 for w in _WATERMARKS], [str(w >> 20) for w in _WATERMARKS])
    watermark.minorticks_off()
    nics.set_ylim(bottom=0)
    watermark.legend()
    figure.suptitle(title, fontsize=10, parse_math=False)
    save(figure, title, path)


def points(push: Push, plan: Plan, settings: Iterable[tuple[float, Setting]]) -> Points:
    """Simulates a push in several settings; those whose watermark is too small are left out."""
    out: Points = []
    for at, setting in settings:
        try:
            out.append((at, simulate(push, plan, setting)))
        except InvalidArgument:
            continue
    return out


def _with_nics(base: Setting) -> Iterable[tuple[float, Setting]]:
    for nics in _NICS:
        yield nics, replace(base, cluster=replace(base.cluster, nics=nics))


def _with_watermarks(base: Setting) -> Iterable[tuple[float, Setting]]:
    for watermark in _WATERMARKS:
        yield watermark >> 20, replace(base, watermark=watermark)


def _line(axes: Axes, found: Points, label: str, style: str) -> None:
    axes.plot([x for x, _ in found], [told.seconds * 1e3 for _, told in found], style, label=label)


def _floor(plan: Plan, setting: Setting) -> float:
    balance, cluster = plan.balance(), setting.cluster
    busiest = max(*balance.sent.values(), *balance.received.values())
    return busiest * 8 / (cluster.nics * cluster.gbps * 1e6)
