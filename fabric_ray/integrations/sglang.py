"""The engine's half of a push from miles: a target in each of SGLang's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.integrations.worker_rpc import PHASES, WorkerServer
from fabric_ray.plan import Side
from fabric_ray.tensors import check_memory
from fabric_ray.weights import EngineHooks, WeightTarget

if TYPE_CHECKING:
    import torch

WeightsInfo = dict[str, tuple[int, int, int]]

_HARMLESS: dict[str, Any] = {
    "enable_eplb": False,
    "init_expert_location": "trivial",
    "hicache_storage_backend": None,
    "dp_size": 1,
    "enable_dp_attention": False,
}
"""Fields of SGLang's ``ServerArgs`` by which pushes would be lost, with their defaults."""


class FabricWorker:
    """Receives versions beside a worker's weights, and copies each into them when it is decided.

    Until then the weights stay as they are. Generation must stand still during the copy: miles has
    paused it by then; elsewhere ``hooks`` do.

    Args:
        weights: by name, what the engine computes with; filled in place, on any device. Looked up
            at each update.
        layout: what all ranks of so many engines hold, numbered engine by engine.
        rank: in its engine, from 0.
        ranks: of the engine.
        host: of this worker, as trainers reach it.
        engine: by default one of its own, configured by the environment.
        hooks: what is done around the copy beside what miles does by its calls.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        layout: Callable[[int], Side],
        *,
        rank: int,
        ranks: int,
        host: str = "127.0.0.1",
        engine: TransferEngine | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} is none of an engine of {ranks}")
        _check_weights(weights)
        self._weights, self._layout, self._rank, self._ranks = weights, layout, rank, ranks
        self._engine, self._hooks = engine or TransferEngine(), hooks
        self._target: WeightTarget | None = None
        name = f"worker-{uuid4().hex}"
        functions = {**PHASES, target_open.__name__: self._open}
        self._server = WorkerServer(functions, host, name)
        self.session_id = self._server.session_id
        """What SGLang calls the session of a remote instance."""

    @property
    def weights_info(self) -> WeightsInfo:
        """By name: address, elements and bytes of one, as SGLang reports them."""
        return {n: (w.data_ptr(), w.numel(), w.element_size()) for n, w in self._weights.items()}

    def close(self) -> None:
        """Takes part in no more pushes."""
        self._server.close()
        if self._target is not None:
            self._target.close()
            self._target = None

    def _open(self, _: Any, name: str, engine: int, engines: int) -> None:
        """Takes a place among so many engines."""
        side = self._layout(engines)
        rank = engine * self._ranks + self._rank
        if len(side.ranks) != engines * self._ranks:
            raise InvalidArgument(
                f"the layout of {engines} engines has {len(side.ranks)} ranks, and engines have "
                f"{self._ranks} each"
            )
        _check_weights(self._weights)
        if self._target is not None:
            self._target.close()
            self._target = None
        self._target = WeightTarget(
            side, rank=rank, name=name, engine=self._engine, into=self._weights, hooks=self._hooks
        )


def attach(runner: Any, layout: Callable[[int], Side], **options: Any) -> FabricWorker:
    """Makes a worker of SGLang's model runner and reports it where SGLang's HTTP server looks for
    what a remote instance needs: call it in every worker's process, when the model is loaded.

    Args:
        runner: SGLang's ``ModelRunner``, or what has its attributes ``model``, ``tp_rank`` and
            ``tp_size``.
        options: of :class:`FabricWorker`.

    Raises:
        Unsupported: SGLang moves experts, keeps pages of old weights, or does not tell trainers of
            all workers; or the runner is a draft model's.
    """
    if why := "; ".join(_reasons_against(runner)):
        raise Unsupported(f"SGLang's worker can't be attached: {why}")
    weights = _Parameters(runner.model)
    worker = FabricWorker(weights, layout, rank=runner.tp_rank, ranks=runner.tp_size, **options)
    runner.remote_instance_transfer_engine_session_id = worker.session_id
    runner.remote_instance_transfer_engine_weight_info = worker.weights_info
    runner._register_to_engine_info_bootstrap()
    return worker


def _reasons_against(runner: Any) -> Iterator[str]:
    """RS-1: why a worker would go on with other weights than the trainers'."""
    args = SimpleNamespace(**_HARMLESS | vars(getattr(runner, "server_args", SimpleNamespace())))
    if args.enable_eplb or args.init_expert_location != "trivial":
        yield "EPLB and init_expert_location put experts where no push expects them"
    if args.hicache_storage_backend is not None:
        yield "hicache_storage_backend keeps pages that were computed with old weights"
    replicated = args.dp_size > 1 and not args.enable_dp_attention
    if replicated or getattr(runner, "pp_size", 1) > 1:
        yield (
            "SGLang names one worker for each TP rank, and pipeline stages and replicas have the "
            "same; set pp_size to 1, and dp_size to 1 or enable_dp_attention"
        )
    if getattr(runner, "is_draft_worker", False):
        yield "a draft model gets no pushes; attach the runner of the model that it drafts for"


class _Parameters(Mapping[str, "torch.Tensor"]):
    """A model's parameters as they are now: post-processing after an update replaces some."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._model.get_parameter(name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._model.named_parameters())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _check_weights(weights: Mapping[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        check_memory(f"`{name}`", weight)  # SGLang's peers are told addresses


def target_open(_: Any, name: str, engine: int, engines: int) -> None:
    """What :class:`FabricWorker` answers by making its target."""
