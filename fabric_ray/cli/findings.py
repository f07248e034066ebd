"""What the doctor found, as a table."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from fabric_ray.cli.console import plain
from fabric_ray.doctor import Report

_UNUSED = {
    "gid": "addresses (GIDs) of RDMA ports",
    "offer": "libfabric interfaces of other providers",
}
"""By the code of findings: what a machine has and the engine does not use."""
_STYLES = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "bold red"}


def show(console: Console, report: Report, everything: bool) -> None:
    """Prints what was found; what the engine does not use only with ``everything``."""
    table = plain("", "what", "found")
    hidden: Counter[str] = Counter()
    for f in report.findings:
        if f.status == "absent" and f.code in _UNUSED and not everything:
            hidden[f.code] += 1
            continue
        detail = Text(f.detail)
        if f.remedy and f.status in ("warn", "fail"):
            detail.append(f"\n→ {f.remedy}", style="italic")
        table.add_row(Text(f.status, style=_STYLES[f.status]), Text(f.subject), detail)
    console.print(table)
    if hidden:
        counted = " and ".join(f"{hidden[code]} {_UNUSED[code]}" for code in hidden)
        console.print(f"also found, not needed: {counted}; see --all")
    bad = sum(f.status == "fail" for f in report.findings)
    words = "all that is there works" if report.healthy else f"{bad} failed"
    console.print(f"{words}; {report.seconds:.1f} s", style=_STYLES["ok" if not bad else "fail"])
