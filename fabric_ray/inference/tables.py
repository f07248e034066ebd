"""The page tables of requests over all groups of a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fabric_ray.inference.errors import OutOfPages, PageMisuse
from fabric_ray.inference.pool import PagePool, page_keys
from fabric_ray.inference.protocols import NO_PAGE
from fabric_ray.kvcache.layout import CacheGroup

Keys = dict[int, list[bytes]]
"""A prompt's page keys by tokens per page."""


def first_seen(position: int, window: int | None) -> int:
    """The first position that the token at ``position`` attends to: itself and the
    ``window - 1`` before it, or all."""
    return 0 if window is None else max(0, position - window + 1)


class CachePools:
    """The pools of a cache, one for each group of its layout.

    Not thread-safe: one thread, or one event loop, drives it and its tables.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(PagePool(g.pages, g.page_tokens, group=g.name) for g in groups)
        self._step = math.lcm(*(group.page_tokens for group in groups))

    @property
    def idle(self) -> bool:
        """Whether no request has a page: what must be so when none is left."""
        return all(pool.free_pages == pool.total for pool in self.pools)

    def fits(self, tokens: int) -> bool:
        """Whether a request of so many tokens could ever be served."""
        return all(-(-tokens // pool.page_tokens) <= pool.total for pool in self.pools)

    def open(self, prompt: Sequence[int], tokens: int, *, most: int | None = None) -> Tables:
        """Page tables for a request: its prompt's known prefix, and pages for the rest.

        Args:
            prompt: ids.
            tokens: positions that the request may come to have, prompt included.
            most: tokens of a prefix to take at most; all but one by default, so that there is
                something to compute logits from; 0 for none.

        Raises:
            OutOfPages: a pool has too few; nothing was taken from any.
        """
        most = len(prompt) - 1 if most is None else most
        sizes = {group.page_tokens for group in self.groups} if most > 0 else set()
        keys = {size: page_keys(prompt[:most], size) for size in sizes}
        prefix = self._known(keys, most)
        tables = Tables(self, prefix)
        try:
            for at, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
                found = self._found(at, keys, prefix)
                pool.adopt(found)
                gap = prefix // group.page_tokens - len(found)
                tables.found.append([NO_PAGE] * gap + found)
                tables.fresh.append([])
            for at, pool in enumerate(self.pools):
                pages = -(-tokens // pool.page_tokens) - len(tables.found[at])
                tables.fresh[at] = pool.reserve(max(0, pages))
        except OutOfPages:
            tables.close()
            raise
        return tables

    def forget_prefixes(self) -> None:
        """Empties the prefix caches: the weights changed."""
        for pool in self.pools:
            pool.forget_prefixes()

    def _known(self, keys: Keys, most: int) -> int:
        """Tokens of the longest prefix that every group knows as much of as it looks back on."""
        known = most
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None and known:
                known = min(known, len(pool.find(keys[group.page_tokens])) * group.page_tokens)
        known -= known % self._step
        while known > 0 and not all(
            self._complete(at, keys, known) for at in range(len(self.groups))
        ):
            known -= self._step
        return max(0, known)

    def _complete(self, at: int, keys: Keys, prefix: int) -> bool:
        return None not in self._wanted(at, keys, prefix)

    def _found(self, at: int, keys: Keys, prefix: int) -> list[int]:
        return [page for page in self._wanted(at, keys, prefix) if page is not None]

    def _wanted(self, at: int, keys: Keys, prefix: int) -> list[int | None]:
        """The pages that the token after the prefix looks back on."""
        if not prefix:
            return []
        group, pool = self.groups[at], self.pools[at]
        first = first_seen(prefix, group.window) // group.page_tokens
        mine = keys[group.page_tokens][first : prefix // group.page_tokens]
        return [pool.lookup(key) for key in mine]


class Tables:
    """One request's pages: those found with its prefix in them, then those reserved for it.

    Ends with :meth:`close`, or, where a peer may still write to its pages, with :meth:`hold` and
    then :meth:`release`.
    """

    def __init__(self, pools: CachePools, prefix: int) -> None:
        self._pools = pools
        self.prefix = prefix
        """Tokens whose keys and values the pages hold already."""
        self.found: list[list[int]] = []
        self.fresh: list[list[int]] = []
        self._held = False

    @property
    def tables(self) -> tuple[list[int], ...]:
        """A table for each group, as engines take them."""
        return tuple(f + r for f, r in zip(self.found, self.fresh, strict=True))

    def insert(self, tokens: Sequence[int], *, windowed_from: int = 0) -> None:
        """Lets later requests find the full pages of ``tokens``, which must be complete.

        Args:
            tokens: all that the pages hold keys and values of, from position 0 on.
            windowed_from: the position from which on the pages of groups with a window are
                complete: 0 where they were computed here, more where peers sent only what the next
                token looks back on.
        """
        for group, pool, table in zip(
            self._pools.groups, self._pools.pools, self.tables, strict=True
        ):
            first = -(-windowed_from // group.page_tokens) if group.window is not None else 0
            keys = page_keys(tokens, group.page_tokens)
            live = [
                (key, page)
                for key, page in zip(keys[first:], table[first:], strict=False)
                if page != NO_PAGE
            ]
            pool.insert([key for key, _ in live], [page for _, page in live])

    def slide(self, position: int) -> None:
        """Frees pages that no token from ``position`` on looks back on."""
        for at, (group, pool) in enumerate(zip(self._pools.groups, self._pools.pools, strict=True)):
            dead = first_seen(position, group.window) // group.page_tokens
            for pages, count in (
                (self.found[at], dead),
                (self.fresh[at], dead - len(self.found[at])),
            ):
                past = [page for page in pages[: max(0, count)] if page != NO_PAGE]
                pages[: max(0, count)] = [NO_PAGE] * len(pages[: max(0, count)])
                pool.free(past)

    def close(self) -> None:
        """Gives all pages back. Doing so again does nothing.

        Raises:
            PageMisuse: they are held.
        """
        if self._held:
            raise PageMisuse("the pages are held; call release once no write can reach them")
        for pool, found, fresh in zip(self._pools.pools, self.found, self.fresh, strict=True):
            pool.free(page for page in found + fresh if page != NO_PAGE)
        self.found, self.fresh = [[] for _ in self.found], [[] for _ in self.fresh]

    def hold(self) -> None:
        """Gives the prefix back and keeps the reserved pages from everyone: a peer may still write
        to them.

        Raises:
            PageMisuse: others share what was reserved.
        """
        for pool, found, fresh in zip(self._pools.pools, self.found, self.fresh, strict=True):
            pool.hold(page for page in fresh if page != NO_PAGE)
            pool.free(page for page in found if page != NO_PAGE)
        self.found, self._held = [[] for _ in self.found], True

    def release(self) -> None:
        """Gives held pages back.

        Raises:
            PageMisuse: they aren't held.
        """
        if not self._held:
            raise PageMisuse("the pages aren't held; close the tables instead")
        for pool, fresh in zip(self._pools.pools, self.fresh, strict=True):
            pool.release(page for page in fresh if page != NO_PAGE)
        self.fresh, self._held = [[] for _ in self.fresh], False
