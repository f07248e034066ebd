"""The trainers' half of a push from miles: the class shape of its point-to-point updater.

In a module of yours, which ``--custom-megatron-init-path`` names a function of::

    def init(args):
        fabric_ray.integrations.miles.install(make_source)

miles then pushes by :class:`UpdateWeightFabric` where it is told
``--update-weight-transfer-mode p2p``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.integrations import MissingFramework
from fabric_ray.integrations.collective_calls import CollectiveCalls
from fabric_ray.integrations.sglang import target_open
from fabric_ray.integrations.worker_rpc import WorkerClient
from fabric_ray.weights import PushReport, WeightSync
from fabric_ray.weights.calls import CallFailure

logger = logging.getLogger(__name__)


def install(source: Callable[[UpdateWeightFabric], object], **options: Any) -> None:
    """Has miles' actors make :class:`UpdateWeightFabric` where they would make their own.

    Args:
        source: see there, as ``options``.

    Raises:
        MissingFramework: this isn't where miles' trainers run.
    """
    try:
        actor: Any = import_module("miles.backends.megatron_utils.actor")
        groups: Any = import_module("miles.utils.distributed_utils")
    except ImportError as error:
        raise MissingFramework(
            f"miles can't be imported ({error}); call this where its trainers run, from the "
            "function that --custom-megatron-init-path names"
        ) from error
    actor.UpdateWeightP2P = partial(
        UpdateWeightFabric, source=source, group=groups.get_gloo_group, options=options
    )


class UpdateWeightFabric:
    """Pushes a version to all engines, or to none.

    Each trainer rank has one, and all of them make each call together. The calls on engines are
    those of miles' own updater, in its order. An engine goes on with the version before if a push
    fails, and stands still if it can't be said to have either whole.

    Args:
        args: of miles; ``rollout_num_gpus_per_engine`` and ``pause_generation_mode`` are read.
        model, weights_getter, model_name, quantization_config: what ``source`` may make use of.
        source: makes this rank's ``WeightSource`` or ``ReplicaSource``.
        group: gives a process group of all trainers that carries host memory; by default, theirs.
        options: of :class:`fabric_ray.weights.WeightSync`.

    Raises:
        InvalidArgument: adapters are trained, not weights.
    """

    def __init__(
        self,
        args: Any,
        model: Sequence[Any],
        weights_getter: Callable[[], Mapping[str, Any]],
        *,
        model_name: str,
        quantization_config: Mapping[str, Any] | None,
        is_lora: bool = False,
        source: Callable[[UpdateWeightFabric], object],
        group: Callable[[], Any] = lambda: None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if is_lora:
            raise InvalidArgument("LoRA adapters aren't pushed; train weights, or use broadcast")
        self.args, self.model, self.weights_getter = args, model, weights_getter
        self.model_name, self.quantization_config = model_name, quantization_config
        self.weight_version = 0
        """The version that was decided last."""
        self.report: PushReport | None = None
        """Of the last push, on rank 0."""
        self._options = {"timeout": 60.0, **(options or {})}
        self._timeout = float(self._options["timeout"])
        self._collective = CollectiveCalls(group(), timeout=self._timeout)
        self.rank = self._collective.rank
        self._source = source(self)
        self._engines: Sequence[Any] = ()
        self._counts: Sequence[int] = ()
        self._workers: list[WorkerClient] = []
        self._sync: WeightSync | None = None
        self._torn: set[Any] = set()
        """Engines that have no version whole, and stand still until they get one."""

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
    ) -> None:
        """Asks engines where their workers are, and plans; again whenever there are others.

        Args:
            rollout_engines: Ray actors with the methods of miles' ``SGLangEngine``.
            rollout_engine_lock, engine_gpu_offsets: not needed; several may write at once.
            engine_gpu_counts: workers of each engine.

        Raises:
            WeightSyncError: an engine or a worker didn't answer; it is named.
            FabricError: layouts don't fit together, or a worker isn't of fabric-ray.
        """
        per_engine = self.args.rollout_num_gpus_per_engine
        self._engines = list(rollout_engines)
        self._counts = list(engine_gpu_counts or [per_engine] * len(self._engines))
        self.weight_version = self._collective.run(self._connect)

    def update_weights(self) -> None:
        """Pushes the next version.

        Raises:
            WeightSyncError: on every rank; ``failed`` maps engines to causes.
        """
        try:
            self._collective.run(self._push)
        finally:
            self.weight_version = self._collective.version

    def _connect(self) -> int:
        self._sync = None
        self._torn.intersection_update(self._engines)
        if self._packs:
            self._pause()  # what is packed fits no layout
        refs = {
            f"rank {rank} of engine {i}": engine.get_remote_instance_transfer_engine_info.remote(
                rank=rank
            )
            for i, engine in enumerate(self._engines)
            for rank in range(self._counts[i])
        }
        infos, failed = self._get(refs)
        _raise(failed, "say where its worker is")
        self._workers = [WorkerClient(session_id) for session_id, _ in infos.values()]
        places = [(i, len(self._counts)) for i, n in enumerate(self._counts) for _ in range(n)]
        args = [("", *place) for place in places]
        answers = self._collective.ask(self._workers, target_open, args, self._timeout)
        asked = dict(zip(refs, answers, strict=True))
        refused = {name: a.cause for name, a in asked.items() if isinstance(a, CallFailure)}
        _raise(refused, "take its place")
        trainers = range(self._collective.size)
        sync = WeightSync(trainers, self._workers, calls=self._collective, **self._options)
        sync.connect()
        self._sync = sync
        return self._collective.version

    def _push(self) -> None:
        if self._sync is None:
            raise InvalidArgument("no engines are connected; call connect_rollout_engines first")
        version = self._collective.version + 1
        self._pause()
        try:
            self.report = self._sync.push(version)
        except Exception as error:
            decided = self._sync.version == version
            if decided:
                self._collective.version = version
                self._torn = {e for i, e in enumerate(self._engines) if self._missed(i, error)}
            self._recover(version if decided else None)
            raise
        self._collective.version, self._torn = version, set()
        _raise(self._go_on(version), "go on")

    @property
    def _packs(self) -> bool:
        """Whether SGLang packs weights, and has to be asked to unpack them to be loaded."""
        return (self.quantization_config or {}).get("quant_method") == "compressed-tensors"

    def _pause(self) -> None:
        try:
            self._stop()
        except Exception:
            self._recover(None)
            raise

    def _stop(self) -> None:
        everyone, mode = range(len(self._engines)), self.args.pause_generation_mode
        _raise(self._tell(everyone, "pause_generation", mode=mode), "pause")
        if mode != "in_place":
            _raise(self._tell(everyone, "flush_cache"), "flush its cache")
        else:
            # RS-3: SGLang answers that before its schedulers have stopped, and this after.
            _raise(self._tell(everyone, "post_process_weights"), "come to rest")
        if self._packs:
            # SGLang unpacks by a change of shapes, and can't pack the same again.
            self._torn.update(self._engines)
            _raise(self._process(everyone, before=True), "unpack its weights")

    def _recover(self, version: int | None) -> None:
        """Continues the engines that have a version whole after a push that failed."""
        failed = self._go_on(version)
        torn = {f"engine {i}" for i, engine in enumerate(self._engines) if engine in self._torn}
        if still := torn | failed.keys():
            logger.error("%s stand still after a push that failed: %s", sorted(still), failed)

    def _go_on(self, version: int | None) -> dict[str, str]:
        """Continues engines with the new version, if any; those that can't stay paused."""
        failed: dict[str, str] = {}

        def left() -> list[int]:
            whole = [i for i, engine in enumerate(self._engines) if engine not in self._torn]
            return [i for i in whole if f"engine {i}" not in failed]

        if version is not None:
            failed |= self._tell(left(), "update_weight_version", weight_version=str(version))
            failed |= self._process(left(), before=False)
            self._torn |= {e for i, e in enumerate(self._engines) if f"engine {i}" in failed}
        return failed | self._tell(left(), "continue_generation")

    def _process(self, engines: Iterable[int], *, before: bool) -> dict[str, str]:
        return self._tell(
            engines,
            "post_process_weights",
            restore_weights_before_load=before,
            post_process_quantization=not before,
            post_load_weights=not before,
        )

    def _missed(self, engine: int, error: Exception) -> bool:
        first = sum(self._counts[:engine])
        failed = getattr(error, "fields", {}).get("failed", {})
        return any(f"rollout {first + rank}" in failed for rank in range(self._counts[engine]))

    def _tell(self, engines: Iterable[int], call: str, **arguments: Any) -> dict[str, str]:
        """Calls engines; returns causes of failed calls by engine."""
        refs = {f"engine {i}": getattr(self._engines[i], call).remote(**arguments) for i in engines}
        failed = self._get(refs)[1]
        return {name: f"{call}: {cause}" for name, cause in failed.items()}

    def _get(self, refs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        import ray

        from fabric_ray.runtime.causes import cause_of

        self._collective.working("a call of the engines", self._timeout)
        deadline = time.monotonic() + self._timeout
        answers, failed = dict[str, Any](), dict[str, str]()
        for name, ref in refs.items():
            try:
                answers[name] = ray.get(ref, timeout=max(0.1, deadline - time.monotonic()))
            except ray.exceptions.RayError as error:
                failed[name] = cause_of(error)
        return answers, failed


def _raise(failed: Mapping[str, str], what: str) -> None:
    if failed:
        causes = "; ".join(f"{name}: {cause}" for name, cause in failed.items())
        raise WeightSyncError(
            f"{' and '.join(failed)} did not {what}: {causes}", failed=dict(failed)
        )
