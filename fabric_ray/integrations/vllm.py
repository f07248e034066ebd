"""A weight transfer engine for vLLM, named ``fabric``: the worker's end and the trainer's.

The control plane is vLLM's: its client tells workers of each update, and brings nothing back. So
workers answer to the trainer's engine directly, by a small message that invites it to write.

A server computes with one version or stands paused (RS-3): the trainer's end pauses it, discards
what was computed with the old weights, and lets it go on when it has all of one version.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import Self

from fabric_ray.engine import EngineAddress, TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.integrations import framework
from fabric_ray.integrations.bucket_header import Invitation, settle
from fabric_ray.integrations.inbox import Inbox
from fabric_ray.integrations.outbox import Outbox
from fabric_ray.integrations.vllm_control import (
    PAUSES,
    UpdatePause,
    begin_call,
    call_client,
    control_of,
    end_call,
    start_update,
    stays_paused,
    version_fields,
)
from fabric_ray.integrations.vllm_hello import Hello, Hellos, host_towards
from fabric_ray.integrations.vllm_kv_content import WeightsUpdate
from fabric_ray.integrations.vllm_plugin import check_version
from fabric_ray.integrations.vllm_push import (
    ShardedPush,
    full_source,
    has_group,
    refuse_shards,
    shards_of,
)
from fabric_ray.integrations.vllm_recorded import refuse_lost, refuse_moved_experts, refuse_stores
from fabric_ray.integrations.vllm_reload import Reload, TieCheck, refuse_lossy_cast
from fabric_ray.integrations.vllm_sharded import Commit, ShardedWorker
from fabric_ray.weights import PushReport

if TYPE_CHECKING:
    import torch

check_version()
_vllm: Any = framework("vllm.distributed.weight_transfer.base", "vllm")
_vllm_config: Any = framework("vllm.config", "vllm")

BUCKET = 256 << 20
"""Bytes of a bucket of streamed tensors."""
# A worker that gives up has raised: its error is on its way by vLLM's call.
_CAUSE_S = 5.0


@dataclass
class FabricInitInfo(_vllm.WeightTransferInitInfo):  # type: ignore[misc]
    """What workers are told once, as plain values: it may travel as JSON."""

    trainer: str
    """The address of the trainer's engine, as hex."""
    bucket: int = BUCKET
    timeout: float = 300.0
    engine: dict[str, Any] = field(default_factory=dict, repr=False)
    """Fields of :class:`fabric_ray.EngineConfig` for the workers' engines."""
    leave: list[str] = field(default_factory=list)
    """Patterns of the model's layers that may keep old weights."""
    tensors: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """Name, dtype and shape of what an update brings."""
    host: str | None = None
    """Of the trainer's rank 0, as workers reach it, where trainers write shards; ``None`` where
    rank 0 streams whole tensors."""


@dataclass
class FabricUpdateInfo(_vllm.WeightTransferUpdateInfo):  # type: ignore[misc]
    """What workers are told of each update."""

    update: int
    session: str | None = None
    """Of the shards that have been confirmed; ``None`` where whole tensors are streamed."""
    weight_version: str | None = None
    """The user's name of the version, if there is one."""


@dataclass
class FabricTrainerInitInfo(_vllm.TrainerInitInfo):  # type: ignore[misc]
    """How a trainer rank opens its end."""

    backend: ClassVar[str] = "fabric"

    workers: int
    """vLLM's workers, over all engines and their ranks."""
    timeout: float = 300.0
    """Seconds that trainers and workers may take for a phase of a push, or for a bucket of streamed
    tensors; that trainers wait for a rank that is late; and that vLLM may take for a call, unless
    its client has a longer timeout."""
    engine: dict[str, Any] = field(default_factory=dict, repr=False)
    """Fields of :class:`fabric_ray.EngineConfig`, for the trainer's engine and the workers'."""
    pause: Literal["keep", "abort"] = "keep"
    """What running requests do during an update: wait and go on with the new weights, or end."""
    leave: tuple[str, ...] = ()
    """Patterns of layers of vLLM's model that may keep old weights, such as ``visual.*``. A layer
    that an update leaves out is an error otherwise."""


