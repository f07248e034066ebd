"""A request's tables: all or nothing over groups, prefixes found where every group has them."""

from __future__ import annotations

import pytest

from fabric_ray.inference.errors import OutOfPages, PageMisuse
from fabric_ray.inference.protocols import NO_PAGE
from fabric_ray.inference.tables import CachePools
from fabric_ray.kvcache.layout import CacheGroup

TEXT = list(range(100, 140))


def group(name: str, pages: int, *, page_tokens: int = 4, window: int | None = None) -> CacheGroup:
    return CacheGroup(name, (0,), page_tokens, pages, (), window)


def test_pages_cover_the_tokens_asked_for() -> None:
    pools = CachePools([group("full", 8), group("coarse", 8, page_tokens=6)])
    tables = pools.open(TEXT[:5], 13)
    assert [len(table) for table in tables.tables] == [4, 3]
    assert not pools.idle
    tables.close()
    tables.close()
    assert pools.idle


def test_too_few_pages_in_one_group_take_none_from_any() -> None:
    pools = CachePools([group("full", 8), group("window", 3, window=9)])
    first = pools.open(TEXT[:8], 8)
    first.insert(TEXT[:8])
    with pytest.raises(OutOfPages, match="group 'window'"):
        pools.open(TEXT[:9], 17)
    assert [pool.owned_pages for pool in pools.pools] == [2, 2]
    assert not pools.fits(13)
    assert pools.fits(12)
    first.close()
    assert pools.idle


def test_a_prefix_is_found_in_whole_pages_and_leaves_a_token_to_compute() -> None:
    pools = CachePools([group("full", 16)])
    first = pools.open(TEXT[:12], 12)
    first.insert(TEXT[:12])
    second = pools.open(TEXT[:12], 14)
    assert second.prefix == 8
    assert second.tables[0][:2] == first.tables[0][:2]
    assert set(second.fresh[0]).isdisjoint(first.tables[0])
    whole = pools.open(TEXT[:12], 14, most=12)
    assert whole.prefix == 12
    assert pools.open(TEXT[:12], 14, most=0).prefix == 0
    other = [0, *TEXT[1:12]]
    assert pools.open(other, 12).prefix == 0


def test_groups_of_unequal_pages_agree_on_a_prefix() -> None:
    pools = CachePools([group("full", 16), group("coarse", 16, page_tokens=6)])
    first = pools.open(TEXT, 30)
    first.insert(TEXT[:30])
    found = pools.open(TEXT, 40)
    assert found.prefix == 24
    assert [len(pages) for pages in found.found] == [6, 4]


def test_of_a_window_only_the_pages_that_are_looked_back_on_are_needed() -> None:
    pools = CachePools([group("full", 32), group("window", 32, window=5)])
    first = pools.open(TEXT, 40)
    first.slide(22)  # position 22 sees 18 to 22
    assert first.tables[1][:5] == [NO_PAGE] * 4 + [first.tables[1][4]]
    assert first.tables[0].count(NO_PAGE) == 0
    first.insert(TEXT[:24])
    found = pools.open(TEXT, 40)
    assert found.prefix == 24
    assert found.tables[1][:6] == [NO_PAGE] * 5 + [first.tables[1][5]]
    # Nothing is left of what the token after a shorter prefix would look back on.
    assert pools.open(TEXT[:19], 40).prefix == 0
    found.close()
    first.close()


def test_what_peers_sent_only_in_part_is_not_found() -> None:
    pools = CachePools([group("full", 64), group("window", 64, window=5)])
    tables = pools.open(TEXT, 40)
    tables.insert(TEXT[:24], windowed_from=20)
    assert pools.open(TEXT, 40).prefix == 24
    pools.forget_prefixes()
    tables = pools.open(TEXT, 40)
    tables.insert(TEXT[:24], windowed_from=21)
    assert pools.open(TEXT, 40).prefix == 0


def test_pages_slide_out_of_windows_and_come_back_once() -> None:
    pools = CachePools([group("window", 6, window=5)])
    tables = pools.open(TEXT, 24)
    for position in range(24):
        tables.slide(position)
        tables.slide(position)
    assert tables.tables[0] == [NO_PAGE] * 4 + tables.fresh[0][4:]
    assert pools.pools[0].free_pages == 4
    tables.close()
    assert pools.idle


def test_held_pages_stay_away_and_the_prefix_does_not() -> None:
    pools = CachePools([group("full", 6)])
    first = pools.open(TEXT[:8], 8)
    first.insert(TEXT[:8])
    first.close()
    second = pools.open(TEXT[:12], 12)
    second.hold()
    pool = pools.pools[0]
    assert (pool.held_pages, pool.owned_pages, pool.idle_pages) == (1, 0, 2)
    with pytest.raises(PageMisuse, match="call release"):
        second.close()
    second.release()
    assert pools.idle
    with pytest.raises(PageMisuse, match="close the tables"):
        second.release()
