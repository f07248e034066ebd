"""Expert parallelism between RDMA devices: what of the exchange needs real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rdma.two_nics import TIMEOUT, passes_between_two_nics


@pytest.mark.rdma
@pytest.mark.timeout(TIMEOUT)
def test_tokens_go_to_their_experts_and_back_between_two_nics(tmp_path: Path) -> None:
    passes_between_two_nics(tmp_path, "exchange", "links", {"FABRIC_MOE_TRANSPORT": "verbs"})
