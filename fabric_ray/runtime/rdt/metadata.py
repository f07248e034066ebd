"""What Ray carries from the process that holds an object's tensors to those that fetch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.experimental import CommunicatorMetadata, TensorTransportMetadata


@dataclass
class FabricMetadata(TensorTransportMetadata):
    """Ray's metadata (shapes and dtypes), with an encoded :class:`Offer`.

    Ray pickles it from process to process. Unpickling it registers the transport in the process,
    so that restarted actors and actors of other jobs can fetch.
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
