"""Finds words that the glossary has retired (``docs/glossary.md``) in folders that are finished."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# A word, or a part of an identifier, and what is written instead.
RETIRED = {
    "whoever": "name the subject: the peer, the caller",
    "nobody": "no peer, no caller, no rank",
    "somebody": "a peer, a caller, a rank",
    "anybody": "any peer, any caller, any rank",
    "everybody": "all peers, all callers, all ranks",
    "mourn": "on_link_lost",
    "limbo": "unresolved slices",
    "baton": "combining lock",
    "whispers?": "control channel",
    "twins?": "replica",
}

# Files that are still to be done; a finished folder is taken out and stays out.
UNFINISHED = (
    "docs/design/promises.md",
    "fabric_ray/__",
    "fabric_ray/_native",
    "fabric_ray/decoding",
    "fabric_ray/extras",
    "kernels/",
    "tests/exchange_checks",
    "tests/gpu/",
    "tests/host_graph",
    "tests/hosts",
    "tests/ports",
    "tests/rdma/",
    "tests/unit/cli/",
    "tests/unit/engine/",
    "tests/unit/test_factories",
    "tests/unit/test_lazy_tensors",
    "Makefile",
    "pyproject.toml",
    "scripts/mutations",
)
EXEMPT = ("docs/glossary.md", "scripts/glossary.py")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PATTERN = re.compile("|".join(rf"(?<![a-z])({word})(?![a-z])" for word in RETIRED), re.IGNORECASE)


def found(path: str) -> list[str]:
    """Lines with a retired word, as ``path:line: word; what to write``."""
    instead = list(RETIRED.values())
    try:
        lines = Path(path).read_text().splitlines()
    except (UnicodeDecodeError, IsADirectoryError):
        return []
    return [
        f"{path}:{number}: `{match[0]}` is retired; write {instead[match.lastindex - 1]}"
        for number, line in enumerate(lines, 1)
        for match in _PATTERN.finditer(_CAMEL.sub(" ", line))
        if match.lastindex
    ]


def main(arguments: list[str]) -> int:
    """With paths, everything in them is checked; otherwise all that is finished."""
    tracked = subprocess.check_output(["git", "ls-files", *arguments], text=True).split()
    skip = EXEMPT if arguments else (*EXEMPT, *UNFINISHED)
    failures = [line for path in tracked if not path.startswith(skip) for line in found(path)]
    print(*failures, sep="\n", end="\n" if failures else "")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
