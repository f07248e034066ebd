"""Pictures of runs, as PNG files: thousands of slices are too much for SVG."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rails.simulator import POLICIES

_RAILS = ("#4c78a8", "#72b7b2", "#9d9ac8", "#b8a07e")
_POLICIES = {"adaptive": "#c8102e", "round-robin": "#1f77b4", "random": "#7f7f7f"}
_LOST, _AGAIN, _GRID = "#d62728", "#ff9500", "#888888"
_MS = 1e6


def _pyplot() -> Any:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9})
    return importlib.import_module("matplotlib.pyplot")


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120, facecolor="white")
    pyplot.close(figure)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _rail_name(report: Any, rail: int) -> str:
    return f"rail {rail}, {report.scenario.rails[rail]:g} Gb/s"


def _happened(what: Any) -> str:
    """What happened to a rail, in words."""
    if isinstance(what, str):
        return "out, no notice" if what == "silent" else "back"
    return f"{what.rate:g} Gb/s" if hasattr(what, "rate") else "out"


def _draw_rails(axes: Any, report: Any) -> None:
    """What each rail carried, on top of each other, under what is up."""
    rates = [[count / _MS for count in rail] for rail in report.arrived]
    middles = [ms + 0.5 for ms in range(len(rates[0]))]
    names = [_rail_name(report, rail) for rail in range(len(rates))]
    axes.stackplot(middles, rates, labels=names, colors=_RAILS, linewidth=0)
    phases = report.summary.phases
    times = [at for phase in phases for at in (phase.from_ms, phase.to_ms)]
    up = [phase.capacity for phase in phases for _ in range(2)]
    axes.plot(times, up, color="black", linewidth=1.2, label="what is up can carry")
    for change in report.scenario.changes:
        axes.axvline(change.at_ms, color=_GRID, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, report.scenario.run_ms)
    axes.set_ylim(0, None)
    axes.set_ylabel("GB/s")
    _bare(axes)


def _name_changes(axes: Any, report: Any) -> None:
    for change in report.scenario.changes:
        axes.text(
            change.at_ms,
            1.02,
            f"rail {change.rail}: {_happened(change.what)}",
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            color="#444444",
        )


def draw_story(reports: Sequence[Any], path: Path) -> None:
    """What arrives over time by two policies: a panel for each."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(
        len(reports), 1, figsize=(8.4, 2.3 * len(reports) + 0.5), sharex=True, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axes, report in zip(panels, reports, strict=True):
        _draw_rails(axes, report)
        axes.text(
            0.01,
            0.08,
            report.policy,
            transform=axes.transAxes,
            fontweight="bold",
            color=_POLICIES[report.policy],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2},
        )
    _name_changes(panels[0], reports[0])
    panels[-1].set_xlabel("ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    _save(pyplot, figure, path)


def draw_failover(report: Any, span: tuple[float, float], path: Path) -> None:
    """Slices by rail around a loss, and what arrived during the whole run.

    A slice is drawn while its rail serves it: from the end of the one before, or since it was
    posted. One that was lost is drawn from when it was posted until its sender was told.
    """
    pyplot = _pyplot()
    figure, (slices, rates) = pyplot.subplots(
        2, 1, figsize=(8.4, 6.0), height_ratios=(3, 2), layout="constrained"
    )
    _draw_slices(slices, report, span)
    _draw_rails(rates, report)
    rates.set_title("what arrives, in each millisecond of the run", loc="left", fontsize=9)
    rates.axvspan(*span, color="#fff3b0", zorder=0)
    rates.set_xlabel("ms")
    rates.legend(loc="lower right", fontsize=7, ncols=2)
    _save(pyplot, figure, path)


def _kind(one: Any) -> tuple[str, str]:
    if one.fate == "lost":
        return _LOST, "lost with its rail"
    return (_AGAIN, "sent again") if one.again else ("", "")


def _draw_slices(axes: Any, report: Any, span: tuple[float, float]) -> None:
    named: set[str] = set()
    for rail in range(len(report.scenario.rails)):
        mine = sorted((s for s in report.slices if s.rail == rail), key=lambda s: s.ended)
        free_at = 0
        lost = [s for s in mine if s.fate == "lost"]
        served: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for one in (s for s in mine if s.fate != "lost"):
            begin, free_at = max(one.posted, free_at), one.ended
            bar = (round(begin / _MS, 4), round((one.ended - begin) / _MS, 4))
            served.setdefault(_kind(one), []).append(bar)
        for (colour, name), bars in served.items():
            axes.broken_barh(
                bars,
                (rail - 0.36, 0.72),
                facecolor=colour or _RAILS[rail],
                edgecolor="white",
                linewidth=0.3,
                label=name if name and name not in named else None,
            )
            named.add(name)
        # Those that were lost waited together: one line each, from post to word of the loss.
        for place, one in enumerate(lost):
            axes.broken_barh(
                [(one.posted / _MS, (one.ended - one.posted) / _MS)],
                (rail - 0.36 + 0.72 * place / len(lost), 0.72 / len(lost)),
                facecolor=_LOST,
                linewidth=0,
                label=_kind(one)[1] if place == 0 else None,
            )
    for loss in report.summary.losses:
        axes.axvline(loss.at_ms, color="black", linewidth=1)
        axes.text(loss.at_ms, -0.62, "the cable is out ", ha="right", fontsize=8)
        over = loss.at_ms + loss.over_ms
        axes.axvline(over, color="black", linewidth=1, linestyle=":")
        axes.text(over, -0.62, " all that was in flight is over", fontsize=8)
    names = [_rail_name(report, rail) for rail in range(len(report.scenario.rails))]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.9)
    axes.set_xlim(*span)
    axes.set_title("slices, while their rail serves them (ms)", loc="left", fontsize=9)
    axes.legend(loc="lower right", fontsize=7)
    _bare(axes)


def draw_blocks(reports: Sequence[Any], path: Path) -> None:
    """Rates and 99th percentiles over block sizes, by each policy."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
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
        _bare(axes)
    panels[0].legend(frameon=False, fontsize=8)
    _save(pyplot, figure, path)
