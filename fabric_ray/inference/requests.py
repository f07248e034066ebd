"""What is asked of the engine, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_ray.inference.attention import Segment
from fabric_ray.inference.errors import InvalidTable, InvalidTokens
from fabric_ray.inference.tables import first_seen
from fabric_ray.kvcache.layout import CacheGroup

MAX_POSITIONS = 1 << 24
"""No request is longer."""


def check_segments(segments: Sequence[Segment], groups: Sequence[CacheGroup], vocab: int) -> None:
    """Refuses tokens and page tables that don't fit.

    Raises:
        InvalidTokens: there are none, they aren't in the vocabulary, or positions are out of range.
        InvalidTable: a table is missing, too short, or names a page that doesn't exist; or two
            segments write to one page.
    """
    written: dict[tuple[int, int], int] = {}
    for number, segment in enumerate(segments):
        _check_tokens(segment, vocab)
        if len(segment.tables) != len(groups):
            names = ", ".join(group.name for group in groups)
            raise InvalidTable(
                f"{len(segment.tables)} page tables were given and the cache has {len(groups)} "
                f"groups ({names}); give one for each"
            )
        for at, group in enumerate(groups):
            for page in _check_table(segment, group, segment.tables[at]):
                if written.setdefault((at, page), number) != number:
                    raise InvalidTable(
                        f"two requests would write to page {page} of group {group.name!r}; give "
                        "each pages of its own",
                        group=group.name,
                    )


def _check_tokens(segment: Segment, vocab: int) -> None:
    if not segment.tokens:
        raise InvalidTokens("a chunk needs at least one token; drop empty ones")
    if segment.start < 0 or segment.end > MAX_POSITIONS:
        raise InvalidTokens(
            f"positions {segment.start} to {segment.end - 1} are out of range; use 0 to "
            f"{MAX_POSITIONS - 1}"
        )
    low, high = min(segment.tokens), max(segment.tokens)
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise InvalidTokens(
            f"token {wrong} isn't in a vocabulary of {vocab}; encode the text with the model's "
            "tokenizer"
        )


def _check_table(segment: Segment, group: CacheGroup, table: Sequence[int]) -> Sequence[int]:
    """Returns the pages that are written to."""
    size = group.page_tokens
    needed = -(-segment.end // size)
    if len(table) < needed:
        raise InvalidTable(
            f"the table of group {group.name!r} has {len(table)} pages of {size} tokens and "
            f"position {segment.end - 1} needs {needed}; reserve more pages",
            group=group.name,
        )
    for page in table[first_seen(segment.start, group.window) // size : needed]:
        if not 0 <= page < group.pages:
            raise InvalidTable(
                f"page {page} of group {group.name!r} doesn't exist; use 0 to {group.pages - 1}",
                group=group.name,
            )
    written = table[segment.start // size : needed]
    if len(set(written)) < len(written):
        twice = next(page for page in written if list(written).count(page) > 1)
        raise InvalidTable(
            f"page {twice} of group {group.name!r} is named twice; give each stretch of tokens a "
            "page of its own",
            group=group.name,
        )
    return written
