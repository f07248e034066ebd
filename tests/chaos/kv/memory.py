"""Caches of a decoder or prefiller: what pages must hold, and who owns them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_ray import TransferEngine
from fabric_ray.kvcache import CacheGroup, CacheLayout, CacheTensor, Place, RankCache
from tests.chaos.kv.draw import ELEMENT, HEADS, LAYERS, TAIL, WIDTH, Side
from tests.chaos.pattern import SCRIBBLE, pattern

Words = NDArray[np.uint64]
SLOTS = 32
_FREE = np.uint64(int.from_bytes(bytes([SCRIBBLE]) * 8, "little"))


def states(key: tuple[object, ...], tokens: int) -> Words:
    """What the pages of a prompt must hold: layers x heads x tokens x width."""
    count = LAYERS * HEADS * tokens * WIDTH
    return pattern(count * ELEMENT, *key).view(np.uint64).reshape(LAYERS, HEADS, tokens, WIDTH)


def tail(key: tuple[object, ...]) -> Words:
    return pattern(TAIL, *key, "tail").view(np.uint64)


class Memory:
    """The caches of all ranks of a process. Free pages hold one word, which no other writer may
    change (MR-1): this is checked whenever pages are handed out.

    Args:
        name: of engines.
        transport: of engines.
        side: how caches are made.
    """

    def __init__(self, name: str, transport: str, side: Side) -> None:
        self.side = side
        self._stack = contextlib.ExitStack()
        self.ranks: list[RankCache] = []
        self._views: list[Any] = []
        for rank in range(side.ranks):
            engine = TransferEngine(
                name=f"{name}-{rank}", transport=transport, peer_timeout=2.0, op_timeout=20.0
            )
            self._stack.callback(engine.close)
            self._add_rank(engine, rank)
        tails = self.ranks[0].tail
        assert tails is not None
        self._tails = tails.numpy().view(np.uint64).reshape(SLOTS, -1)
        self._tails[:] = _FREE
        self._pages = list(range(side.pages))
        self._slots = list(range(SLOTS))

    def _add_rank(self, engine: TransferEngine, rank: int) -> None:
        side, held = self.side, HEADS // self.side.ranks
        inner = (side.page_tokens, held) if side.tokens_first else (held, side.page_tokens)
        shape = (LAYERS, side.pages, *inner, WIDTH)
        region = engine.alloc(int(np.prod(shape)) * ELEMENT)
        stored = region.numpy().view(np.uint64).reshape(shape)
        stored[:] = _FREE
        view = stored.swapaxes(2, 3) if side.tokens_first else stored
        layer, page, head, token, _ = view.strides
        places = tuple(Place(0, i * layer) for i in range(LAYERS))
        tensor = CacheTensor(
            "k", HEADS, rank * held, held, WIDTH, "int64", page, head, token, places
        )
        group = CacheGroup("all", tuple(range(LAYERS)), side.page_tokens, side.pages, (tensor,))
        layout = CacheLayout("chaos", (group,), (region.nbytes,))
        tails = engine.alloc(SLOTS * TAIL) if rank == 0 else None
        self.ranks.append(RankCache(engine, layout, [region], tails))
        self._views.append(view)

    def take(self, tokens: int) -> tuple[list[int], int, list[str]] | None:
        """Pages and a slot for so many tokens, and what is wrong with them, if there are any."""
        count = -(-tokens // self.side.page_tokens)
        if len(self._pages) < count or not self._slots:
            return None
        pages, self._pages = self._pages[:count], self._pages[count:]
        slot = self._slots.pop(0)
        return pages, slot, self._disturbed(pages, slot)

    def give(self, pages: Sequence[int], slot: int) -> None:
        """No peer reads or writes these pages any more: their owner reuses them at once (MR-1)."""
        for view in self._views:
            view[:, pages] = _FREE
        self._tails[slot] = _FREE
        # The oldest first: what lands late has time to show.
        self._pages += pages
        self._slots.append(slot)

    def look(self) -> list[str]:
        """What is wrong with all that is free, and what isn't."""
        wrong = [] if self.idle else [f"leak: {self.side.pages - len(self._pages)} pages are taken"]
        return wrong + self._disturbed(self._pages, *self._slots)

    @property
    def idle(self) -> bool:
        return len(self._pages) == self.side.pages and len(self._slots) == SLOTS

    def _disturbed(self, pages: Sequence[int], *slots: int) -> list[str]:
        wrong = [
            f"MR-1: {int((view[:, pages] != _FREE).sum())} words of free pages of rank {rank}"
            for rank, view in enumerate(self._views)
            if (view[:, pages] != _FREE).any()
        ]
        if (self._tails[list(slots)] != _FREE).any():
            wrong.append(f"MR-1: the tail of a free slot, one of {len(slots)}")
        return wrong

    def write(self, pages: Sequence[int], layer: int, words: Words, begin: int, end: int) -> None:
        """Computes a layer's tokens ``begin`` to ``end``; words are of the whole prompt."""
        size = self.side.page_tokens
        for number in range(begin // size, -(-end // size)):
            first, last = max(begin, number * size), min(end, (number + 1) * size)
            at = slice(first - number * size, last - number * size)
            for view, heads in self._shares(words[layer]):
                view[layer, pages[number], :, at] = heads[:, first:last]

    def differs(self, pages: Sequence[int], words: Words) -> str | None:
        """Where pages don't hold a prompt, in words."""
        tokens = words.shape[2]
        for layer in range(LAYERS):
            for view, heads in self._shares(words[layer]):
                found = view[layer, pages].swapaxes(0, 1).reshape(len(heads), -1, WIDTH)[:, :tokens]
                if (found != heads).any():
                    at = np.argwhere(found != heads)[0]
                    wrong = int((found != heads).sum())
                    return f"{wrong} words of layer {layer} are wrong, the first at {at.tolist()}"
        return None

    def tail(self, slot: int) -> Words:
        found: Words = self._tails[slot]
        return found

    def _shares(self, words: Words) -> list[tuple[Any, Words]]:
        """Each rank's cache, and its heads of words of all heads."""
        held = HEADS // self.side.ranks
        return [(v, words[r * held : (r + 1) * held]) for r, v in enumerate(self._views)]

    def close(self) -> None:
        self._stack.close()
        self._views.clear()
        self.ranks.clear()
        del self._tails
