"""Measures contenders turn by turn, beside their floor, and keeps each row as soon as it is known.

`measure` is what ``fabric-ray bench`` runs. ``python -m benchmarks`` in a clone measures more,
beside other libraries, with the same rows, turns, tables and pages.
"""

from __future__ import annotations

from fabric_ray.bench.local import PING_NBYTES, SIZES, TURNS, Report, measure
from fabric_ray.bench.record import Results, recorded
from fabric_ray.bench.results import ContenderError, Figure, Row, RowHeader
from fabric_ray.bench.turns import Entry, take_turns

__all__ = [
    "PING_NBYTES",
    "SIZES",
    "TURNS",
    "ContenderError",
    "Entry",
    "Figure",
    "Report",
    "Results",
    "Row",
    "RowHeader",
    "measure",
    "recorded",
    "take_turns",
]
