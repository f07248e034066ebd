"""KV cache transfer between RDMA devices: what of the protocol needs real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rdma.two_nics import TIMEOUT, passes_between_two_nics


@pytest.mark.rdma
@pytest.mark.timeout(TIMEOUT)
def test_pages_are_pushed_and_let_go_between_two_nics(tmp_path: Path) -> None:
    passes_between_two_nics(tmp_path, "protocol", "plain", {"FABRIC_KV_TRANSPORTS": "verbs"})
