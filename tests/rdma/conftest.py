"""Tests marked `rdma` need a guest, which is slow: they run with `make test-rdma`."""

from __future__ import annotations

import pytest

# A first run downloads 110 MB, and an emulated CPU is slow.
_SECONDS = 900


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    in_guests = [item for item in items if item.get_closest_marker("rdma")]
    for item in in_guests:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS))
    if in_guests and "rdma" not in config.getoption("markexpr", ""):
        config.hook.pytest_deselected(items=in_guests)
        items[:] = [item for item in items if item not in in_guests]
