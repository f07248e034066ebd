"""One HTML page with plots and tables, which needs nothing but itself."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fabric_ray.bench.results import TIMES, Report, Row
from fabric_ray.bench.table import details, number, ranked, ratio, size

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222;
background:#fff}
h1{font-size:1.5em}h2{margin-top:2.2em;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-size:13px;width:100%}
th,td{padding:.25em .6em;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
th{position:sticky;top:0;background:#fff}
td:first-child,th:first-child,th:last-child,td.text{text-align:left}td.text{white-space:normal;color:#555}
tbody tr.case td{border-top:2px solid #bbb;font-weight:600}
tr.ours td{color:#c8102e;font-weight:600}tr.floor td{color:#000;background:#f6f6f6}
tr.failed td{color:#a00}svg{max-width:100%;height:auto}
dt{float:left;clear:left;width:9em;color:#555}
dd{margin-left:9.5em}.scroll{overflow-x:auto}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(500px,1fr));gap:1em;
align-items:start;margin:1em 0}
"""

_INTRO = (
    "Contenders took turns inside this run, in an order that rotated, so that the machine's noise "
    "hits all alike. Speeds are medians of turns; the range is their quartiles, best the best "
    "single sample; ratios are medians of per-turn ratios. The floor is the best plain copy, "
    "signal or socket loop with the same number of threads in the same turn. The clock runs from "
    "the sender's call until the target knows that the bytes are there, unless the note says "
    "otherwise."
)
_HEADINGS = "contender median best quartiles of&nbsp;floor ours&nbsp;over&nbsp;it samples how"
_COLOURS = {
    "ours": ("#c8102e", "#ff8a8a", "#7a0019", "#d96c00"),
    "floor": ("#222222",),
    "peer": (
        *("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf"),
        *("#e377c2", "#7f7f7f", "#bcbd22", "#0b5394", "#38761d", "#741b47"),
    ),
}
_WIDE = 50
"""Times the shortest bar: beyond that the shortest can't be seen on a linear axis."""


def write_page(report: Report, path: Path) -> None:
    path.write_text("".join(_page(report)), encoding="utf-8")


def _page(report: Report) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8>"
    yield "<meta name=viewport content='width=device-width,initial-scale=1'>"
    yield f"<title>fabric-ray benchmarks</title><style>{_STYLE}</style>"
    yield f"<h1>fabric-ray benchmarks</h1><p>{_INTRO}</p><dl>"
    for name, fact in _facts(report).items():
        yield f"<dt>{name}</dt><dd>{escape(fact) or '-'}</dd>"
    yield "</dl>"
    colours = colours_of(report.rows)
    for suite, rows in report.suites.items():
        yield from _suite(suite, rows, colours)
    absent = [f"{a.contender}: {a.reason}; {a.obtain}" for a in report.runs[-1].absent]
    left = "Left behind by contenders, and removed"
    for title, items in (("Not installed here", absent), (left, report.left_behind)):
        if items:
            listed = "".join(f"<li>{escape(item)}</li>" for item in items)
            yield f"<h2>{title}</h2><ul>{listed}</ul>"
    yield "</html>\n"


def _facts(report: Report) -> dict[str, str]:
    first, last = report.runs[0], report.runs[-1]
    machine = last.machine
    loads = [first.load, *(end.load for end in report.ends[-1:])]
    said = {
        "caches": machine.caches,
        "versions": {"python": machine.python, **machine.versions},
    }
    return {
        "measured": f"{first.started}, {sum(end.seconds for end in report.ends):.0f} s",
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.memory_bytes / 1e9:.1f} GB",
        "kernel": machine.kernel,
        "load": " before, ".join(" ".join(f"{x:.2f}" for x in load) for load in loads) + " after",
        **{n: ", ".join(f"{k} {v}" for k, v in facts.items()) for n, facts in said.items()},
        "commit": machine.commit,
        "options": ", ".join(f"{name}={value}" for name, value in last.options.items()),
    }


