"""How Ray comes to know the transport."""

from __future__ import annotations

import threading

from ray.experimental.rdt import util

from fabric_ray.errors import InvalidArgument
from fabric_ray.runtime.rdt.transport import FabricTransport

NAME = "FABRIC"
"""Ray's names have capitals; ``tensor_transport="fabric"`` finds it too."""

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
