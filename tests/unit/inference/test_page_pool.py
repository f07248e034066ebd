"""Pages are in one state at a time, found by what they hold, and all come back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fabric_ray.inference.errors import InvalidSpec, OutOfPages, PageMisuse
from fabric_ray.inference.pool import PagePool, page_keys
from tests.examples import examples

SIZE = 2
TOTAL = 6


def match(pool: PagePool, keys: list[bytes]) -> list[int]:
    found = pool.find(keys)
    pool.adopt(found)
    return found


class Pools(RuleBasedStateMachine):
    """Requests come and go; the model remembers who owns what and what was written where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL, SIZE)
        self.requests: list[tuple[list[int], list[int]]] = []  # tokens, pages
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE))
    def open(self, tokens: list[int]) -> None:
        keys = page_keys(tokens, SIZE)
        found = match(self.pool, keys)
        # A page that is found holds those tokens, and so do all before it.
        assert [self.content[page] for page in found] == keys[: len(found)]
        needed, free = len(keys) - len(found), self.pool.free_pages
        if needed > free:
            with pytest.raises(OutOfPages) as refused:
                self.pool.reserve(needed)
            assert (refused.value.needed, refused.value.free) == (needed, free)
            assert self.pool.free_pages == free
            self.pool.free(found)
            return
        fresh = self.pool.reserve(needed)
        for page, key in zip(fresh, keys[len(found) :], strict=True):
            self.content[page] = key
        self.requests.append((tokens, found + fresh))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), insert=st.booleans())
    def close(self, data: st.DataObject, insert: bool) -> None:
        tokens, pages = self._pop(data)
        if insert:
            self.pool.insert(page_keys(tokens, SIZE), pages)
        self.pool.free(pages)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        tokens, pages = self._pop(data)
        owners = Counter(page for _, other in self.requests for page in other)
        if any(owners[page] for page in pages):
            with pytest.raises(PageMisuse, match="owners"):
                self.pool.hold(pages)
            self.requests.append((tokens, pages))
        else:
            self.pool.hold(pages)
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        pages = self.held.pop()
        self.pool.release(pages)
        with pytest.raises(PageMisuse, match="isn't held"):
            self.pool.release(pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()
        assert self.pool.idle_pages == 0

    def _pop(self, data: st.DataObject) -> tuple[list[int], list[int]]:
        return self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        owned = {page for _, pages in self.requests for page in pages}
        held = {page for pages in self.held for page in pages}
        assert not owned & held
        assert self.pool.owned_pages == len(owned)
        assert self.pool.held_pages == len(held)
        assert self.pool.free_pages == TOTAL - len(owned) - len(held)

    def teardown(self) -> None:
        for _, pages in self.requests:
            self.pool.free(pages)
        for pages in self.held:
            self.pool.release(pages)
        assert self.pool.free_pages == self.pool.total
        assert sorted(self.pool.reserve(TOTAL)) == list(range(TOTAL))


Pools.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestPools = Pools.TestCase


def known(pool: PagePool, tokens: list[int]) -> list[int]:
    pages = pool.reserve(len(tokens) // pool.page_tokens)
    pool.insert(page_keys(tokens, pool.page_tokens), pages)
    pool.free(pages)
    return pages


def test_a_key_depends_on_all_tokens_before_it() -> None:
    assert page_keys([1, 2, 3, 4, 5], 2) == page_keys([1, 2, 3, 4], 2)
    first, second = page_keys([1, 2, 3, 4], 2)
    assert page_keys([3, 4], 2) != [second]
    assert page_keys([1, 2], 2) == [first]
    assert page_keys([12, 3], 2) != page_keys([1, 23], 2)


def test_pages_let_go_first_are_evicted_first_and_ends_before_begins() -> None:
    pool = PagePool(4, 2)
    old, new = [1, 1, 2, 2], [3, 3, 4, 4]
    known(pool, old)
    known(pool, new)
    assert pool.free_pages == 4
    taken = pool.reserve(1)
    assert len(pool.find(page_keys(old, 2))) == 1
    pool.free(match(pool, page_keys(old, 2)))  # used again, so the other is older now
    taken += pool.reserve(1)
    assert len(pool.find(page_keys(old, 2))) == 1
    assert len(pool.find(page_keys(new, 2))) == 1
    pool.free(taken)


def test_of_a_prefix_that_is_known_the_first_pages_are_kept() -> None:
    pool = PagePool(4, 2)
    first = pool.reserve(1)
    second = pool.reserve(1)
    key = page_keys([7, 7], 2)
    pool.insert(key, first)
    pool.insert(key, second)
    pool.free(second)
    assert (pool.idle_pages, pool.find(key)) == (0, first)
    pool.free(first)
    assert pool.idle_pages == 1


def test_misuse_changes_nothing() -> None:
    pool = PagePool(4, 2)
    pages = pool.reserve(2)
    for wrong in ([*pages, 3], [pages[0], pages[0]], [-1], [4]):
        with pytest.raises(PageMisuse, match="isn't owned"):
            pool.free(wrong)
    assert pool.owned_pages == 2
    with pytest.raises(PageMisuse, match="no known prefix"):
        pool.adopt(pages)
    pool.insert(page_keys([1, 2], 2), pages[:1])
    with pytest.raises(PageMisuse, match="another prefix"):
        pool.insert(page_keys([3, 4], 2), pages[:1])
    with pytest.raises(InvalidSpec, match="give at least 1 of both"):
        PagePool(0, 2)
