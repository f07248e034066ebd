"""Kernels that run on the processor, built once for all tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host_kernels import Host, exchange_kernels


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the kernels of :func:`host`, for another process."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def host(build: Path) -> Host:
    """All kernels of an exchange."""
    return exchange_kernels(build)
