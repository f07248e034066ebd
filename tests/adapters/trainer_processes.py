"""Trainers in processes of their own, and rollouts in this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from fabric_ray.weights import WeightSource
from tests.unit.weights.local_sync import InProcess


def serve(connection: Any, source: WeightSource) -> None:
    """Does what a controller asks a trainer, until it says None."""
    with closing(source):
        while (call := connection.recv()) is not None:
            function, args = call
            try:
                connection.send(function(None, *args))
            except Exception as error:
                connection.send(error)


class Processes(InProcess):
    """Calls trainers by their processes, and rollouts by their names."""

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        if isinstance(actors[0], str):
            return super().ask(actors, function, args, timeout)
        for other, rest in zip(actors, args, strict=True):
            other.say((function, rest))
        return [other.hear(timeout) for other in actors]
