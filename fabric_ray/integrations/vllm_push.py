"""The trainers' end of sharded pushes to vLLM: rank 0 leads, and every rank writes its shards."""

from __future__ import annotations

import glob
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, WeightSyncError
from fabric_ray.integrations import framework
from fabric_ray.integrations.collective_calls import CollectiveCalls
from fabric_ray.integrations.vllm_control import (
    UpdatePause,
    call_client,
    call_seconds,
    control_of,
    start_update,
    stays_paused,
    version_fields,
)
from fabric_ray.integrations.vllm_hello import MORE_S, Hellos, own_host
from fabric_ray.integrations.vllm_recorded import target_side
from fabric_ray.integrations.vllm_reload import untied
from fabric_ray.integrations.vllm_sharded import WorkerNeeds, target_needs, target_open
from fabric_ray.integrations.worker_rpc import WorkerClient
from fabric_ray.plan import DType, ParamMeta, Side, Tensor
from fabric_ray.plan.leaving import tensor_names
from fabric_ray.weights import PushReport, WeightSource, WeightSync, phases
from fabric_ray.weights.calls import CallFailure
from fabric_ray.weights.casts import found_casts
from fabric_ray.weights.modules import named
from fabric_ray.weights.sides import source_side
from fabric_ray.weights.stacked import checkpoint_tensors

if TYPE_CHECKING:
    import torch

    Shards = WeightSource | torch.nn.Module

logger = logging.getLogger(__name__)

_NUMBERS = count()
_EMPTY = Side.of(1, ())
_NAMED = 3
# Types of devices whose shards are sent.
_SENT = ("cpu", "cuda")


def shards_of(source: Any, rank: int) -> Shards | None:
    """What has this rank's shards, if a source of vLLM's interface, or what stands for one, has
    them in memory of the host or of a CUDA GPU.

    Args:
        rank: of this trainer.
    """
    import torch

    if isinstance(source, WeightSource):
        return source
    # A subclass may give other tensors than its module's.
    module = source._module if type(source) is _module_source() else source
    if not isinstance(module, torch.nn.Module):
        return None
    if rank and not has_group():
        return None  # replicas: rank 0 has all shards
    tensors = named(module).tensors
    if away := [name for name, tensor in tensors.items() if tensor.device.type not in _SENT]:
        logger.warning(
            "rank 0 streams whole tensors: `%s` is on %s, and shards are sent from host memory and "
            "CUDA GPUs",
            away[0],
            tensors[away[0]].device,
        )
        return None
    return module


def refuse_shards(error: Exception, timeout: float) -> None:
    """Has the other ranks fail with this one, which they wait for."""
    if has_group():
        calls = CollectiveCalls(timeout=timeout)
        with suppress(Exception):
            calls.run(lambda: None, failure=error)
        calls.close()


def full_source(source: Any) -> Any:
    """The source of vLLM's interface that gathers a module's tensors, for a module."""
    import torch

    return _module_source()(source) if isinstance(source, torch.nn.Module) else source


