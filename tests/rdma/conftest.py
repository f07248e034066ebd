"""Tests marked `rdma` run every time; those marked `rdma_full` only with `make test-rdma`."""

from __future__ import annotations

import pytest

# A first run downloads 110 MB, and an emulated CPU is slow.
_SECONDS = 900


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = "rdma_full" in config.getoption("markexpr", "")
    left = [] if everything else [item for item in items if item.get_closest_marker("rdma_full")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    for item in items:
        ours = item.get_closest_marker("rdma") or item.get_closest_marker("rdma_full")
        if ours and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS))
