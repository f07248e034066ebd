"""Weight pushes below Ray: real sources, targets and controller, whose calls go over pipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fabric_ray.errors import WeightSyncError
from fabric_ray.plan import Concat, Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor
from fabric_ray.weights import WeightSource, WeightSync, WeightTarget
from fabric_ray.weights.calls import CallFailure
from tests.chaos.draw import ROLLOUTS, TRAINERS, Round
from tests.chaos.judge import DEATH, MARGIN
from tests.chaos.pattern import differs, pattern
from tests.chaos.process_group import Gone, ProcessGroup, Stuck
from tests.chaos.worker import Worker

# A pool of threads that torch keeps for itself would look like a leak.
torch.set_num_threads(1)
INT16 = DType.of("int16")
SHAPES = {"q": (64, 96), "k": (32, 96), "norm": (96,), "big": (1024, 512)}
# Which parameters each trainer holds; both have the norm, so its pieces are shared out.
_HELD = (("q", "norm"), ("k", "norm", "big"))
TIMEOUT = 3.0


def values(name: str, seed: int, version: int) -> torch.Tensor:
    """What a parameter holds at a version."""
    rows = SHAPES[name]
    count = 2 * torch.Size(rows).numel()
    return torch.from_numpy(pattern(count, name, seed, version)).view(torch.int16).reshape(rows)


def side(replicas: bool) -> Side:
    """What rollouts hold: q and k in one, cut by rows; the norm everywhere; the rest cut. As
    replicas they hold everything, and relay it to each other."""
    mesh = Mesh.line(range(len(ROLLOUTS)))
    cut = Replicate() if replicas else Shard(0)

    def leaf(name: str, placement: Any) -> Leaf:
        return Leaf(Tensor(name, SHAPES[name], INT16), mesh, (placement,))

    qk = Concat(0, (leaf("q", cut), leaf("k", cut)))
    containers = [
        Container("qk", INT16, qk),
        Container("norm", INT16, leaf("norm", Replicate())),
        Container("big", INT16, leaf("big", cut)),
    ]
    return Side.of(len(ROLLOUTS), containers)


def expected(rank: int, seed: int, version: int, replicas: bool) -> dict[str, torch.Tensor]:
    parts, at = (1, 0) if replicas else (len(ROLLOUTS), rank)
    q, k, big = (values(n, seed, version).chunk(parts)[at] for n in ("q", "k", "big"))
    return {"qk": torch.cat([q, k]), "norm": values("norm", seed, version), "big": big}


# In the processes.


def join(worker: Worker, seed: int, in_place: bool, replicas: bool) -> None:
    """Gives a process its part, unless it has one."""
    if worker.parts:
        return
    if worker.rank in TRAINERS:
        at = TRAINERS.index(worker.rank)
        tensors = {name: values(name, seed, 0).clone() for name in _HELD[at]}
        part: Any = WeightSource(tensors, rank=at, engine=worker.engine)
        part.tensors = tensors
    else:
        at = ROLLOUTS.index(worker.rank)
        part = WeightTarget(side(replicas), rank=at, engine=worker.engine, staged=not in_place)
    worker.parts.append(part)


def train(worker: Worker, seed: int, version: int) -> None:
    if worker.rank in TRAINERS:
        for name, tensor in worker.parts[0].tensors.items():
            tensor.copy_(values(name, seed, version))


class Held(NamedTuple):
    version: int | None
    torn: bool
    """In place, and a push has failed: the weights can't be used."""
    wrong: tuple[str, ...]


def held(worker: Worker, seed: int) -> Held:
    """What a rollout runs, every byte looked at."""
    target = worker.parts[0]
    try:
        weights = target.weights
    except WeightSyncError:
        return Held(target.version, target.version is not None, ())
    wrong = []
    replicas = target.side == side(True)
    for name, want in expected(target.rank, seed, target.version, replicas).items():
        found = weights[name].contiguous().view(torch.uint8).numpy().ravel()
        if what := differs(found, want.contiguous().view(torch.uint8).numpy().ravel()):
            wrong.append(f"RS-3: `{name}` of version {target.version} at w{worker.rank}: {what}")
    return Held(target.version, False, tuple(wrong))


