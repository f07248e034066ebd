"""Controllers of small pushes, closed for sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.weights.local_sync import LocalSync


@pytest.fixture
def open_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalSync]]:
    """Makes controllers whose rollouts run version 1, or none without ``first``."""
    # All actors are in this process: no delay between hosts has to be allowed for.
    monkeypatch.setattr("fabric_ray.weights.session._GATE_S", 1.0)
    made = []

    def open_(*, first: bool = True, **options: Any) -> LocalSync:
        sync = LocalSync(**options)
        made.append(sync)
        if first:
            sync.train(1)
            sync.push()
        sync.train(2)
        return sync

    yield open_
    for sync in made:
        sync.close()
