"""Several NICs behind one engine, as far as a machine without NICs shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from fabric_ray import EngineConfig, TransferEngine
from fabric_ray.errors import InvalidArgument, TransportUnavailable, Unreachable


def test_a_transfer_can_be_pinned_to_a_rail_that_is_there(
    open_engine: Callable[..., TransferEngine],
) -> None:
    a, b = open_engine(transport="tcp"), open_engine(transport="tcp")
    src, dst = a.alloc(64), b.alloc(64)
    there = a.import_region(dst.descriptor())
    src.numpy()[:] = 7
    a.write(src, there, rail=0).wait(10)
    assert (dst.numpy() == 7).all()
    with pytest.raises(Unreachable, match="pinned to rail 1, but tcp has 1 here"):
        a.write(src, there, rail=1).wait(10)
    batch = a.write(src, there, timeout=10, rail=0)
    batch.wait()


def test_several_transports_are_tried_in_the_order_of_their_names(
    open_engine: Callable[..., TransferEngine],
) -> None:
    assert open_engine(transport=("tcp", "shm")).address.transports == ["tcp", "shm"]
    assert EngineConfig(transport="shm, tcp").transport == ("shm", "tcp")
    with pytest.raises(ValidationError, match="at least one transport"):
        EngineConfig(transport=())


def test_nics_that_are_not_there_are_named() -> None:
    with pytest.raises(TransportUnavailable, match="verbs"):
        TransferEngine(transport="verbs", nics=("no_such_nic",), token="t")


@pytest.mark.parametrize(
    "bad",
    [{"max_rails": 0}, {"max_rails": 5}, {"service_level": 16}, {"gid_index": -1}],
)
def test_numbers_of_nics_are_checked(bad: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        EngineConfig.model_validate(bad)


def test_a_rule_that_matches_nothing_is_an_error(
    open_engine: Callable[..., TransferEngine],
) -> None:
    with pytest.raises((TransportUnavailable, InvalidArgument)):
        open_engine(transport="verbs", rail_rules="gpu9=no_such_nic", token="t")
