"""One HTML page with plots and tables, which needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from benchmarks.harness import plots
from benchmarks.harness.results import Report, Row
from benchmarks.harness.table import details, number, ranked, ratio

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
    colours = plots.colours_of(report.rows)
    for suite, rows in report.suites.items():
        yield from _suite(suite, rows, colours)
    absent = report.runs[-1].absent
    for title, items in (
        ("Not installed here", [f"{a.contender}: {a.reason}; {a.obtain}" for a in absent]),
        ("Left behind by contenders, and removed", report.left_behind),
    ):
        if items:
            listed = "".join(f"<li>{escape(item)}</li>" for item in items)
            yield f"<h2>{title}</h2><ul>{listed}</ul>"
    yield "</html>\n"


def _facts(report: Report) -> dict[str, str]:
    first, last = report.runs[0], report.runs[-1]
    machine = last.machine
    loads = [
        " ".join(f"{x:.2f}" for x in load)
        for load in (first.load, *(end.load for end in report.ends[-1:]))
    ]
    versions = {"python": machine.python, **machine.versions}
    return {
        "measured": f"{first.started}, {sum(end.seconds for end in report.ends):.0f} s",
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "caches": ", ".join(f"{name} {size}" for name, size in machine.caches.items()),
        "memory": f"{machine.memory_bytes / 1e9:.1f} GB",
        "kernel": machine.kernel,
        "load": " before, ".join(loads) + " after",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": machine.commit,
        "options": ", ".join(f"{name}={value}" for name, value in last.options.items()),
    }


def _suite(suite: str, rows: list[Row], colours: dict[str, str]) -> Iterator[str]:
    yield f"<h2>{escape(suite)}</h2>"
    if plots.available():
        groups = dict.fromkeys(row.plot for row in rows if row.figures)
        drawn = (
            plots.svg_of([r for r in rows if r.figures and r.plot == title], title, colours)
            for title in groups
        )
        yield f"<div class=plots>{''.join(drawn)}</div>"
    else:
        yield "<p>No plots: matplotlib is not installed (pip install matplotlib).</p>"
    yield "<div class=scroll><table><thead><tr><th>contender<th>median<th>best<th>quartiles"
    yield "<th>of floor<th>ours over it<th>samples<th>how</tr></thead><tbody>"
    for row in rows:
        yield f"<tr class=case><td colspan=8>{escape(row.key)} &nbsp; {escape(row.unit)}</td></tr>"
        for figure in ranked(row):
            cells = [
                figure.contender,
                number(figure.median, row.unit),
                number(figure.best, row.unit),
                f"{number(figure.low, row.unit)} - {number(figure.high, row.unit)}",
                ratio(figure.of_floor),
                ratio(figure.ours_over),
                str(figure.samples),
            ]
            note = f"{figure.chosen}: {figure.note}" if figure.chosen else figure.note
            note = "; ".join(filter(None, (note, details(figure))))
            shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield f"<tr class={figure.family}>{shown}<td class=text>{escape(note)}</td></tr>"
        for failure in row.failures:
            yield f"<tr class=failed><td>{escape(failure.contender)}</td>"
            yield f"<td class=text colspan=7>failed: {escape(failure.reason)}</td></tr>"
    yield "</tbody></table></div>"
