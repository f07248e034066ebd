"""Functions that another process calls by their names; what it sends is decoded by annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

import msgspec

from fabric_ray.decoding import checked_msgpack
from fabric_ray.errors import DecodeError
from fabric_ray.weights import phases

Function = Callable[..., Any]


def phases_of(role: Literal["source", "target"]) -> dict[str, Function]:
    """The phases of a push that an end of this role has, by name."""
    return {
        name: function
        for name, function in vars(phases).items()
        if name.startswith(f"{role}_") and inspect.isfunction(function)
    }


class NamedFunctions:
    """The only functions that a peer can call.

    Args:
        functions: by name; each takes an actor, a name, and the arguments of calls.
    """

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = dict(functions)
        self._types = {name: _types(function) for name, function in functions.items()}

    def named(self, name: str, args: Sequence[msgspec.Raw]) -> tuple[Function, list[Any]]:
        """A function, and the arguments of a call.

        Raises:
            DecodeError: there is no such function, or it does not take these.
        """
        if name not in self._functions:
            raise DecodeError(f"`{name}` is no function that can be called here", what="a call")
        least, types = self._types[name]
        if not least <= len(args) <= len(types):
            raise DecodeError(
                f"`{name}` takes {least} to {len(types)} arguments, got {len(args)}", what="a call"
            )
        values = [
            checked_msgpack(arg, type, f"an argument of `{name}`")
            for arg, type in zip(args, types, strict=False)
        ]
        return self._functions[name], values


def result_type(function: Function) -> Any:
    """The type that a function's results are decoded as."""
    return get_type_hints(function)["return"]


def _types(function: Function) -> tuple[int, list[Any]]:
    """The types of the arguments after the actor and the name, and how many of them must come."""
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[2:]
    least = sum(each.default is inspect.Parameter.empty for each in parameters)
    return least, [hints[each.name] for each in parameters]
