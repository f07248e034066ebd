"""How Ray comes to know the transport."""

from __future__ import annotations

import functools
import threading
from typing import Any

from ray import actor
from ray.experimental.rdt import util

from fabric_ray.errors import InvalidArgument
from fabric_ray.runtime.rdt.transport import FabricTransport

NAME = "FABRIC"
"""Ray's names have capitals; ``tensor_transport="fabric"`` finds it too."""

_ATTRIBUTE = "__fabric_ray_transport__"
_lock = threading.Lock()


def register() -> None:
    """Makes ``tensor_transport="fabric"`` known to this process and to the actors that it creates.

    Call it before you create actors. It may be called any number of times, in drivers, actors and
    as Ray's ``worker_process_setup_hook``, before ``ray.init`` or after it.

    Raises:
        InvalidArgument: another library has taken the name.
    """
    import torch

    with _lock:
        known = util.transport_manager_info.get(NAME)
        if known is None:
            util.register_tensor_transport(NAME, ["cpu", "cuda"], FabricTransport, torch.Tensor)
            _register_with_classes()
        elif known.transport_manager_class is not FabricTransport:
            raise InvalidArgument(
                f"{known.transport_manager_class.__module__} has registered a tensor transport "
                f"called {NAME}; only one can have the name"
            )


def transport() -> FabricTransport:
    """This process's transport; registers it first."""
    register()
    found = util.get_tensor_transport_manager(NAME)
    assert isinstance(found, FabricTransport)
    return found


class _RegisterOnArrival:
    """An attribute of an actor class. The process that unpickles the class registers the transport.

    Ray registers transports on an actor by a task of its own, on a thread of its own: the actor's
    first methods may run before it. The class is unpickled before ``__init__``, and again by an
    actor that restarts.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, ()


def _registered() -> _RegisterOnArrival:
    register()
    return _RegisterOnArrival()


def _register_with_classes() -> None:
    """Gives each actor class with a tensor transport that attribute before Ray exports it."""
    create = actor.ActorClass._remote
    if hasattr(create, _ATTRIBUTE):
        return

    @functools.wraps(create)
    def create_registered(self: Any, *args: Any, **kwargs: Any) -> Any:
        meta = self.__ray_metadata__
        if meta.enable_tensor_transport and _ATTRIBUTE not in vars(meta.modified_class):
            setattr(meta.modified_class, _ATTRIBUTE, _RegisterOnArrival())
            meta.last_export_cluster_and_job = None  # a class exported without it goes once more
        return create(self, *args, **kwargs)

    setattr(create_registered, _ATTRIBUTE, True)
    setattr(actor.ActorClass, "_remote", create_registered)  # noqa: B010
