"""A vLLM worker's end of sharded pushes.

Trainers write the boxes that the model's recorded loader needs into memory beside the model, while
vLLM computes. A commit runs between vLLM's steps, by its own call, so it waits there for no one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.integrations.vllm_kv_content import WeightsUpdate
from fabric_ray.integrations.vllm_recorded import Need, RecordedModel, record_model
from fabric_ray.integrations.vllm_reload import Reload
from fabric_ray.integrations.worker_rpc import PHASES, WorkerServer
from fabric_ray.plan import DType, LocalContainer, Side, Tensor
from fabric_ray.weights import WeightTarget, phases
from fabric_ray.weights.destination import VersionSink
from fabric_ray.weights.report import PushTarget

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_NAMED = 8


class WorkerNeeds(msgspec.Struct, frozen=True):
    """What a worker needs of each version."""

    needs: list[Need]
    whole: dict[str, str]
    """Tensors that it needs whole, and why."""
    tied: list[tuple[str, str]]
    """Tensors that are one in its model."""
    rounded: list[str]
    """Tensors in float32 of which it takes bfloat16 values alone."""


class Commit(msgspec.Struct, frozen=True):
    """A version that workers put into use."""

    session: str
    version: int


class ShardedWorker:
    """Receives versions beside a model.

    Args:
        model: of vLLM, loaded.
        config: the model's, as vLLM has it.
        tensors: of the checkpoint: name, dtype, shape.
        leave: patterns of layers that may keep old weights.
        engine: receives.
        host: of this worker, as the trainer reaches it.

    Raises:
        InvalidArgument: the model can't load what the trainer has.
        WeightSyncError: layers would lack tensors.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        leave: Sequence[str],
        engine: TransferEngine,
        host: str,
    ) -> None:
        held = {name: Tensor(name, tuple(shape), DType.of(dtype)) for name, dtype, shape in tensors}
        self._recorded = record_model(model, config, held, leave)
        if whole := self._recorded.whole:
            few = ", ".join(f"`{name}` ({why})" for name, why in list(whole.items())[:_NAMED])
            logger.warning("%d tensors come whole at each update: %s", len(whole), few)
        self._sink = _ModelSink(self._recorded, config, leave)
        self._engine = engine
        self._name = f"vllm-{uuid4().hex}"
        self._target: WeightTarget | None = None
        self._committed: tuple[Commit, PushTarget | Exception] | None = None
        own = (target_needs, self._needs), (target_open, self._open)
        functions = {**PHASES, **{f.__name__: answer for f, answer in own}}
        functions[phases.target_commit.__name__] = self._answer_commit
        self._server = WorkerServer(functions, host, self._name)
        self.session_id = self._server.session_id
        """By which the trainer calls this worker."""

    def commit(self, commit: Commit, weight_version: str | None = None) -> None:
        """Puts a confirmed version into use, in the thread in which the model computes (RS-3).

        It raises nothing: the trainer asks each worker for the outcome. When a call fails at one of
        several workers, vLLM 0.32 gives later calls the answers of earlier ones.

        Args:
            weight_version: the user's name of the version; other sessions may give the same.
        """
        self._sink.fingerprint = weight_version or f"{commit.session} {commit.version}"
        args = (self._name, commit.session, commit.version)
        try:
            self._committed = commit, phases.target_commit(None, *args)
        except Exception as error:
            logger.exception("version %d was not put into use", commit.version)
            self._committed = commit, error

    def close(self) -> None:
        """Takes part in no more pushes."""
        self._server.close()
        if self._target is not None:
            self._target.close()
            self._target = None

    def _needs(self, _: Any, name: str) -> WorkerNeeds:
        found = self._recorded
        return WorkerNeeds(found.needs, found.whole, found.tied, found.rounded)

    def _open(self, _: Any, name: str, side: Side, rank: int) -> None:
        if self._target is not None:
            self._target.close()
        self._target = WeightTarget(
            side, rank=rank, name=self._name, engine=self._engine, into=self._sink
        )

    def _answer_commit(
        self, _: Any, name: str, session: str, version: int, joining: bool = False
    ) -> PushTarget:
        """vLLM's call has committed by now."""
        if self._committed is None or self._committed[0] != Commit(session, version):
            raise WeightSyncError(
                f"version {version} was not put into use here; see the server's log for the error "
                "of update_weights",
                version=version,
            )
        outcome = self._committed[1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class _ModelSink(VersionSink):
    """Fills the model layer by layer."""

    def __init__(self, recorded: RecordedModel, config: Any, leave: Sequence[str]) -> None:
        self._recorded, self._config, self._leave = recorded, config, leave
        self.fingerprint = ""
        """Names the next version at all workers."""

    def check(self, containers: Sequence[LocalContainer], rank: int) -> None:
        wanted = {need.container for need in self._recorded.needs}
        if other := wanted ^ {container.name for container in containers}:
            raise InvalidArgument(
                f"`{min(other)}` is in the side or the model of rank {rank}, expected both; make "
                "the side of what this worker has reported"
            )

    def check_ties(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Tied layers are vLLM's own matter."""

    def close(self) -> None:
        self.partly_filled = False

    def copy(self, arrived: Mapping[str, torch.Tensor]) -> None:
        reload = Reload(self._recorded.model, self._config, self._leave)
        update = WeightsUpdate(brought=frozenset(self._recorded.shapes) if self._leave else None)
        self.partly_filled = True
        update.begin(self.fingerprint)
        try:
            self._recorded.apply(reload, arrived)
            reload.finish()
        except BaseException:
            reload.abandon()
            raise
        update.finish()
        self.partly_filled = False


def target_needs(_: Any, name: str) -> WorkerNeeds:
    """What a :class:`ShardedWorker` answers by what its recorded loader needs."""
    raise NotImplementedError


def target_open(_: Any, name: str, side: Side, rank: int) -> None:
    """What a :class:`ShardedWorker` answers by making its target."""
