"""Weight pushes within one process: real sources, targets and controller, called directly, so that
any call can be made to fail at will."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fabric_ray import TransferEngine
from fabric_ray.errors import WeightSyncError
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import EngineHooks, WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.calls import DIED, CallFailure

INT16 = DType.of("int16")
SHAPES = {"w": (8, 6), "norm": (6,)}
# Which parameters each trainer holds; both have the norm, so its pieces are shared out.
HELD = (("w", "norm"), ("norm",))
ROLLOUTS = 2


def values(name: str, version: int) -> torch.Tensor:
    """What a parameter holds at a version: no two elements or versions alike."""
    count = torch.Size(SHAPES[name]).numel()
    return (torch.arange(count, dtype=torch.int16) + 1000 * version).reshape(SHAPES[name])


def side(engines: int = 1) -> Side:
    """What the ranks of some engines hold, all engines the same."""
    ranks = engines * ROLLOUTS
    mesh = Mesh(tuple(range(ranks)), (engines, ROLLOUTS))

    def container(name: str, placement: Any) -> Container:
        leaf = Leaf(Tensor(name, SHAPES[name], INT16), mesh, (Replicate(), placement))
        return Container(name, INT16, leaf)

    return Side.of(ranks, [container("w", Shard(0)), container("norm", Replicate())])


def expected(rank: int, version: int) -> dict[str, torch.Tensor]:
    part = values("w", version).chunk(ROLLOUTS)[rank % ROLLOUTS]
    return {"w": part, "norm": values("norm", version)}


def is_version(weights: Any, rank: int, version: int) -> bool:
    return all(torch.equal(weights[name], t) for name, t in expected(rank, version).items())


class Module(torch.nn.Module):
    """A rollout's module, of rank 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = SHAPES["w"]
        self.w = torch.nn.Parameter(
            torch.zeros(rows // 2, columns, dtype=torch.int16), requires_grad=False
        )
        self.register_buffer("norm", torch.zeros(SHAPES["norm"], dtype=torch.int16))
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.norm.clone()
        self.inside.set()
        assert self.go_on.wait(20)
        return before, self.norm.clone()


class Fault(NamedTuple):
    """What goes wrong at one call: it isn't made, its answer is lost, or its callee dies first."""

    stage: str
    who: str
    how: str


class InProcess:
    """Objects of this process, called by name, where a controller has actors."""

    fault: Fault | None = None

    @cached_property
    def before(self) -> dict[str, Callable[[], object]]:
        """What happens first when a stage is asked for."""
        return {}

    @cached_property
    def dead(self) -> set[str]:
        return set()

    def kill(self, who: str) -> None:
        self.dead.add(who)

    def share(self, value: Any) -> Any:
        return value

    def ask(
        self,
        actors: Sequence[str],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        def answer(who: str, rest: tuple[Any, ...]) -> Any:
            try:
                return self._call(who, function, rest)
            except Exception as error:
                return CallFailure(str(error), DIED if who in self.dead else type(error).__name__)

        self.before.get(function.__name__, lambda: None)()
        # At the same time, as actors are: some wait for each other.
        with ThreadPoolExecutor(len(actors)) as pool:
            return list(pool.map(answer, actors, (tuple(rest) for _, *rest in args)))

    def _call(self, who: str, function: Callable[..., Any], extra: tuple[Any, ...]) -> Any:
        how = None
        if self.fault is not None and (function.__name__, who) == self.fault[:2]:
            how = self.fault.how
        if how == "dies":
            self.kill(who)
        if who in self.dead or how == "is not asked":
            raise ConnectionError("it did not answer")
        result = function(None, who, *extra)
        if how == "is not heard":
            raise ConnectionError("it did not answer")
        return result


class LocalSync(InProcess, WeightSync):
    """Trainers and rollouts of a small model, their controller and what goes wrong with them."""

    def __init__(
        self,
        *,
        staged: bool = True,
        timeout: float = 5.0,
        engines: int = 1,
        hooks: Callable[[int], EngineHooks] | None = None,
        into: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        trainers = [f"trainer {i}" for i in range(len(HELD))]
        rollouts = [f"rollout {i}" for i in range(engines * ROLLOUTS)]
        super().__init__(trainers, rollouts, timeout=timeout, calls=self, **options)
        self._staged, self._side, self._hooks = staged, side(engines), hooks
        self._into = into
        self.tensors = [{name: values(name, 0) for name in held} for held in HELD]
        actors = (*trainers, *rollouts)
        self.engines = {actor: TransferEngine(name=actor, transport="shm") for actor in actors}
        self.sources = [
            WeightSource(tensors, rank=i, name=who, engine=self.engines[who])
            for i, (who, tensors) in enumerate(zip(trainers, self.tensors, strict=True))
        ]
        self.targets = [self._target(who, rank=i) for i, who in enumerate(rollouts)]

    def another(self, rank: int) -> str:
        """A further rollout, which takes part in nothing yet; its number is the next."""
        who = f"rollout {len(self.targets)}"
        self.engines[who] = TransferEngine(name=who, transport="shm")
        self.targets.append(self._target(who, rank))
        return who

    def _target(self, who: str, rank: int) -> WeightTarget:
        engine = self.engines[who]
        hooks = self._hooks(rank) if self._hooks else None
        return WeightTarget(
            self._side,
            rank=rank,
            name=who,
            engine=engine,
            staged=self._staged,
            into=self._into(rank) if self._into else None,
            hooks=hooks,
        )

    def train(self, version: int) -> None:
        for tensors in self.tensors:
            for name, tensor in tensors.items():
                tensor.copy_(values(name, version))

    def kill(self, who: str) -> None:
        self.dead.add(who)
        self.engines[who].close()

    def close(self) -> None:
        for part in (*self.sources, *self.targets):
            part.close()
        for engine in self.engines.values():
            engine.close()

    def arriving(self, rank: int) -> dict[str, torch.Tensor]:
        """The memory that the next version is written to."""
        target = self.targets[rank]
        return target._staging[target._next].views(target._layout)

    def broken(self, named: set[str], before: int) -> Iterator[str]:
        """What of RS-3 doesn't hold after a push whose error names the rollouts ``named``."""
        for number, target in enumerate(self.targets):
            who = f"rollout {number}"
            if who in self.dead or number not in self.rollouts:
                continue
            if target.version not in (before, self.version):
                yield f"RS-3: {who} runs {target.version}, not {before} or {self.version}"
            if target.version != self.version and who not in named:
                yield f"RS-3: {who} runs {target.version}, not {self.version}, and isn't named"
            try:
                weights = target.weights
            except WeightSyncError:
                # In place, a push that failed leaves nothing that could be used by mistake.
                if target._staged or not named:
                    yield f"RS-3: {who} has nothing to use"
                continue
            assert target.version is not None
            for name, want in expected(target.rank, target.version).items():
                if not torch.equal(weights[name], want):
                    yield f"RS-3: `{name}` at {who} is not that of version {target.version}"