class FabricWeightTransferEngine(_vllm.WeightTransferEngine):  # type: ignore[misc]
    """A worker's end: puts shards into use that trainers have written beside the model, or loads
    tensors in checkpoint format as they come."""

    init_info_cls = FabricInitInfo
    update_info_cls = FabricUpdateInfo
    supports_draft_weight_update = False
    """A trainer's end updates the model, and not a draft model beside it."""

    _engine: TransferEngine | None = None
    _inbox: Inbox | None = None
    _sharded: ShardedWorker | None = None
    _leave: Sequence[str] = ()
    _brought: frozenset[str] | None = None

    def init_transfer_engine(self, init_info: FabricInitInfo) -> None:
        """Opens this worker's engine, in place of one for an earlier trainer.

        Raises:
            FabricError: the model can't load what the trainer has; the message names it.
            Unsupported: the model would lose tensors that are streamed, or vLLM moves its experts.
        """
        self.shutdown()
        self._close_update()
        self._engine = TransferEngine(**init_info.engine)
        self._trainer = bytes.fromhex(init_info.trainer)
        self._leave = init_info.leave
        self._brought = frozenset(n for n, *_ in init_info.tensors) if init_info.leave else None
        self._peer = self._engine.peer(EngineAddress.from_bytes(self._trainer))
        self._engine.connect(self._peer)
        if init_info.host is not None:
            self._open_sharded(init_info.tensors, init_info.host)
            return
        self._check_settings()
        with _vllm_config.set_current_vllm_config(self.vllm_config):
            refuse_lost(self.model, self.model_config, init_info.tensors)
        receiver = f"vllm worker {self._engine.id[:8]}"
        self._inbox = Inbox(
            self._engine, init_info.bucket, receiver=receiver, timeout=init_info.timeout
        )

    def _check_settings(self) -> None:
        """That nothing of this server keeps or moves what updates replace, whichever way they go.

        Raises:
            Unsupported: something does.
        """
        refuse_moved_experts(self.parallel_config)
        refuse_stores(self.vllm_config)

    def _open_sharded(self, tensors: list[Any], trainer: str) -> None:
        assert self._engine is not None
        try:
            self._check_settings()
            with _vllm_config.set_current_vllm_config(self.vllm_config):
                self._sharded = ShardedWorker(
                    self.model,
                    self.model_config,
                    tensors,
                    leave=self._leave,
                    engine=self._engine,
                    host=host_towards(trainer),
                )
            hello = Hello(0, self._sharded.session_id.encode())
        except Exception as error:  # said in words, as for ShardedWorker.commit
            hello = Hello(0, b"", f"{type(error).__name__}: {error}")
        hello.send(self._engine, self._peer)

    def _close_update(self) -> None:
        """Ends an update that a trainer has left open at vLLM's worker, which refuses a next one
        then. It may be open at some workers only; ``finish_weight_update`` would fail at the
        others, and in vLLM 0.32 later calls get the answers of earlier ones after that. vLLM gives
        this class no reference to its worker, which is among its callers."""
        own = inspect.currentframe()
        frame = own and own.f_back
        del own  # with its locals it would keep its callers' objects, in a cycle
        while frame is not None:
            worker = frame.f_locals.get("self")
            if getattr(worker, "weight_transfer_engine", None) is self:
                worker._weight_update_active = False  # type: ignore[union-attr]
                return
            frame = frame.f_back

    def start_weight_update(self) -> None:
        """Nothing yet: the model keeps its weights until the first tensor has arrived."""

    def finish_weight_update(self) -> None:
        """Nothing more: the model has had the new weights since ``receive_weights``."""

    def receive_weights(self, update_info: FabricUpdateInfo) -> None:
        """Puts an update into use: shards that have arrived, or all tensors as they come. vLLM runs
        no step meanwhile, so requests never meet a model without weights.

        Raises:
            WeightSyncError: the trainer failed, and why. Or tensors of layers are missing.
            FabricError: it was lost, or was silent for too long.
        """
        if update_info.session is not None and self._sharded is not None:
            commit = Commit(update_info.session, update_info.update)
            self._sharded.commit(commit, update_info.weight_version)
            return
        if self._engine is None or self._inbox is None or update_info.session is not None:
            raise InvalidArgument("no trainer is known here; call init_transfer_engine first")
        Hello(update_info.update, self._inbox.invite().to_bytes()).send(self._engine, self._peer)
        steps = self._inbox.receive(self._trainer, update_info.update)
        reload = Reload(self.model, self.model_config, self._leave)
        own: dict[str, torch.Tensor] = {}
        update, ties = WeightsUpdate(brought=self._brought), TieCheck(self.model)
        try:
            for step in steps:
                if isinstance(step, tuple):
                    # The model may keep a tensor until its layer is complete; the bucket goes.
                    name, tensor = step
                    if not own:
                        reload.begin()  # which gives parameters the dtypes that are loaded
                        own = dict(self.model.named_parameters())
                        update.begin(update_info.weight_version or "")
                    kept = own[name].dtype if name in own else None
                    refuse_lossy_cast(self.model_config, name, tensor.dtype, kept)
                    ties.see(name, tensor)
                    if update_info.weight_version is None:
                        update.add(name, tensor)
                    reload.load([(name, tensor.to(self.device, copy=True))])
                else:
                    settle([step])
            reload.finish()
            update.finish()
        except BaseException:
            reload.abandon()
            raise
        finally:
            steps.close()

    def shutdown(self) -> None:
        for opened in (self._sharded, self._inbox, self._engine):
            if opened is not None:
                opened.close()
        self._sharded = self._inbox = self._engine = None


