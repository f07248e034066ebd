"""Finds words that the glossary has retired (``docs/glossary.md``)."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
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
    "apertures?": "peer mapping",
    "baton": "combining lock",
    "whispers?": "control channel",
    "twins?": "replica",
    "fallen": "failed slices",
    "beds?": "parker",
    "graves?|yards?": "deferred close",
    "shelf|shelves": "pool",
    "seats?": "slot, reservation or member",
    "shakes?": "accept, connect or handshake",
    "doubts?": "access check",
    "pulses?": "heartbeat",
    "crews?": "actor group",
    "rosters?": "membership",
    "reluctance": "avoid level",
    "all_say": "broadcast",
    "cards?": "rank descriptor; network adapter",
}

EXEMPT = ("docs/glossary.md", "scripts/glossary.py")
# The words of identifiers too: of `allSay`, `all` and `say`. One retired term is two words.
_WORD = re.compile("(?i:all_say)|[A-Z]*[a-z]+|[A-Z]+")
_PATTERN = re.compile("|".join(f"({word})" for word in RETIRED), re.IGNORECASE)


@cache
def _instead(word: str) -> str | None:
    """What to write for a word, if it is retired."""
    match = _PATTERN.fullmatch(word)
    return [*RETIRED.values()][match.lastindex - 1] if match and match.lastindex else None


def found(path: str) -> list[str]:
    """Lines with a retired word, as ``path:line: word; what to write``."""
    try:
        lines = Path(path).read_text().splitlines()
    except (UnicodeDecodeError, IsADirectoryError):
        return []
    return [
        f"{path}:{number}: `{word}` is retired; write {_instead(word)}"
        for number, line in enumerate(lines, 1)
        for word in _WORD.findall(line)
        if _instead(word)
    ]


def main(arguments: list[str]) -> int:
    """Checks all tracked files, or those below the given paths."""
    tracked = subprocess.check_output(["git", "ls-files", *arguments], text=True).split()
    failures = [line for path in tracked if not path.startswith(EXEMPT) for line in found(path)]
    print(*failures, sep="\n", end="\n" if failures else "")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
