"""A weight transfer engine for vLLM, named ``fabric``: the worker's end and the trainer's.

The control plane is vLLM's: its client tells workers of each update, and brings nothing back. So
workers answer to the trainer's engine directly, by a small message that invites it to write.
"""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from typing_extensions import Self

from fabric_ray.decoding import from_msgpack
from fabric_ray.engine import EngineAddress, Message, TransferEngine
from fabric_ray.errors import DecodeError, InvalidArgument, WeightSyncError
from fabric_ray.integrations import framework
from fabric_ray.integrations.inbox import Inbox
from fabric_ray.integrations.letters import Invitation, settle
from fabric_ray.integrations.outbox import Outbox

if TYPE_CHECKING:
    import torch

_vllm: Any = framework("vllm.distributed.weight_transfer.base", "vllm")

DEFAULT_BUCKET = 256 << 20
"""Bytes of a bucket."""
# While invitations are awaited, whether the call to the workers has failed is looked up so often.
_LOOK_S = 0.2


class _Hello(msgspec.Struct, frozen=True):
    """What a worker tells the trainer at the begin of an update."""

    update: int
    invitation: bytes


@dataclass
class FabricInitInfo(_vllm.WeightTransferInitInfo):  # type: ignore[misc]
    """What workers are told once, as plain values: it may travel as JSON."""

    trainer: str
    """The address of the trainer's engine, as hex."""
    bucket: int = DEFAULT_BUCKET
    timeout: float = 300.0
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`fabric_ray.EngineConfig` for the workers' engines."""


@dataclass
class FabricUpdateInfo(_vllm.WeightTransferUpdateInfo):  # type: ignore[misc]
    """What workers are told of each update."""

    update: int


@dataclass
class FabricTrainerInitInfo(_vllm.TrainerInitInfo):  # type: ignore[misc]
    """How a trainer rank opens its end."""

    backend: ClassVar[str] = "fabric"

    workers: int
    """vLLM's workers, over all engines and their ranks."""
    bucket: int = DEFAULT_BUCKET
    timeout: float = 300.0
    """Seconds that a worker may take for a bucket."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`fabric_ray.EngineConfig`, for the trainer's engine and the workers'."""


class FabricWeightTransferEngine(_vllm.WeightTransferEngine):  # type: ignore[misc]
    """A worker's end: loads tensors in checkpoint format as they come."""

    init_info_cls = FabricInitInfo
    update_info_cls = FabricUpdateInfo

    _engine: TransferEngine | None = None

    def init_transfer_engine(self, init_info: FabricInitInfo) -> None:
        """Opens this worker's engine, in place of one for an earlier trainer."""
        self.shutdown()
        self._engine = TransferEngine(**init_info.engine)
        self._trainer = bytes.fromhex(init_info.trainer)
        self._peer = self._engine.peer(EngineAddress.from_bytes(self._trainer))
        self._engine.connect(self._peer)
        who = f"vllm worker {self._engine.id[:8]}"
        self._inbox = Inbox(self._engine, init_info.bucket, who=who, timeout=init_info.timeout)

    def start_weight_update(self) -> None:
        reload = framework("vllm.model_executor.model_loader.reload", "vllm")
        reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        reload = framework("vllm.model_executor.model_loader.reload", "vllm")
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: FabricUpdateInfo) -> None:
        """Receives all tensors of an update.

        Raises:
            WeightSyncError: the trainer failed, and why.
            FabricError: it was lost, or was silent for too long.
        """
        if self._engine is None:
            raise InvalidArgument("no trainer is known here; call init_transfer_engine first")
        hello = _Hello(update_info.update, self._inbox.invite().to_bytes())
        self._engine.send(self._peer, msgspec.msgpack.encode(hello)).wait()
        steps = self._inbox.receive(self._trainer, update_info.update)
        try:
            for step in steps:
                if isinstance(step, tuple):
                    # The model may keep a tensor until its layer is complete; the bucket goes.
                    name, tensor = step
                    self._check_plain(name, tensor)
                    self.model.load_weights([(name, tensor.to(self.device, copy=True))])
                else:
                    settle([step])
        finally:
            steps.close()

    def _check_plain(self, name: str, tensor: torch.Tensor) -> None:
        """RS-1: loaders of a model that isn't quantised cast what they are given."""
        quantised = getattr(self.model_config, "quantization", None) is not None
        if tensor.dtype.itemsize > 1 or quantised:
            return
        own = dict(self.model.named_parameters()).get(name)
        if own is None or own.dtype != tensor.dtype:
            raise InvalidArgument(
                f"`{name}` comes as {tensor.dtype}, and the model isn't quantised: a cast would "
                "lose its scales; send the unquantised tensor, or start vLLM with the quantisation "
                "that the trainer uses"
            )

    def shutdown(self) -> None:
        if self._engine is not None:
            self._inbox.close()
            self._engine.close()
            self._engine = None