def call(worker: Worker, function: Callable[..., Any], *args: Any) -> Any:
    return function(None, *args)


# In the controller.


class Pipes(NamedTuple):
    """Processes where a controller has actors."""

    group: ProcessGroup

    def share(self, value: Any) -> Any:
        return value

    def ask(
        self,
        actors: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        timeout: float,
    ) -> list[Any]:
        asked = {actor: (function, *each) for actor, each in zip(actors, args, strict=True)}
        said = self.group.ask(call, asked, timeout + 1.0)
        answers = (said[actor] for actor in actors)
        return [CallFailure(_cause(a)) if isinstance(a, Exception) else a for a in answers]


def controller(group: ProcessGroup, *, digest: bool, replicas: bool) -> WeightSync:
    return WeightSync(
        TRAINERS, ROLLOUTS, digest=digest, relay=replicas, timeout=TIMEOUT, calls=Pipes(group)
    )


def _cause(error: Exception) -> str:
    if isinstance(error, Stuck):
        return "it did not answer"
    return str(error) if isinstance(error, Gone) else f"{type(error).__name__}: {error}"


class Pushed(NamedTuple):
    error: Exception | None
    version: int
    """That was to be reached."""
    before: int
    reached: int
    began: float
    ended: float
    in_place: bool


def push(sync: WeightSync, version: int, before: int, in_place: bool) -> Pushed:
    began = time.monotonic()
    error: Exception | None = None
    try:
        sync.push(version)
    except Exception as e:
        error = e
    reached = max(sync.version, before)
    return Pushed(error, version, before, reached, began, time.monotonic(), in_place)


def judge(
    stage: Round, pushed: Pushed, found: dict[int, Any], killed: dict[int, float]
) -> Iterator[str]:
    """RS-3: all at one version, each byte of it; who is not is named."""
    error, version, reached = pushed.error, pushed.version, pushed.reached
    if error is not None and not isinstance(error, WeightSyncError):
        yield f"error: the push of {version} raised {type(error).__name__}: {error}"
        return
    took = pushed.ended - pushed.began
    # Two stages at most run into their timeouts, and an abort may wait for silence.
    limit = 2 * (TIMEOUT + 1.0) + 2.0 + MARGIN
    if took > limit:
        yield f"IC-4: the push of {version} took {took:.2f} s, {limit:.2f} s were allowed: {error}"
    for rank, when in killed.items():
        # An abort waits for silence as long as a death may take to be told.
        if error is not None and pushed.ended - max(when, pushed.began) > 2 * DEATH + MARGIN:
            late = pushed.ended - max(when, pushed.began)
            yield f"RS-4: the push of {version} ended {late:.2f} s after w{rank} died: {error}"
    if error is not None and not stage.faults:
        yield f"error: the push of {version} failed though nothing went wrong: {error}"
    failed = error.failed if error is not None else {}
    if error is None and reached != version:
        yield f"RS-3: push({version}) returned, but the version is {reached}"
    if error is not None and not failed:
        yield f"RS-3: the push of {version} failed and names no rank: {error}"
    for at, rank in enumerate(ROLLOUTS):
        each = found.get(rank)
        if not isinstance(each, Held):
            continue
        yield from each.wrong
        if each.version is None or each.torn:
            # Nothing that could be used by mistake: RS-1. In place, a failed push leaves that.
            if error is None or (each.torn and not pushed.in_place):
                yield f"RS-3: w{rank} has nothing to use after push({version}): {error}"
            continue
        if each.version not in (pushed.before, version):
            yield f"RS-3: w{rank} runs {each.version}, neither {pushed.before} nor {version}"
        if each.version != reached and f"rollout {at}" not in failed:
            yield f"RS-3: w{rank} runs {each.version}, not {reached}, and is not named: {error}"
