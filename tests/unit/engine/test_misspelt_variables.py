"""A variable that resembles one of fabric-ray's and is none doesn't go unnoticed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_ray import EngineConfig, TransferEngine
from fabric_ray.engine.config import _warn_of_misspelt

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    _warn_of_misspelt.cache_clear()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FABRIC_RAY_TRANSPROT", "FABRIC_RAY_TRANSPORT"),
        ("FABRIC_RAY_PEER_TIME_OUT", "FABRIC_RAY_PEER_TIMEOUT"),
        ("FABRIC_RAY_RAIL_RULES", "FABRIC_RAY_RAILS"),
        ("FABRIC_RAY_OBSERV", "FABRIC_RAY_OBSERVE"),
    ],
)
def test_a_misspelt_variable_is_logged_once_with_what_it_resembles(
    open_engine: Callable[..., TransferEngine],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    meant: str,
) -> None:
    monkeypatch.setenv(name, "tcp")
    open_engine("a")
    open_engine("b")
    [said] = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert said == f"{name} has no effect: there is no such variable; did you mean {meant}?"


def test_variables_that_are_read_and_those_of_others_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = [*ROOT.glob("fabric_ray/**/*.py"), *ROOT.glob("native/*/src/**/*.rs")]
    read = {n for s in sources for n in re.findall(r'"(FABRIC_RAY_[A-Z_]+)"', s.read_text())}
    assert {"FABRIC_RAY_OBSERVE", "FABRIC_RAY_LIBFABRIC", "FABRIC_RAY_RAILS"} <= read
    fields = set(EngineConfig.model_fields) - {"rail_rules"}
    read |= {f"FABRIC_RAY_{field.upper()}" for field in fields}
    of_kubernetes = {"FABRIC_RAY_SERVICE_HOST", "FABRIC_RAY_SERVICE_PORT"}
    with caplog.at_level(logging.WARNING):
        _warn_of_misspelt(frozenset(read | of_kubernetes))
    assert not caplog.records