class FabricTrainerWeightTransferEngine(_vllm.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end: rank 0 streams full tensors to all workers at once.

    The other ranks take part in the gathers of the source, and send nothing.
    """

    init_info_cls = FabricTrainerInitInfo

    _engine: TransferEngine | None = None

    @classmethod
    def trainer_init(
        cls, init_info: FabricTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Opens the trainer's engine and tells the workers where it is.

        Raises:
            InvalidArgument: there is no source, or it doesn't give full tensors to rank 0.
        """
        if source is None or not source.implements_iter_full():
            raise InvalidArgument(
                "the backend `fabric` sends full tensors; give a WeightSource with iter_full()"
            )
        for meta in source.metadata:
            if meta.owners is not None and 0 not in meta.owners:
                raise InvalidArgument(
                    f"rank 0 sends, and doesn't own `{meta.name}` (its owners are {meta.owners}); "
                    "give a source that gathers every parameter on rank 0"
                )
        made = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        if made.is_sender:
            made._open(init_info)
        return made

    def send_weights(self) -> None:
        """Has all workers load the source's weights.

        Raises:
            WeightSyncError: workers that did not get everything; ``failed`` names them.
        """
        if self._engine is None:
            for _ in self.source.iter_full():
                pass
            return
        self._update += 1
        self.client.start_weight_update()
        # The workers' end of it blocks until all has arrived, so it runs beside the sending.
        beside = ThreadPoolExecutor(1, "fabric-vllm-update")
        try:
            call = beside.submit(self.client.update_weights, {"update": self._update})
            self._send(self._invitations(call))
            call.result()
        finally:
            # After a failure here the call may take as long as the client lets it.
            beside.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        if self._engine is not None:
            self._outbox.close()
            self._engine.close()
            self._engine = None

    def _open(self, info: FabricTrainerInitInfo) -> None:
        self._engine = TransferEngine(**info.engine)
        self._outbox = Outbox(self._engine, info.bucket, timeout=info.timeout)
        self._workers, self._timeout, self._update = info.workers, info.timeout, 0
        self._hellos: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._engine.receive(self._heard)
        self.client.init_weight_transfer_engine(
            {
                "trainer": self._engine.address.to_bytes().hex(),
                "bucket": info.bucket,
                "timeout": info.timeout,
                "engine": info.engine,
            }
        )

    def _heard(self, message: Message) -> None:
        self._hellos.put(message.data)

    def _invitations(self, call: Future[None]) -> list[Invitation]:
        """Those of all workers, for this update.

        Raises:
            WeightSyncError: not all came in time, or the call to the workers has failed.
        """
        found: list[Invitation] = []
        deadline = time.monotonic() + self._timeout
        while len(found) < self._workers:
            try:
                hello = _read(self._hellos.get(timeout=_LOOK_S))
            except queue.Empty:
                if not call.done() and time.monotonic() < deadline:
                    continue
                error = call.exception() if call.done() else None
                raise WeightSyncError(
                    f"{len(found)} of {self._workers} workers of vLLM are ready for update "
                    f"{self._update}; see whether `workers` counts the ranks of all engines"
                    + (f", and what ended the call to them: {error}" if error else ""),
                    version=self._update,
                ) from error
            if hello.update == self._update:
                found.append(Invitation.from_bytes(hello.invitation))
        return found

    def _send(self, invitations: list[Invitation]) -> None:
        self._outbox.begin(invitations, self._update)
        try:
            for name, tensor in self.source.iter_full():
                settle(self._outbox.put(name, tensor))
        except BaseException as error:
            settle(self._outbox.fail(f"{type(error).__name__}: {error}"))
            raise
        settle(self._outbox.finish())


def _read(data: bytes) -> _Hello:
    try:
        return from_msgpack(data, _Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(f"not a worker's word: {error}") from error