class FabricTrainerWeightTransferEngine(_vllm.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end. Each rank writes its shards to the workers that need them, where the
    source has shards: a module, vLLM's ``ModuleSource``, or a ``WeightSource`` of fabric-ray.

    From any other source rank 0 streams full tensors to all workers at once; the other ranks take
    part in the gathers, and send nothing.
    """

    init_info_cls = FabricTrainerInitInfo

    _engine: TransferEngine | None = None
    _call: Future[Any] | None = None
    _sharded: ShardedPush | None = None

    @classmethod
    def trainer_init(
        cls, init_info: FabricTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Opens the trainer's engine and tells the workers where it is.

        Raises:
            InvalidArgument: there is no source, or it doesn't give full tensors to rank 0; or the
                client can't pause its servers.
            Unsupported: the server has no routes for updates; the message says how to start it.
            WeightSyncError: the server refused; the message has its answer.
        """
        if init_info.pause not in PAUSES:
            raise InvalidArgument(
                f"pause: got {init_info.pause!r}, expected {' or '.join(map(repr, PAUSES))}"
            )
        try:
            shards = shards_of(source, init_info.rank)
        except Exception as error:
            refuse_shards(error, init_info.timeout)
            raise
        if shards is None:
            source = full_source(source)
            _check_source(source)
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made.rank = init_info.rank
        if shards is not None:
            made._sharded = ShardedPush(init_info, client, shards)
        elif made.is_sender:
            made._open(init_info)
        return made

    def send_weights(self, weight_version: str | None = None) -> None:
        """Has all workers load the source's weights: sends, pauses the servers, discards their
        cached pages, puts the weights into use, and resumes the servers. Streamed tensors are sent
        while the servers are paused.

        Servers go on with the old weights if it fails before workers put anything into use. They
        stay paused if it fails later, and are resumed by the next call. Servers that others have
        paused before stay paused.

        Args:
            weight_version: names the version: vLLM's answers have it in ``weight_versions``, and
                its KV connector takes pages of servers that got the same. Each version needs
                another, and all ranks and all senders of one version give the same. Without it
                servers of two senders of shards refuse each other's pages.

        Raises:
            InvalidArgument: vLLM or the client can't take ``weight_version``.
            WeightSyncError: workers that did not get everything; ``failed`` names them.
            Unsupported: the server has no routes for updates; the message says how to start it.
        """
        if self._sharded is not None:
            self._sharded.send(weight_version)
            return
        self._tensors = _full_tensors(self.source)
        if self._engine is None:
            deque(self._tensors, maxlen=0)
            return
        try:
            self._stream(weight_version)
        except Exception:
            if has_group():
                # RS-4: the other ranks are in the gathers, and would wait for this one.
                with suppress(Exception):
                    deque(self._tensors, maxlen=0)
            raise

    def _stream(self, weight_version: str | None) -> None:
        self._version_fields = version_fields(self.client, weight_version)
        if has_group():
            # The other ranks are in the gathers then: the servers don't stand still for them.
            self._tensors = chain(list(islice(self._tensors, 1)), self._tensors)
        self._update += 1
        self._is_old, self._call = True, None
        pause = UpdatePause(self._servers, self._pause, self._timeout)
        try:
            pause.begin()
            self._push()
            pause.discard()
        except BaseException as error:
            # Workers that are still in this update must not meet the next one.
            if self._is_over() and self._is_old:
                pause.cancel()
                raise
            if not isinstance(error, Exception):
                raise
            raise stays_paused(error, self._update, self._servers) from error
        pause.end()

    @property
    def report(self) -> PushReport | None:
        """Of the last push of shards that succeeded, at rank 0: bytes, seconds and paths. ``None``
        before it, at other ranks, and where tensors are streamed."""
        return None if self._sharded is None else self._sharded.report

    def shutdown(self) -> None:
        if self._sharded is not None:
            self._sharded.close()
        if self._engine is not None:
            self._outbox.close()
            self._engine.close()
            self._engine = None

    def _open(self, info: FabricTrainerInitInfo) -> None:
        self._servers = control_of(self.client, info.timeout)
        self._servers.paused()
        self._engine = TransferEngine(**info.engine)
        self._outbox = Outbox(self._engine, BUCKET, timeout=info.timeout)
        self._workers, self._timeout, self._update = info.workers, info.timeout, 0
        self._pause = info.pause
        self._hellos = Hellos(self._engine, info.workers)
        told = {
            "trainer": self._engine.address.to_bytes().hex(),
            "bucket": BUCKET,
            "timeout": info.timeout,
            "engine": info.engine,
            "leave": list(info.leave),
            "tensors": [
                [meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)]
                for meta in _metadata(self.source)
            ],
        }
        try:
            call_client(self.client, info.timeout, "init_weight_transfer_engine", told)
        except BaseException:
            self.shutdown()
            raise

    def _push(self) -> None:
        """One update by vLLM's calls; the workers have all of it when this returns."""
        start_update(self.client, self._timeout)
        # The workers' end of it blocks until all has arrived, so it runs beside the sending.
        update = {"update": self._update, **self._version_fields}
        self._call = call = begin_call(self.client, "update_weights", update)
        invitations = self._invitations(call)
        try:
            self._send(invitations)
        except WeightSyncError as error:
            wait_for([call], _CAUSE_S)
            if not (call.done() and call.exception()):
                raise
            raise WeightSyncError(
                f"{error}; vLLM's answer: {call.exception()}",
                version=self._update,
                failed=error.failed,
            ) from call.exception()
        try:
            end_call(call, self.client, self._timeout, "update_weights")
        except Exception:
            self._hellos.refuse_more(self._update)  # it waited for tensors that aren't sent
            raise
        version = self._version_fields.values()
        call_client(self.client, self._timeout, "finish_weight_update", *version)

    def _is_over(self) -> bool:
        """Whether no worker takes part in the update any more."""
        return self._call is None or bool(wait_for([self._call], self._timeout).done)

    def _invitations(self, call: Future[None]) -> list[Invitation]:
        """Those of all workers, for this update.

        Raises:
            WeightSyncError: not all came in time, or the call to the workers has failed. Workers
                that are ready are told.
        """
        what = f"update {self._update}"
        said, error = self._hellos.collect(self._update, call, self._timeout, what=what)
        found = [Invitation.from_bytes(text) for text in said]
        if error is not None:
            self._outbox.begin(found, self._update)
            settle(self._outbox.fail(str(error)))
            raise error
        return found

    def _send(self, invitations: list[Invitation]) -> None:
        self._outbox.begin(invitations, self._update)
        try:
            missing = {meta.name: None for meta in _metadata(self.source)}
            for name, tensor in self._tensors:
                missing.pop(name, None)
                settle(self._outbox.put(name, tensor))
            if missing:  # RS-1
                raise InvalidArgument(
                    f"the source did not yield {len(missing)} of its tensors, the first of them "
                    f"`{next(iter(missing))}`; begin a fresh pass at each iteration"
                )
        except BaseException as error:
            self._is_old = self._outbox.sent == 0
            settle(self._outbox.fail(f"{type(error).__name__}: {error}"))
            raise
        self._is_old = False
        settle(self._outbox.finish())


def _check_source(source: Any) -> None:
    """
    Raises:
        InvalidArgument: it doesn't give all full tensors to rank 0.
    """
    # vLLM 0.32 has one way to iterate, over full tensors; 0.33 has iter_full.
    full = getattr(source, "implements_iter_full", lambda: source is not None)
    if not full():
        raise InvalidArgument(
            "the backend `fabric` sends full tensors; give a WeightSource with iter_full()"
        )
    held = getattr(source, "held_names", lambda: None)()
    for meta in _metadata(source):
        owners = getattr(meta, "owners", None)
        if (owners is not None and 0 not in owners) or (held is not None and meta.name not in held):
            raise InvalidArgument(
                f"rank 0 sends, and doesn't own `{meta.name}`"
                + (f" (its owners are {owners})" if owners is not None else "")
                + "; give a source that gathers every parameter on rank 0"
            )


def _metadata(source: Any) -> Any:
    return source.metadata() if callable(source.metadata) else source.metadata


def _full_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(source.iter_full() if hasattr(source, "implements_iter_full") else source)
