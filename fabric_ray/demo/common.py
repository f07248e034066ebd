"""What demos share: their Ray cluster, their output, their failures, their checks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from rich.console import Console
from rich.table import Table

from fabric_ray.errors import FabricError, InvalidArgument, given_path
from fabric_ray.models.errors import ModelError
from fabric_ray.runtime.causes import cause_of
from fabric_ray.weights.families import FamilyError
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


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Ray at ``address`` or ``RAY_ADDRESS``, or started here; stopped in the end unless it was
    running. What an actor raises comes out as it was, if it has a name; Ray's own errors as ours.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if not address:
        settings |= {"include_dashboard": False, "object_store_memory": 128 << 20}
    running = ray.is_initialized()
    try:
        host, _, port = (address or "local").rpartition(":")
        if port.isdecimal() and "/" not in host:
            # Ray itself would try for a minute where nothing listens.
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        if not running:
            with sigterm_handler_kept():
                ray.init(address=address or "local", **settings)
    except (OSError, ValueError) as error:
        if not address:
            raise FabricError(
                f"Ray can't be started here ({error}); set HOME and RAY_TMPDIR to directories that "
                "can be written, RAY_TMPDIR to a short path, or name a cluster that runs by "
                "--address or RAY_ADDRESS"
            ) from error
        raise InvalidArgument(
            f"no Ray cluster answers at {address} ({error}); name one that runs by --address or "
            "RAY_ADDRESS, or none to have Ray started here"
        ) from error
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, FabricError) else error from error.__cause__
    except RayError as error:
        raise FabricError(f"an actor of the demo failed: {cause_of(error)}") from error
    finally:
        if not running:
            ray.shutdown()


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Ray's own handlers abort the process, which then leaves its files."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def named(*options: str) -> Iterator[None]:
    """Adds the names of options of the command line to what is refused about the model's ranks."""
    try:
        yield
    except (FamilyError, ModelError) as error:
        raise InvalidArgument(f"{', '.join(options)}: {error}") from error


def make_output(directory: Path) -> None:
    """Raises InvalidArgument if results can't be written there."""
    with given_path(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # It may have been there, and belong to another user.
        TemporaryFile(dir=directory).close()


def plain(title: str | None = None, *, show_header: bool = True) -> Table:
    """A table without lines: figures stay whole in 80 columns."""
    title = title and f"\n{title}"
    return Table(
        box=None, pad_edge=False, title=title, title_justify="left", show_header=show_header
    )


def print_checks(checks: Mapping[str, bool], console: Console) -> None:
    """One line for each."""
    for check, holds in checks.items():
        console.print(f"{'[green]yes[/]' if holds else '[red]no [/]'}  {check}")


class Lanes(NamedTuple):
    """A part of a timeline: a lane for each actor, in the order of their first spans."""

    title: str
    spans: Sequence[Span]
    begin: float
    """Seconds since the epoch."""
    milliseconds: bool = False
    end: float | None = None
    """Seconds from the begin to a dashed line."""


def draw_timeline(path: Path, *parts: Lanes) -> None:
    """Writes a PNG with one part below the other."""
    from matplotlib.figure import Figure

    actors = [list(dict.fromkeys(span.actor for span in part.spans)) for part in parts]
    heights = [1.2 + 0.45 * len(lanes) for lanes in actors]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained", dpi=130)
    panes = figure.subplots(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, lanes, part in zip(panes, actors, parts, strict=True):
        scale = 1e3 if part.milliseconds else 1.0
        named: set[str] = set()
        for span in part.spans:
            axes.barh(
                lanes.index(span.actor),
                max(span.seconds * scale, 0.0),
                left=(span.start - part.begin) * scale,
                height=0.7,
                color=_COLOURS.get(span.stage, "#888888"),
                label=span.stage if span.stage not in named else None,
            )
            named.add(span.stage)
        if part.end is not None:
            axes.axvline(part.end * scale, color="#333333", linewidth=1, linestyle="--")
        axes.set_xlabel("milliseconds" if part.milliseconds else "seconds")
        axes.set_title(part.title, loc="left", fontsize="medium")
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    with given_path(path):
        figure.savefig(path)
