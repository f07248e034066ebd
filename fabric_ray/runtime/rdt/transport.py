"""The face that Ray sees: a one-sided tensor transport."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayDirectTransportError
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

from fabric_ray.errors import DecodeError, FabricError
from fabric_ray.runtime.process import cluster_engine, process_name
from fabric_ray.runtime.rdt.exchange import Exchange
from fabric_ray.runtime.rdt.fetches import Fetch
from fabric_ray.runtime.rdt.metadata import FabricCommunicator, FabricMetadata
from fabric_ray.runtime.rdt.offer import Holder, Offer

logger = logging.getLogger(__name__)


@dataclass
class FabricFetchRequest(FetchRequest):
    """A fetch that Ray waits for, or drops."""

    fetch: Fetch | None = None
    exchange: Exchange | None = None

    def __del__(self) -> None:
        if self.fetch is not None and self.exchange is not None:
            self.exchange.fetches.end(self.fetch)


class FabricTransport(TensorTransportManager):
    """Tensors of object references through the engine. Readers pull; the process that holds the
    tensors takes no part beyond keeping their memory registered.

    Ray makes one for each process and calls it from many threads.
    """

    def __init__(self) -> None:
        self._exchange: Exchange | None = None
        self._home: tuple[int, str] | None = None
        self._lock = threading.Lock()

    def exchange(self) -> Exchange:
        """This process's; opened when the first tensor leaves or comes, so that a process that only
        passes references on has no engine."""
        context = ray.get_runtime_context()
        # After a fork, or in another cluster, everything begins anew.
        home = os.getpid(), str(context.get_node_id())
        with self._lock:
            if self._exchange is None or self._home != home:
                if self._exchange is not None and self._home:
                    if self._home[0] == os.getpid():
                        self._exchange.close()
                    else:
                        self._exchange.disown()
                self._exchange, self._home = _open(context), home
            return self._exchange

    def tensor_transport_backend(self) -> str:
        return "FABRIC"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        # Asking it would cost a round trip with each call of a method.
        return True

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[torch.Tensor]
    ) -> FabricMetadata:
        """Offers the tensors of an object until Ray frees it.

        Raises:
            InvalidArgument: one of them can't be offered; the others aren't either.
        """
        if not rdt_object:
            return FabricMetadata([], None)
        try:
            offer = self.exchange().sources.add(obj_id, rdt_object)
        except BaseException:
            _forget_object(obj_id)
            raise
        device = "cuda" if any(tensor.is_cuda for tensor in rdt_object) else "cpu"
        kinds: list[Any] = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return FabricMetadata(kinds, device, offer.to_bytes())

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> FabricCommunicator:
        return FabricCommunicator()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> FabricFetchRequest:
        """Begins to fetch and returns at once.

        Raises:
            RayDirectTransportError: it can't begin.
        """
        assert isinstance(tensor_transport_metadata, FabricMetadata)
        kinds: Any = tensor_transport_metadata.tensor_meta
        if not kinds:
            return FabricFetchRequest(obj_id, [])
        offer: Offer | None = None
        try:
            offer = Offer.from_bytes(tensor_transport_metadata.offer)
            exchange = self.exchange()
            fetch = exchange.fetches.start(obj_id, offer, kinds, target_buffers or None)
        except FabricError as error:
            raise _failed(obj_id, offer, error) from error
        return FabricFetchRequest(obj_id, [], fetch, exchange)

    def wait_fetch_complete(
        self, fetch_request: FetchRequest, timeout: float = -1
    ) -> list[torch.Tensor]:
        """The tensors, when they are there.

        Raises:
            RayDirectTransportError: the fetch failed; the message names the process that holds the
                tensors.
            TimeoutError: they aren't there in time; the fetch is cancelled, and the message says
                whether bytes may still land in the buffers (MR-1).
        """
        assert isinstance(fetch_request, FabricFetchRequest)
        fetch, exchange = fetch_request.fetch, fetch_request.exchange
        if fetch is None or exchange is None:
            return []
        try:
            return fetch.wait(None if timeout < 0 else timeout)
        except FabricError as error:
            raise _failed(fetch.obj_id, fetch.offer, error) from error
        except TimeoutError:
            # Not left to the request's end: the error's traceback keeps that alive.
            exchange.fetches.end(fetch)
            raise TimeoutError(_late(fetch, timeout)) from None

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Fetches and waits: what Ray calls where a reference is a task's argument."""
        request = self.fetch_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return self.wait_fetch_complete(request)

    def send_multiple_tensors(
        self,
        tensors: list[torch.Tensor],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        raise NotImplementedError("readers pull; nothing is sent")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        """Withdraws an object without references: its memory can no longer be read."""
        if self._exchange is not None:
            self._exchange.sources.remove(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Ends the fetch of an object, or the one that is about to begin."""
        self.exchange().fetches.abort(obj_id)


def _open(context: Any) -> Exchange:
    actor = context.get_actor_id()
    name = (context.get_actor_name() or actor) if actor else "driver"
    holder = Holder(str(name), str(context.get_node_id()), os.getpid())
    # An engine of its own: the process's may be opened later, under a name, or be shut down.
    engine = cluster_engine(f"rdt-{process_name()}")
    return Exchange(engine, holder, timeout=ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS)


def _late(fetch: Fetch, timeout: float) -> str:
    if fetch.wait_settled():
        buffers = "its buffers are free"
    else:
        buffers = "bytes may still land in its buffers: don't use them again"
    return (
        f"object {fetch.obj_id} was not fetched from {fetch.offer.holder} in {timeout:.3g} s; the "
        f"fetch is cancelled and {buffers}"
    )


def _failed(obj_id: str, offer: Offer | None, error: FabricError) -> RayDirectTransportError:
    holder = "its owner" if offer is None else str(offer.holder)
    if isinstance(error, DecodeError):
        advice = "nothing was fetched"
    else:
        advice = "if that process is gone, produce the object again"
    return RayDirectTransportError(  # type: ignore[no-untyped-call]
        f"object {obj_id} was not fetched from {holder}: {type(error).__name__}: {error}; {advice}"
    )


def _forget_object(obj_id: str) -> None:
    """Ray has stored an object's tensors before it asks what they are, and never frees them when
    the answer is an error."""
    with suppress(Exception):
        store: Any = ray._private.worker.global_worker.rdt_manager.rdt_store
        if store.has_object(obj_id):
            store.pop_object(obj_id)
