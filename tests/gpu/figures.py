"""Figures of GPU checks: printed, and appended to the file that ``FABRIC_FIGURES`` names."""

from __future__ import annotations

import json
import os


def note(name: str, value: float, *, aim: str | None = None, met: bool | None = None) -> None:
    """One figure; with what it should be, and whether it is."""
    told = "" if aim is None else f"  (aim: {aim}{'' if met is not False else ', MISSED'})"
    print(f"    {name}: {value:.4g}{told}", flush=True)
    if path := os.environ.get("FABRIC_FIGURES"):
        line = {"name": name, "value": value, "aim": aim, "met": met}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def require(name: str, value: float, *, at_most: float | None = None, least: float = 0.0) -> None:
    """One figure that must not be missed."""
    aim = f"at most {at_most:g}" if at_most is not None else f"at least {least:g}"
    met = value <= at_most if at_most is not None else value >= least
    note(name, value, aim=aim, met=met)
    assert met, f"{name} is {value:.4g}, and is to be {aim}"
