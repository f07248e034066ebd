"""The picture of a demo: who did what when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fabric_ray.demo.options import Push
from fabric_ray.errors import given_path
from fabric_ray.weights.report import Span

# Paul Tol's bright scheme: told apart with any kind of colour vision.
_COLOURS = {
    "start": "#bbbbbb",
    "connect": "#ccbb44",
    "train": "#4477aa",
    "generate": "#66ccee",
    "push": "#ee6677",
    "floor": "#dddddd",
    "check": "#228833",
    "prepare": "#ccbb44",
    "write": "#ee6677",
    "arrive": "#66ccee",
    "digest": "#aa3377",
    "commit": "#228833",
}


def draw(path: Path, driver: Sequence[Span], pushes: Sequence[Push]) -> None:
    """Writes a PNG: the whole run above, the last push below, milliseconds from its start."""
    from matplotlib.figure import Figure

    last = pushes[-1].report
    actors = sorted({span.who for span in last.spans}, key=lambda who: (who[0] != "t", who))
    figure = Figure(figsize=(11, 2.6 + 0.42 * (len(actors) + 1)), layout="constrained", dpi=130)
    above, below = figure.subplots(2, 1, height_ratios=[1, 0.6 + 0.6 * len(actors)])
    begin = min(span.start for span in driver)
    _bars(above, ["driver"], driver, begin, 1.0)
    above.set_xlabel("seconds")
    above.set_title("the whole run", loc="left", fontsize="medium")
    zero = last.started
    _bars(below, actors, last.spans, zero, 1e3)
    below.set_xlabel("milliseconds")
    below.axvline(last.seconds * 1e3, color="#333333", linewidth=1, linestyle="--")
    below.set_title(
        f"push of version {last.version}: {last.nbytes / 1e6:.0f} MB in "
        f"{last.seconds * 1e3:.0f} ms, {last.gbytes_per_s:.1f} GB/s; dashed: in use everywhere",
        loc="left",
        fontsize="medium",
    )
    with given_path(path):
        figure.savefig(path)


def draw_lanes(path: Path, spans: Sequence[Span], title: str) -> None:
    """Writes a PNG: a lane for each actor, in the order of their first spans, seconds from the
    start."""
    from matplotlib.figure import Figure

    lanes = list(dict.fromkeys(span.who for span in spans))
    figure = Figure(figsize=(11, 1.2 + 0.45 * len(lanes)), layout="constrained", dpi=130)
    axes = figure.subplots()
    _bars(axes, lanes, spans, min(span.start for span in spans), 1.0)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize="medium")
    with given_path(path):
        figure.savefig(path)


def _bars(axes: Any, rows: Sequence[str], spans: Sequence[Span], zero: float, scale: float) -> None:
    named: set[str] = set()
    for span in spans:
        axes.barh(
            rows.index(span.who),
            max(span.seconds * scale, 0.0),
            left=(span.start - zero) * scale,
            height=0.7,
            color=_COLOURS.get(span.stage, "#888888"),
            label=span.stage if span.stage not in named else None,
        )
        named.add(span.stage)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