class ShardedPush:
    """A trainer rank's end. All ranks make each call together.

    Args:
        info: how the rank opens its end, a ``FabricTrainerInitInfo``.
        client: of vLLM; rank 0 uses it.
        shards: of this rank.

    Raises:
        InvalidArgument: a parameter can't be pushed, or vLLM's model can't load it.
        WeightSyncError: a worker or a trainer failed; the message names it.
    """

    def __init__(self, info: Any, client: Any, shards: Shards) -> None:
        self._info, self._client = info, client
        self.report: PushReport | None = None
        """Of the last push, on rank 0."""
        self._sync: WeightSync | None = None
        # Not by a cycle, which would keep the engine's files until it is collected.
        self._calls = _Calls(info.timeout, weakref.proxy(self))
        self._engine: TransferEngine | None = None
        self._own: WeightSource | None = None
        failure: Exception | None = None
        try:
            self._open(shards)
        except Exception as error:
            failure = error  # the other ranks wait for this one
        try:
            self._calls.run(self._connect, failure=failure)
        except BaseException as error:
            self.close()
            if failure is not None:
                raise failure from error
            raise

    def send(self, weight_version: str | None = None) -> None:
        """Pushes the next version, and has all workers put it into use.

        Args:
            weight_version: what vLLM and its KV connector call it; rank 0's is taken.

        Raises:
            InvalidArgument: on rank 0: vLLM can't take ``weight_version``.
            WeightSyncError: on every rank; ``failed`` maps trainers and workers to causes.
        """
        self._calls.run(lambda: self._lead(weight_version))

    def release(self) -> None:
        """Lets this rank's parameters move until the next push."""
        self._source.release()

    def close(self) -> None:
        """Releases the shards, and the connections among trainers."""
        self._calls.close()
        if self._own is not None:
            self._own.close()
        if self._engine is not None:
            self._engine.close()

    def _open(self, shards: Shards) -> None:
        name = f"vllm-{next(_NUMBERS)}"
        if self._info.rank != self._calls.rank:
            raise InvalidArgument(
                f"rank is {self._info.rank}, expected {self._calls.rank}; pass "
                "torch.distributed.get_rank(), which the shards are numbered by"
            )
        self._engine = engine = TransferEngine(**self._info.engine)
        if isinstance(shards, WeightSource):
            self._source = shards
        else:
            self._own = WeightSource(shards, rank=self._info.rank, name=name, engine=engine)
            self._source = self._own
        self._calls.name = self._source.name

    def _connect(self) -> None:
        """Tells workers what there is, asks what they need of it, and plans."""
        assert self._engine is not None
        info = self._info
        self._servers = control_of(self._client, self._info.timeout)
        self._servers.paused()
        trainers = range(self._calls.size)
        metas = self._ask(trainers, phases.source_meta, [(self._source.name,)] * len(trainers))
        reports = [report for _, report, _ in metas]
        given = self._source.side
        tensors = checkpoint_tensors(source_side(reports, lambda: _side(given), _EMPTY))
        workers = self._workers(
            {
                "trainer": self._engine.address.to_bytes().hex(),
                "timeout": info.timeout,
                "engine": info.engine,
                "leave": list(info.leave),
                "tensors": [[t.name, t.dtype.name, list(t.shape)] for t in tensors.values()],
                "host": own_host(self._client),
            }
        )
        answers = self._ask(workers, target_needs, [("",)] * len(workers))
        needs: list[WorkerNeeds] = list(answers)
        _check_ties(reports, {pair for each in needs for pair in each.tied})
        boxes = [each.needs for each in needs]
        target = target_side(boxes, _as_taken(tensors, needs))
        source = source_side(reports, lambda: _side(given), target)
        formats = found_casts(source, target) if self._source.is_on_one_device else {}
        if not formats:  # workers cast what they must
            target = target_side(boxes, tensors)
        places = [("", target, rank) for rank in range(len(workers))]
        self._ask(workers, target_open, places)
        self._sync = WeightSync(
            trainers,
            workers,
            name=self._source.name,
            leave=_left(source, target),
            formats=formats,
            digest=True,
            timeout=info.timeout,
            calls=self._calls,
        )
        self._sync.connect()

    def _workers(self, told: dict[str, Any]) -> list[WorkerClient]:
        """Opens the workers' ends; returns what calls them."""
        assert self._engine is not None
        self._hellos = Hellos(self._engine, self._info.workers)
        call: Future[None] = Future()
        self._call_client("init_weight_transfer_engine", told)
        call.set_result(None)
        self._calls.working("the wait for vLLM's workers", self._info.timeout)
        said, error = self._hellos.collect(0, call, self._info.timeout, what="shards")
        if error is not None:
            raise error
        self._hellos.refuse_more(0, wait=MORE_S)
        return [WorkerClient(text.decode()) for text in said]

    def _lead(self, weight_version: str | None) -> None:
        if self._sync is None:
            raise InvalidArgument("the workers are not connected; call trainer_init again")
        self._version_fields = version_fields(self._client, weight_version)
        self._hellos.refuse_more(0)  # it may have come late
        self._pause = UpdatePause(self._servers, self._info.pause, self._info.timeout)
        self._flips = False
        try:
            self.report = self._sync.push()
            self._announce("vLLM's reset of its caches")
            self._pause.discard()
        except BaseException as error:
            if not self._flips:
                self._pause.cancel()
                raise
            if not isinstance(error, Exception):
                raise
            raise stays_paused(error, self._sync.version, self._servers) from error
        self._calls.version = self._sync.version
        self._pause.end()

    def _quiesce(self) -> None:
        """All bytes are confirmed: the servers stop until their workers have flipped."""
        self._announce("vLLM's pause")
        try:
            self._pause.begin()
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"vLLM did not pause: {error}") from error

    def _commit(self, session: str, version: int) -> None:
        """Has all workers put a version into use, between vLLM's steps."""
        self._flips = True
        self._announce("vLLM's start_weight_update")
        start_update(self._client, self._info.timeout)
        update = {"update": version, "session": session, **self._version_fields}
        self._call_client("update_weights", update)
        self._call_client("finish_weight_update", *self._version_fields.values())

    def _call_client(self, name: str, *args: Any) -> None:
        self._announce(f"vLLM's {name}")
        call_client(self._client, self._info.timeout, name, *args)

    def _announce(self, what: str) -> None:
        """Tells the other ranks that vLLM is called."""
        self._calls.working(what, call_seconds(self._client, self._info.timeout))

    def _ask(
        self, actors: Sequence[Any], function: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        answers = self._calls.ask(actors, function, args, self._info.timeout)
        for number, answer in enumerate(answers):
            if isinstance(answer, CallFailure):
                role = "trainer" if isinstance(actors[0], int) else "worker"
                raise WeightSyncError(
                    f"{role} {number} did not connect: {answer.cause}",
                    failed={f"{role} {number}": answer.cause},
                )
        return answers


class _Calls(CollectiveCalls):
    """Calls trainers and workers. Versions change by vLLM's own calls, which reach all workers
    between two steps of their model (RS-3)."""

    def __init__(self, timeout: float, push: ShardedPush) -> None:
        super().__init__(timeout=timeout)
        self._push = push

    def ask(
        self,
        actors: Sequence[Any],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        failed: Exception | None = None
        if function is phases.target_quiesce and args[0][3] == "commit":
            self._push._quiesce()
        if function is phases.target_commit:
            _, session, version = args[0]
            try:
                self._push._commit(session, version)
            except Exception as error:
                failed = error
        answers = super().ask(actors, function, args, timeout)
        if failed is None:
            return answers
        # A worker that has the version may stand beside one that has not.
        causes = (a.cause if isinstance(a, CallFailure) else "it is in use here" for a in answers)
        return [CallFailure(f"{cause}; vLLM's answer: {failed}", error=failed) for cause in causes]


def has_group() -> bool:
    """Whether there may be other trainers, by torch.distributed."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _module_source() -> Any:
    return framework("vllm.distributed.weight_transfer", "vllm").ModuleSource


def _side(given: Side | None) -> Side:
    if given is None:
        raise InvalidArgument("trainer 0 has no side, and others have; give all the same")
    return given


def _as_taken(tensors: Mapping[str, Tensor], needs: Sequence[WorkerNeeds]) -> Mapping[str, Tensor]:
    """The checkpoint's tensors, in bfloat16 where all workers that need one take no more of it."""
    rounded = {name for each in needs for name in each.rounded}
    for each in needs:
        rounded -= {need.tensor for need in each.needs} - set(each.rounded)
    return {
        name: Tensor(name, tensor.shape, DType.of("bfloat16")) if name in rounded else tensor
        for name, tensor in tensors.items()
    }


def _check_ties(reports: Sequence[list[ParamMeta] | bytes], tied: Set[tuple[str, str]]) -> None:
    """
    Args:
        reports: of the trainers, by rank; those that were given a side know of no ties.
        tied: in vLLM's model.

    Raises:
        InvalidArgument: tensors are tied in vLLM's model alone (RS-1).
    """
    for report in reports if tied else ():
        metas = [] if isinstance(report, bytes) else report
        first = {meta.name: meta.same_as or meta.name for meta in metas}
        for pair in sorted(tied):
            a, b = (first.get(name) for name in pair)
            if a != b or isinstance(report, bytes):
                raise InvalidArgument(untied(*pair))


def _left(source: Side, target: Side) -> tuple[str, ...]:
    """Patterns of tensors that vLLM's model has no use for, as its loader says."""
    needed = set(tensor_names(target))
    left = [name for name in dict.fromkeys(tensor_names(source)) if name not in needed]
    if left:
        few = ", ".join(f"`{name}`" for name in left[:_NAMED])
        logger.warning("vLLM's model has no use for %d tensors, such as %s", len(left), few)
    return tuple(map(glob.escape, left))
