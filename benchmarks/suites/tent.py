"""What TENT's evaluation moves: blocks of 4 KiB to 64 MiB from two threads, a prompt's KV cache.

Over one link, where no policy has a choice; over unequal rails see `benchmarks.rails`.
"""

from __future__ import annotations

from benchmarks.harness.cases import KIB, MIB, Case, Link

_LINKS: tuple[Link, ...] = ("tcp", "shm")
_BLOCKS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_THREADS, _WINDOW = 2, 8
# 4096 tokens of DeepSeek-R1: 61 layers, 128 tokens a block, 576 values of 2 bytes a token.
_LAYERS, _LAYER_BLOCKS, _KV_BLOCK = 61, 32, 128 * 576 * 2


def cases(quick: bool) -> list[Case]:
    found: list[Case] = []
    for link in _LINKS:
        found += [
            Case(
                suite="tent",
                operation="flight",
                link=link,
                bytes=count,
                window=_WINDOW,
                submitters=_THREADS,
                region=max(64 * MIB, _WINDOW * count) if quick else 8 * _BLOCKS[-1],
            )
            for count in (_BLOCKS[:5:2] if quick else _BLOCKS)
        ]
        if not quick:
            pages = _LAYERS * _LAYER_BLOCKS
            found.append(
                Case(
                    suite="tent",
                    operation="pages",
                    link=link,
                    bytes=_KV_BLOCK,
                    pages=pages,
                    region=pages * _KV_BLOCK,
                    label="deepseek-r1-4k",
                )
            )
    return found