def _suite(suite: str, rows: list[Row], colours: dict[str, str]) -> Iterator[str]:
    yield f"<h2>{escape(suite)}</h2>"
    if find_spec("matplotlib") is not None:
        groups = dict.fromkeys(row.plot for row in rows if row.figures)
        plots = (
            svg_of([r for r in rows if r.figures and r.plot == title], title, colours)
            for title in groups
        )
        yield f"<div class=plots>{''.join(plots)}</div>"
    else:
        yield "<p>No plots: matplotlib is not installed (pip install matplotlib).</p>"
    headings = "".join(f"<th>{heading}" for heading in _HEADINGS.split())
    yield f"<div class=scroll><table><thead><tr>{headings}</tr></thead><tbody>"
    for row in rows:
        yield f"<tr class=case><td colspan=8>{escape(row.key)} &nbsp; {escape(row.unit)}</td></tr>"
        for figure in ranked(row):
            median, best, low, high = (
                number(value, row.unit)
                for value in (figure.median, figure.best, figure.low, figure.high)
            )
            ratios = ratio(figure.of_floor), ratio(figure.ours_over)
            cells = figure.contender, median, best, f"{low} - {high}", *ratios, str(figure.samples)
            note = f"{figure.chosen}: {figure.note}" if figure.chosen else figure.note
            note = "; ".join(filter(None, (note, details(figure))))
            shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield f"<tr class={figure.family}>{shown}<td class=text>{escape(note)}</td></tr>"
        for failure in row.failures:
            yield f"<tr class=failed><td>{escape(failure.contender)}</td>"
            yield f"<td class=text colspan=7>failed: {escape(failure.reason)}</td></tr>"
    yield "</tbody></table></div>"


def colours_of(rows: list[Row]) -> dict[str, str]:
    """A colour for each contender, the same in all plots of a page."""
    colours: dict[str, str] = {}
    left = {family: itertools.cycle(palette) for family, palette in _COLOURS.items()}
    for figure in (figure for row in rows for figure in row.figures):
        if figure.contender not in colours:
            colours[figure.contender] = next(left[figure.family])
    return colours


def svg_of(rows: list[Row], title: str, colours: dict[str, str]) -> str:
    """One plot of rows that share unit and kind: lines over sizes, bars where there is no size.

    Args:
        colours: from `colours_of` over at least these rows.

    Returns an `<svg>` element without the XML prologue.
    """
    import matplotlib
    from matplotlib.figure import Figure

    lines = rows[0].size is not None
    height = 3.8 if lines else 0.9 + 0.24 * sum(len(row.figures) + 1 for row in rows)
    # Text stays text, and the file is the same for the same data.
    same = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}
    with matplotlib.rc_context(same):  # type: ignore[arg-type]
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.subplots()
        (draw_lines if lines else _draw_bars)(axes, rows, colours)
        axes.set_title(title, loc="left", fontweight="bold", parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_lines(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    """A line over sizes for each contender, on axes of matplotlib."""
    for name, colour in colours.items():
        points = [(row.size or 0, f) for row in rows if (f := row.figure(name)) is not None]
        if not points:
            continue
        at, figures = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        family, threads = figures[0].family, figures[0].threads
        axes.plot(
            at,
            [figure.median for figure in figures],
            label=name,
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=2.4 if family == "ours" else 1.3,
            linestyle=":" if threads > 1 else "--" if family == "floor" else "-",
        )
        bounds = [f.low for f in figures], [f.high for f in figures]
        axes.fill_between(at, *bounds, color=colour, alpha=0.12, linewidth=0)
    sizes = sorted({row.size or 0 for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size(count) for count in sizes])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [t for e in range(-3, 3) for t in (10.0**e, 3 * 10.0**e) if low <= t <= high]
    if len(ticks) < 2:
        # All within half a decade: what was measured says where.
        ticks = sorted({line.get_ydata()[0] for line in axes.lines})
    axes.set_yticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.grid(alpha=0.25)
    axes.set_ylabel(rows[0].unit)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _draw_bars(axes: Any, rows: list[Row], colours: dict[str, str]) -> None:
    labels: list[str] = []
    places: list[float] = []
    place = 0.0
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
