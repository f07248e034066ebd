"""How a controller finds sources and targets by name."""

from __future__ import annotations

import pytest

from fabric_ray.errors import InvalidArgument
from fabric_ray.weights.registry import Registry


class Thing:
    pass


def test_a_name_that_is_taken_or_unknown_is_refused() -> None:
    things = Registry[Thing]("thing")
    one = Thing()
    things.add("one", one)
    with pytest.raises(InvalidArgument, match="a thing called 'one' already"):
        things.add("one", Thing())
    with pytest.raises(InvalidArgument, match="no thing called 'two' \\(it has one\\)"):
        things.get("two")
    assert things.get("one") is one


def test_closing_again_leaves_the_next_one_of_that_name_alone() -> None:
    things = Registry[Thing]("thing")
    first, second = Thing(), Thing()
    things.add("it", first)
    things.remove("it", first)
    things.add("it", second)
    things.remove("it", first)
    assert things.get("it") is second


def test_a_collected_object_leaves_the_registry() -> None:
    things = Registry[Thing]("thing")
    things.add("it", Thing())
    with pytest.raises(InvalidArgument, match="it has none"):
        things.get("it")
