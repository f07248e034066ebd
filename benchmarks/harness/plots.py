"""Plots as inline SVG: lines over sizes, bars where there is no size."""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
from typing import Any

from benchmarks.harness.cases import size
from benchmarks.harness.results import TIMES, Row
from benchmarks.harness.table import number, ranked

_OURS = ("#c8102e", "#ff8a8a", "#7a0019", "#d96c00")
_FLOOR = ("#222222",)
_PEERS = (
    "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf",
    "#e377c2", "#7f7f7f", "#bcbd22", "#0b5394", "#38761d", "#741b47",
)  # fmt: skip

_WIDE = 50
"""Times the shortest bar: beyond that the shortest can't be seen on a linear axis."""


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def colours_of(rows: list[Row]) -> dict[str, str]:
    """A colour for each contender, the same in all plots of a page."""
    colours: dict[str, str] = {}
    palettes = {"ours": _OURS, "floor": _FLOOR, "peer": _PEERS}
    left = {family: itertools.cycle(palette) for family, palette in palettes.items()}
    for row in rows:
        for figure in row.figures:
            if figure.contender not in colours:
                colours[figure.contender] = next(left[figure.family])
    return colours


def svg_of(rows: list[Row], title: str, colours: dict[str, str]) -> str:
    """One plot of rows that share unit and kind; call only if `available`.

    Args:
        colours: from `colours_of` over at least these rows.

    Returns an `<svg>` element without the XML prologue.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    # Text stays text, and the file is the same for the same data.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9})
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    lines = rows[0].size is not None
    height = 3.8 if lines else 0.9 + 0.24 * sum(len(row.figures) + 1 for row in rows)
    figure, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
    if lines:
        _draw_lines(axes, rows, colours)
    else:
        _draw_bars(axes, rows, colours)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw_lines(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        found = [(row.size or 0, row.figure(name)) for row in rows]
        points = [(count, figure) for count, figure in found if figure is not None]
        if not points:
            continue
        sizes = [count for count, _ in points]
        family, threads = points[0][1].family, points[0][1].threads
        axes.plot(
            sizes,
            [figure.median for _, figure in points],
            label=name,
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=2.4 if family == "ours" else 1.3,
            linestyle=":" if threads > 1 else "--" if family == "floor" else "-",
        )
        low = [figure.low for _, figure in points]
        high = [figure.high for _, figure in points]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
    sizes = sorted({row.size or 0 for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size(count) for count in sizes])
    axes.minorticks_off()
    ticks = [
        t
        for t in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
        if _inside(t, axes.get_ylim())
    ]
    if len(ticks) < 2:
        # All within half a decade: what was measured says where.
        ticks = sorted({line.get_ydata()[0] for line in axes.lines})
    axes.set_yticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.grid(alpha=0.25)
    axes.set_ylabel(rows[0].unit)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _inside(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _draw_bars(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    labels: list[str] = []
    place = 0.0
    places: list[float] = []
    for row in rows:
        for figure in ranked(row):
            axes.barh(place, figure.median, height=0.75, color=colours[figure.contender])
            text = f" {number(figure.median, row.unit)}"
            axes.text(figure.median, place, text, va="center", fontsize=8)
            labels.append(f"{row.key.partition('/')[2]}  {figure.contender}")
            places.append(place)
            place += 1.0
        place += 0.8
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    values = [figure.median for row in rows for figure in row.figures]
    if max(values) > _WIDE * min(values):
        axes.set_xscale("log")
        axes.set_xlim(left=min(values) / 3)
    else:
        # Bars are compared by their lengths.
        axes.set_xlim(left=0)
    unit = rows[0].unit
    axes.set_xlabel(f"{unit} (shorter is better)" if unit in TIMES else unit)
