"""A checkpoint engine for verl: importing this module registers the backend ``fabric``.

In verl's configuration::

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: fabric
      custom_backend_module: fabric_ray.integrations.verl
      engine_kwargs: {fabric: {require: rdma}}
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations import framework
from fabric_ray.integrations.bucket_header import Invitation, Named, settle_async
from fabric_ray.integrations.inbox import Inbox
from fabric_ray.integrations.outbox import Outbox
from fabric_ray.models.stored import plain_dtype
from fabric_ray.runtime import engine as process_engine

if TYPE_CHECKING:
    import torch

_verl: Any = framework("verl.checkpoint_engine", "verl")
_accelerators: Any = framework("verl.utils.device", "verl")

# By which experts are chosen, as checkpoints call them.
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias", "router_bias")


@_verl.CheckpointEngineRegistry.register("fabric")
class FabricCheckpointEngine(_verl.CheckpointEngine):  # type: ignore[misc]
    """Streams the trainers' full tensors to all rollouts, in buckets, by one-sided writes.

    Every trainer rank has every tensor after verl's gather, so all of them send: each serves its
    share of the rollouts directly. The busiest sends ``ceil(rollouts / trainers)`` models, where a
    chain from rank 0 would make each rollout depend on all before it. A rollout that fails is
    named, and the others get everything.

    Args:
        bucket_size: bytes of a bucket; a sender and a receiver keep two each, in host memory.
        is_master: whether this is the trainers' rank 0. verl tells trainers, and not rollouts.
        rollout_dtype: what floating-point tensors are sent as: the rollouts' dtype, which halves
            the bytes of float32 masters. ``None`` sends them as they are. Biases by which experts
            are chosen are always sent as they are.
        timeout: seconds that the other end may take for a bucket.
        engine: by default the process's own, :func:`fabric_ray.runtime.engine`.
        options: for that one, fields of :class:`fabric_ray.EngineConfig`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        *,
        rollout_dtype: torch.dtype | str | None = None,
        timeout: float = 300.0,
        engine: TransferEngine | None = None,
        **options: Any,
    ) -> None:
        self._trainer = is_master is not None
        self._dtype = _dtype(rollout_dtype)
        self._engine = engine or process_engine(**options)
        receiver = f"rollout worker {self._engine.id[:8]}"
        self._inbox = Inbox(self._engine, bucket_size, receiver=receiver, timeout=timeout)
        self._outbox = Outbox(self._engine, bucket_size, timeout=timeout)
        self._receivers: list[Invitation] = []
        self._sender: bytes | None = None

    def prepare(self) -> dict[str, Any]:
        """Opens this worker for one update; what ``build_topology`` needs to know of it."""
        invitation = None if self._trainer else self._inbox.invite().to_bytes()
        return {"address": self._engine.address.to_bytes(), "invitation": invitation}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Which trainer serves which rollouts: in turns.

        Raises:
            InvalidArgument: workers are missing, or a rollout was made with ``is_master``.
        """
        trainers, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if not trainers or len(trainers) + rollout_world_size != len(metadata):
            raise InvalidArgument(
                f"{len(metadata)} workers are prepared, and {actor_wg_world_size} trainers and "
                f"{rollout_world_size} rollouts should be"
            )
        invitations = [worker["invitation"] for worker in rollouts]
        if None in invitations:
            raise InvalidArgument(
                f"rollout worker {invitations.index(None)} was made as a trainer; don't pass "
                "is_master to rollouts"
            )
        count = len(trainers)
        senders = [trainers[i % count]["address"] for i in range(len(rollouts))]
        return (
            {"receivers": [invitations[i::count] for i in range(count)], "sender": [None] * count},
            {"receivers": [[] for _ in rollouts], "sender": senders},
        )

    def init_process_group(self, receivers: list[bytes], sender: bytes | None) -> None:
        """Takes this worker's part of the topology."""
        self._receivers = [Invitation.from_bytes(data) for data in receivers]
        self._sender = sender

    async def send_weights(
        self, weights: Iterable[Named] | AsyncIterable[Named], global_steps: int | None = None
    ) -> None:
        """Sends all tensors to this trainer's rollouts; returns when they have used all of them.

        Consumes all of ``weights`` even after an error, since it may gather from other trainers.

        Raises:
            InvalidArgument: no tensor came, or the base of adapters without the adapters.
            WeightSyncError: rollouts that did not get everything; ``failed`` names them.
        """
        tensors, empty = _each(weights), True
        try:
            self._outbox.begin(self._receivers, global_steps)
            async for name, tensor in tensors:
                if ".base_layer." in name:  # RS-1: verl sends no adapters by checkpoint engines
                    raise InvalidArgument(
                        f"`{name}` is a weight without its adapter, which verl does not send here; "
                        "set actor_rollout_ref.model.lora.merge to True"
                    )
                empty = False
                await settle_async(self._outbox.put(name, self._cast(name, tensor)))
            if empty and self._receivers:
                raise InvalidArgument(
                    "the trainer yields no tensor, so its rollouts would keep old weights; see "
                    "whether its engine yields all of them on every rank"
                )
        except BaseException as error:
            await settle_async(self._outbox.fail(f"{type(error).__name__}: {error}"))
            if isinstance(error, Exception):
                with suppress(Exception):
                    async for _ in tensors:
                        pass
            raise
        await settle_async(self._outbox.finish())

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Yields name and tensor, on the worker's accelerator if it has one.

        verl's adapters hand tensors that are larger than its bucket to their servers by handles of
        device memory. Without an accelerator, a tensor is a view that is good until the next is
        asked for.

        Raises:
            WeightSyncError: the trainer failed, and why; or it sends another step.
            PeerLost: it died.
        """
        if self._sender is None:
            raise InvalidArgument("this worker has no sender; call init_process_group first")
        device = _accelerator()
        steps = self._inbox.receive(self._sender, global_steps)
        try:
            for step in steps:
                if isinstance(step, tuple):
                    name, tensor = step
                    # Not asynchronous: the slot is written again when the next is asked for.
                    yield name, tensor if device is None else tensor.to(device)
                else:
                    await settle_async([step])
        finally:
            steps.close()

    def finalize(self) -> None:
        """Closes this worker for writes; its buckets stay for the next update."""
        self._inbox.shut()
        self._outbox.begin([])
        self._receivers, self._sender = [], None

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        # RS-1: steps of such a bias are smaller than what bfloat16 can tell apart.
        if self._dtype in (None, tensor.dtype) or name.endswith(_ROUTER_BIASES):
            return tensor
        coded = tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool
        if coded or (tensor.is_floating_point() and not plain_dtype(tensor.dtype)):
            raise InvalidArgument(
                f"`{name}` is {tensor.dtype}, and a cast to {self._dtype} would lose its scales; "
                "give the unquantised tensor; leave rollout_dtype out only where the rollouts "
                "hold the same codes, and their scales are sent too"
            )
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(self._dtype)


def _accelerator() -> torch.device | None:
    """The one that verl's adapters take for this process's; ``None`` without one."""
    import torch

    if not _accelerators.is_device_available():
        return None
    return torch.device(_accelerators.get_device_name(), _accelerators.get_device_id())


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    import torch

    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if name is not None and not (isinstance(dtype, torch.dtype) and plain_dtype(dtype)):
        raise InvalidArgument(
            f"rollout_dtype is {name!r}, expected a float dtype of torch of 2 bytes or more; "
            "try bfloat16"
        )
    return dtype


async def _each(weights: Iterable[Named] | AsyncIterable[Named]) -> AsyncIterator[Named]:
    if isinstance(weights, AsyncIterable):
        async for named in weights:
            yield named
    else:
        for named in weights:
            yield named
