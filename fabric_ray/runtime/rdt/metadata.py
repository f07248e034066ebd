"""What Ray carries from the process that holds an object's tensors to those that fetch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.experimental import CommunicatorMetadata, TensorTransportMetadata


@dataclass
class FabricMetadata(TensorTransportMetadata):
    """Ray's part, shapes and dtypes, and ours: an encoded :class:`Offer`.

    Ray pickles it from process to process. Whoever unpickles it has the transport registered from
    then on, so that actors that were restarted, or made by others, can fetch.
    """

    offer: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.tensor_meta, self.tensor_device, self.offer)


@dataclass
class FabricCommunicator(CommunicatorMetadata):
    """Nothing: an offer says all that a reader needs."""


def _arrived(kinds: list[Any], device: str | None, offer: bytes) -> FabricMetadata:
    from fabric_ray.runtime.rdt.registration import register

    register()
    return FabricMetadata(kinds, device, offer)
