"""vLLM's worker and trainer over parts that stand in for vLLM's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.integrations import vllm_fakes as fakes

BACKEND = "fabric_ray.integrations.vllm"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in fakes.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    yield importlib.import_module(BACKEND)
    sys.modules.pop(BACKEND, None)


@pytest.fixture
def server(backend: Any) -> Iterator[fakes.Server]:
    made = fakes.Server(
        backend.FabricWeightTransferEngine, backend.FabricUpdateInfo, backend.FabricInitInfo
    )
    yield made
    made.shutdown()


@pytest.fixture
def trainer(backend: Any, server: fakes.Server) -> Iterator[Any]:
    opened = []

    def make(source: Any, **options: Any) -> Any:
        info = {"rank": 0, "workers": 1, "timeout": 20.0, **options}
        made = backend.FabricTrainerWeightTransferEngine.trainer_init(
            backend.FabricTrainerInitInfo(**info), client=server, source=source
        )
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.shutdown()
