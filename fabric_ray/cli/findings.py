"""What the doctor found, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fabric_ray.cli.console import plain
from fabric_ray.doctor import Report

_STYLES = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "bold red"}


def show(console: Console, report: Report, everything: bool) -> None:
    """Prints what was found; unused GIDs and offers only with ``everything``."""
    table = plain("", "what", "found")
    hidden = 0
    for f in report.findings:
        if f.status == "absent" and f.code in ("gid", "offer") and not everything:
            hidden += 1
            continue
        detail = Text(f.detail)
        if f.remedy and f.status in ("warn", "fail"):
            detail.append(f"\n→ {f.remedy}", style="italic")
        table.add_row(Text(f.status, style=_STYLES[f.status]), Text(f.subject), detail)
    console.print(table)
    if hidden:
        console.print(f"{hidden} unused GIDs and offers are not shown; --all shows them")
    bad = sum(f.status == "fail" for f in report.findings)
    words = "all that is there works" if report.healthy else f"{bad} failed"
    console.print(f"{words}; {report.seconds:.1f} s", style=_STYLES["ok" if not bad else "fail"])
