"""Engines of the user's own, behind the same prefillers and decoders."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, Protocol

from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.cache import Allocate
from fabric_ray.inference.protocols import WholeEngine
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.serve.config import ServeArgs

Role = Literal["prefill", "decode"]

_COMMON = ("fingerprint", "ranks", "layout", "buffers", "tail")
_MEMBERS: dict[Role, tuple[str, ...]] = {
    "prefill": (*_COMMON, "prefill", "write_tail"),
    "decode": (*_COMMON, "decode", "read_tail"),
}
"""What is used of an engine."""


class EngineFactory(Protocol):
    """What ``engine`` names in a deployment's arguments: a function, or a class of engines."""

    def __call__(
        self, args: ServeArgs, *, role: Role, tp: int, spec: CacheSpec, allocate: Allocate
    ) -> Any:
        """Makes the engine of one replica, in its process.

        Args:
            args: of the deployment; ``args.model`` names the model.
            role: a prefiller's engine is a :class:`~fabric_ray.inference.PrefillEngine`, a
                decoder's a :class:`~fabric_ray.inference.DecodeEngine`.
            tp: how many ranks the engine must have.
            spec: what the deployment's ``cache`` says of the role.
            allocate: ``allocate(rank, nbytes)`` gives memory that peers reach, uint8
                ``[nbytes]``. An engine that doesn't call it brings memory of its own: then
                ``engine.buffers(rank)`` is registered.
        """


def load_factory(path: str) -> EngineFactory:
    """Imports ``module:factory``.

    Raises:
        InvalidArgument: there is no such module, or nothing in it that can be called.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(
            f"engine {path} can't be imported ({error}); install the module on every node, or put "
            "its folder into the application's runtime_env (working_dir or py_modules)"
        ) from error
    if not callable(found):
        raise InvalidArgument(
            f"engine: {path} is a {type(found).__name__}, expected a function or a class"
        )
    factory: EngineFactory = found
    return factory


def checked(engine: Any, *, path: str, role: Role, tp: int) -> WholeEngine:
    """The engine, if it can be a replica's.

    Raises:
        InvalidArgument: it lacks a member, or has another number of ranks.
    """
    if lacking := [member for member in _MEMBERS[role] if not hasattr(engine, member)]:
        raise InvalidArgument(
            f"engine: {path} made a {type(engine).__name__} without {', '.join(lacking)}; see "
            "fabric_ray.inference.protocols"
        )
    if engine.ranks != tp:
        raise InvalidArgument(
            f"engine: {path} made {engine.ranks} ranks, expected {tp}; set {role}.tp to "
            f"{engine.ranks}, or make as many ranks as tp says"
        )
    made: WholeEngine = engine
    return made
