"""Pictures of runs, as PNG files: thousands of slices are too much for SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rails.simulator import POLICIES

_RAILS = ("#4c78a8", "#72b7b2", "#9d9ac8", "#b8a07e")
_POLICIES = {"adaptive": "#c8102e", "round-robin": "#1f77b4", "random": "#7f7f7f"}
_LOST, _AGAIN, _GRID = "#d62728", "#ff9500", "#888888"
_MS = 1e6


@contextmanager
def _drawn(path: Path, rows: int, columns: int, height: float, **shared: Any) -> Iterator[Any]:
    """Yields the figure and its axes, and writes it afterwards."""
    import matplotlib
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(8.4, height), layout="constrained", facecolor="white")
        panels = figure.subplots(rows, columns, **shared)
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
        yield figure, panels
        figure.savefig(path, format="png", dpi=120)


def _rail_names(report: Any) -> list[str]:
    return [f"rail {n}, {gbps:g} Gb/s" for n, gbps in enumerate(report.scenario.rails)]


def _happened(what: Any) -> str:
    """What happened to a rail, in words."""
    if isinstance(what, str):
        return "out, no notice" if what == "silent" else "back"
    return f"{what.rate:g} Gb/s" if hasattr(what, "rate") else "out"


def _draw_rails(axes: Any, report: Any) -> None:
    """What each rail carried, on top of each other, under what is up."""
    rates = [[count / _MS for count in rail] for rail in report.arrived]
    middles = [ms + 0.5 for ms in range(len(rates[0]))]
    axes.stackplot(middles, rates, labels=_rail_names(report), colors=_RAILS, linewidth=0)
    phases = report.summary.phases
    times = [at for phase in phases for at in (phase.from_ms, phase.to_ms)]
    up = [phase.capacity for phase in phases for _ in range(2)]
    axes.plot(times, up, color="black", linewidth=1.2, label="what is up can carry")
    for change in report.scenario.changes:
        axes.axvline(change.at_ms, color=_GRID, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, report.scenario.run_ms)
    axes.set_ylim(0, None)
    axes.set_ylabel("GB/s")


def draw_story(reports: Sequence[Any], path: Path) -> None:
    """What arrives over time by two policies: a panel for each."""
    height = 2.3 * len(reports) + 0.5
    with _drawn(path, len(reports), 1, height, sharex=True, sharey=True) as (figure, panels):
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
        for axes, report in zip(panels, reports, strict=True):
            _draw_rails(axes, report)
            style = {"fontweight": "bold", "color": _POLICIES[report.policy], "bbox": box}
            axes.text(0.01, 0.08, report.policy, transform=axes.transAxes, **style)
        top = {"transform": panels[0].get_xaxis_transform(), "fontsize": 8, "color": "#444444"}
        for change in reports[0].scenario.changes:
            said = f"rail {change.rail}: {_happened(change.what)}"
            panels[0].text(change.at_ms, 1.02, said, **top)
        panels[-1].set_xlabel("ms")
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)


def draw_failover(report: Any, span: tuple[float, float], path: Path) -> None:
    """Slices by rail around a loss, and what arrived during the whole run.

    A slice is drawn while its rail serves it: from the end of the one before, or since it was
    posted. One that was lost is drawn from when it was posted until its sender was told.
    """
    with _drawn(path, 2, 1, 6.0, height_ratios=(3, 2)) as (_, (slices, rates)):
        _draw_slices(slices, report, span)
        _draw_rails(rates, report)
        rates.set_title("what arrives, in each millisecond of the run", loc="left", fontsize=9)
        rates.axvspan(*span, color="#fff3b0", zorder=0)
        rates.set_xlabel("ms")
        rates.legend(loc="lower right", fontsize=7, ncols=2)


def _draw_slices(axes: Any, report: Any, span: tuple[float, float]) -> None:
    names = _rail_names(report)
    labels: dict[str, str | None] = {}

    def bars(at: list[tuple[float, float]], rail: float, height: float, kind: str) -> None:
        colour = {"lost with its rail": _LOST, "sent again": _AGAIN}.get(kind, _RAILS[int(rail)])
        # One entry in the legend for each kind.
        label = None if not kind or kind in labels else labels.setdefault(kind, kind)
        edge = {"linewidth": 0.3, "edgecolor": "white"} if colour != _LOST else {"linewidth": 0}
        axes.broken_barh(at, (rail - 0.36, height), facecolor=colour, label=label, **edge)

    for rail in range(len(names)):
        mine = sorted((s for s in report.slices if s.rail == rail), key=lambda s: s.ended)
        lost = [s for s in mine if s.fate == "lost"]
        free_at = 0
        served: dict[str, list[tuple[float, float]]] = {}
        for one in (s for s in mine if s.fate != "lost"):
            begin, free_at = max(one.posted, free_at), one.ended
            bar = (round(begin / _MS, 4), round((one.ended - begin) / _MS, 4))
            served.setdefault("sent again" if one.again else "", []).append(bar)
        for kind, at in served.items():
            bars(at, rail, 0.72, kind)
        # Those that were lost waited together: one line each, from post to word of the loss.
        for place, one in enumerate(lost):
            waited = (one.posted / _MS, (one.ended - one.posted) / _MS)
            height = 0.72 / len(lost)
            bars([waited], rail + place * height, height, "lost with its rail")
    for loss in report.summary.losses:
        axes.axvline(loss.at_ms, color="black", linewidth=1)
        axes.text(loss.at_ms, -0.62, "the cable is out ", ha="right", fontsize=8)
        over = loss.at_ms + loss.over_ms
        axes.axvline(over, color="black", linewidth=1, linestyle=":")
        axes.text(over, -0.62, " all that was in flight is over", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.9)
    axes.set_xlim(*span)
    axes.set_title("slices, while their rail serves them (ms)", loc="left", fontsize=9)
    axes.legend(loc="lower right", fontsize=7)


def draw_blocks(reports: Sequence[Any], path: Path) -> None:
    """Rates and 99th percentiles over block sizes, by each policy."""
    with _drawn(path, 1, 2, 3.2) as (_, panels):
        sizes = list(dict.fromkeys(r.scenario.name for r in reports))
        labels = [name.removeprefix("tent-") for name in sizes]
        for policy in POLICIES:
            mine = {r.scenario.name: r.summary for r in reports if r.policy == policy}
            style = {"label": policy, "color": _POLICIES[policy], "marker": "o", "markersize": 3.5}
            panels[0].plot(labels, [mine[name].rate for name in sizes], **style)
            panels[1].plot(labels, [mine[name].times.p99_us or 0.0 for name in sizes], **style)
        floor = sum(reports[0].scenario.rails) / 8
        panels[0].axhline(floor, color="black", linestyle="--", linewidth=1, label="all rails")
        panels[0].set_ylabel("GB/s")
        panels[1].set_ylabel("P99 of a block, us")
        panels[1].set_yscale("log")
        for axes in panels:
            axes.tick_params(axis="x", rotation=45)
            axes.grid(alpha=0.25)
        panels[0].legend(frameon=False, fontsize=8)
