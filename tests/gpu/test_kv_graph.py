"""Prefill as a captured CUDA graph: its kernels count layers, whose pages leave by that."""

from __future__ import annotations

import pytest
import torch

from tests import kv_graph_checks
from tests.stands import OnGpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
def test_ic_2_layers_that_a_captured_graph_counts_arrive_as_they_were_computed(
    transport: str,
) -> None:
    kv_graph_checks.check_layers(OnGpu(), transport)
