"""Pages of one cache group: their owners, known prefixes, and quarantine.

A page is in exactly one of four states:

- *free*: holds nothing;
- *idle*: has no owner, but holds a known prefix. When no free page is left, the page that has been
  idle for the longest time is reused;
- *owned*: by one request, or by several that share a prefix;
- *held*: its owner is gone, but a peer may still write to it (MR-1); it can't be reserved until
  :meth:`PagePool.release`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from fabric_ray.inference.errors import InvalidSpec, OutOfPages, PageMisuse

_DIGEST_BYTES = 16


def page_keys(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """A digest for each full page of ``tokens``: of everything up to the page's end, since keys and
    values depend on all tokens before them."""
    keys: list[bytes] = []
    before = b""
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = b",".join(b"%d" % token for token in tokens[start : start + page_tokens])
        before = hashlib.blake2b(before + page, digest_size=_DIGEST_BYTES).digest()
        keys.append(before)
    return keys


class PagePool:
    """Allocates the pages of one group and counts their owners.

    Not thread-safe: use it from one thread or one event loop.

    Args:
        pages: number of pages.
        page_tokens: tokens per page.
        group: the group's name, for errors.

    Raises:
        InvalidSpec: either number is below 1.
    """

    def __init__(self, pages: int, page_tokens: int, *, group: str = "full") -> None:
        if pages < 1 or page_tokens < 1:
            raise InvalidSpec(
                f"a pool of {pages} pages of {page_tokens} tokens holds nothing; give at least 1 "
                "of both",
                field="pages" if pages < 1 else "page_tokens",
            )
        self.total = pages
        self.page_tokens = page_tokens
        self.group = group
        self._free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * pages
        self._held: set[int] = set()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free_pages(self) -> int:
        """Pages that :meth:`reserve` could give out: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def idle_pages(self) -> int:
        """Pages without an owner that hold a known prefix."""
        return len(self._idle)

    @property
    def held_pages(self) -> int:
        """Pages that peers may still write to."""
        return len(self._held)

    @property
    def owned_pages(self) -> int:
        """Pages of requests; one that several share counts once."""
        return self.total - self.free_pages - self.held_pages

    def reserve(self, count: int) -> list[int]:
        """Takes ``count`` pages, or none.

        What they hold is undefined, and whatever prefix was in them isn't found any more.

        Raises:
            OutOfPages: fewer are free.
        """
        if count > self.free_pages:
            raise OutOfPages(
                f"{count} pages of group {self.group!r} are needed and {self.free_pages} of "
                f"{self.total} are free; wait for requests to end, or give the cache more pages",
                needed=count,
                free=self.free_pages,
                group=self.group,
            )
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Ends the caller's ownership. The last owner's pages are free, or idle if they hold a
        prefix that was inserted.

        Raises:
            PageMisuse: a page has no owner, or is named more often than it has owners.
        """
        pages = list(pages)
        self._owned(pages)
        # Later pages of a prefix are evicted first: they are useless without the earlier ones.
        for page in reversed(pages):
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix, without a change of owners.

        Args:
            keys: the request's :func:`page_keys`.
        """
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def lookup(self, key: bytes) -> int | None:
        """The page of one key, even if earlier keys are unknown."""
        return self._page_of.get(key)

    def adopt(self, pages: Iterable[int]) -> None:
        """Makes the caller an owner of pages that :meth:`find` or :meth:`lookup` gave."""
        pages = list(pages)
        for page in pages:
            if page not in self._key_of:
                raise PageMisuse(
                    f"page {page} of group {self.group!r} holds no known prefix; adopt what find "
                    "or lookup returned, before anything else is reserved",
                    page=page,
                )
        for page in pages:
            self._idle.pop(page, None)
            self._owners[page] += 1

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Registers complete pages by their keys. Keys that are known already keep their pages.

        Args:
            keys: of :func:`page_keys`, one for each page.
            pages: owned by the caller; all their tokens were computed or have arrived.

        Raises:
            PageMisuse: a page has no owner, or is known by another key.
        """
        self._owned(pages)
        for key, page in zip(keys, pages, strict=True):
            if self._key_of.get(page, key) != key:
                raise PageMisuse(
                    f"page {page} of group {self.group!r} holds another prefix; insert pages that "
                    "were reserved for these tokens",
                    page=page,
                )
        for key, page in zip(keys, pages, strict=True):
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def hold(self, pages: Iterable[int]) -> None:
        """Quarantines pages of the caller: they have no owner and can't be reserved.

        Raises:
            PageMisuse: a page has other owners, which rely on its content.
        """
        pages = list(pages)
        self._owned(pages)
        for page in pages:
            if self._owners[page] > 1:
                raise PageMisuse(
                    f"page {page} of group {self.group!r} has {self._owners[page]} owners and "
                    "can't be held; hold pages that were reserved for one request",
                    page=page,
                )
        for page in pages:
            self._owners[page] = 0
            # A late write may overwrite the prefix.
            self._forget(page)
            self._held.add(page)

    def release(self, pages: Iterable[int]) -> None:
        """Frees held pages, which no write can reach any more.

        Raises:
            PageMisuse: a page isn't held.
        """
        pages = list(pages)
        left = set(self._held)
        for page in pages:
            if page not in left:
                raise PageMisuse(
                    f"page {page} of group {self.group!r} isn't held; release each held page once",
                    page=page,
                )
            left.remove(page)
        self._held = left
        self._free.extend(pages)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, for the weights have changed."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def _owned(self, pages: Sequence[int]) -> None:
        named: dict[int, int] = {}
        for page in pages:
            named[page] = named.get(page, 0) + 1
            if not 0 <= page < self.total or named[page] > self._owners[page]:
                raise PageMisuse(
                    f"page {page} of group {self.group!r} isn't owned by the caller; name each "
                    "owned page once",
                    page=page,
                )
