"""Two exchanges in this process: one that holds tensors, one that fetches them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from fabric_ray import TransferEngine
from fabric_ray.runtime.rdt.exchange import Exchange
from fabric_ray.runtime.rdt.offer import Holder

IDLE = 64 << 20


def opened(name: str) -> Exchange:
    return Exchange(TransferEngine(name=name), Holder(name, "here", 1), timeout=20, idle=IDLE)


@pytest.fixture
def holder() -> Iterator[Exchange]:
    exchange = opened("holder")
    yield exchange
    exchange.close()


@pytest.fixture
def reader() -> Iterator[Exchange]:
    exchange = opened("reader")
    yield exchange
    exchange.close()
