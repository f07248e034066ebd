"""Pictures: the heat map of a plan, bytes from each trainer to each rollout."""

from __future__ import annotations

from datetime import datetime
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fabric_ray import __version__
from fabric_ray.errors import InvalidArgument, given_path
from fabric_ray.extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fabric_ray.plan import Plan

_MOST_LABELS = 256
"""Cells of a heat map up to which each is labelled with its number."""

KINDS = (".svg", ".png", ".html")


def check_picture(path: Path, *, option: str = "--picture") -> None:
    """That such a picture can be drawn.

    Raises:
        InvalidArgument: the name ends in none of :data:`KINDS`, its directory is missing, or
            matplotlib is.
    """
    if path.suffix not in KINDS:
        raise InvalidArgument(f"{option} {path}: give a name that ends in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{option} {path}: {path.parent} is no directory; make it first")
    if find_spec("matplotlib") is None:
        raise InvalidArgument(
            f"{option} needs matplotlib, which isn't installed; "
            f"{how_to_install('ray', 'matplotlib')}"
        )


def draw(plan: Plan, title: str, path: Path) -> None:
    """Writes the heat map of a plan: trainers from top to bottom, rollouts from left to right."""
    save(_heat_map(matrix(plan), f"Bytes from trainers to rollouts: {title}"), title, path)


def save(figure: Figure, title: str, path: Path) -> None:
    """Writes a figure as what the path's name says.

    Raises:
        InvalidArgument: it can't be written there.
    """
    kind = "png" if path.suffix == ".png" else "svg"
    out = BytesIO()
    figure.savefig(out, format=kind, dpi=150)
    image = out.getvalue()
    if path.suffix == ".html":
        body = image.decode()
        head = (
            f"<!doctype html>\n<meta charset=utf-8>\n<title>{escape(title)}</title>\n"
            "<style>svg{max-width:100%;height:auto}</style>\n"
            f"<h1>{escape(title)}</h1>\n<p>Made by fabric-ray {__version__} on {_today()}.</p>\n"
        )
        image = (head + body[body.index("<svg") :]).encode()
    with given_path(path):
        path.write_bytes(image)


def matrix(plan: Plan) -> npt.NDArray[np.float64]:
    """``[trainers, rollouts]``: bytes from one to the other."""
    rows = {rank: at for at, rank in enumerate(plan.ranks("source"))}
    columns = {rank: at for at, rank in enumerate(plan.ranks("target"))}
    matrix = np.zeros((len(rows), len(columns)))
    for link in plan.links():
        matrix[rows[link.src], columns[link.dst]] = link.nbytes
    return matrix


def _heat_map(matrix: npt.NDArray[np.float64], title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots()
    scale = max(matrix.max(), 1.0)
    unit, name = next(u for u in ((1e9, "GB"), (1e6, "MB"), (1.0, "bytes")) if scale >= u[0])
    # What exchanges nothing stays white.
    shown = np.ma.masked_equal(matrix, 0) / unit
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    figure.colorbar(image, label=f"{name} from trainer to rollout")
    axes.set(xlabel="rollout rank", ylabel="trainer rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if matrix.size <= _MOST_LABELS:
        dark = scale / unit / 2
        for (row, column), value in np.ndenumerate(matrix / unit):
            if value:
                color = "white" if value < dark else "black"
                label = f"{value:.3g}"
                axes.text(column, row, label, ha="center", va="center", color=color, fontsize=8)
    sent = matrix.sum(axis=1).max() / unit
    received = matrix.sum(axis=0).max() / unit
    axes.set_title(
        f"{title}\n{matrix.sum() / unit:.4g} {name} in all; busiest trainer {sent:.4g} {name}, "
        f"busiest rollout {received:.4g} {name}\nfabric-ray {__version__}, {_today()}",
        fontsize=9,
        parse_math=False,
    )
    return figure


def _today() -> str:
    return datetime.now().astimezone().date().isoformat()
