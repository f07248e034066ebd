"""A weight push from beginning to end: train, push, check every byte, again and again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray

from fabric_ray.demo.cluster import cluster, make_output, named_failures
from fabric_ray.demo.options import Checked, Options, Outcome, Push
from fabric_ray.demo.rollout import Rollout
from fabric_ray.demo.timeline import draw
from fabric_ray.demo.trainer import Trainer
from fabric_ray.errors import given_path
from fabric_ray.models import ModelConfig, demo_config, read_config
from fabric_ray.weights import WeightSync
from fabric_ray.weights.families import target_side
from fabric_ray.weights.report import Span

Tell = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""

_TIMEOUT = 600.0
_FLOOR_REPEATS = 3


def run(options: Options, tell: Tell = lambda *_: None) -> Outcome:
    """Runs the demo on Ray: on a cluster if ``options.address`` or ``RAY_ADDRESS`` names one.

    The reference checkpoint lies under ``options.output`` while it is needed; actors on several
    hosts must share that directory.

    Raises:
        FabricError: whatever went wrong, by name.
    """
    options.check()
    config = _config(options)
    # Bad sizes end here, before any process is started.
    target_side(config, tp=options.rollouts, ep=options.ep)
    make_output(options.output)
    with cluster(options.address), _scratch(options.output) as scratch, named_failures():
        return _Run(options, config, scratch, tell).outcome()


class _Run:
    def __init__(self, options: Options, config: ModelConfig, scratch: Path, tell: Tell) -> None:
        self._options, self._config, self._scratch = options, config, scratch
        # A laptop's cores are shared by all trainers on it.
        self._threads = max(1, min(4, (os.cpu_count() or 1) // options.trainers))
        self._tell, self._done, self._steps = tell, 0, 3 + 4 * options.pushes
        self._spans: list[Span] = []
        self._trainers: list[Any] = []
        self._rollouts: list[Any] = []

    def outcome(self) -> Outcome:
        options = self._options
        try:
            with self._stage("start"):
                self._start()
            sync = WeightSync(
                self._trainers, self._rollouts, digest=options.digest, timeout=_TIMEOUT
            )
            with self._stage("connect"):
                connected = sync.connect()
            sent = dict.fromkeys(range(options.trainers), 0)
            for link in sync.plan.links():
                sent[link.src] += link.nbytes
            pushes = tuple(
                self._push(sync, version, sent) for version in range(1, options.pushes + 1)
            )
        finally:
            self._stop()
        figure = options.output / "timeline.png"
        draw(figure, tuple(self._spans), pushes)
        return Outcome(
            model=self._config.kind,
            parameters=self._config.parameter_count,
            trainers=options.trainers,
            rollouts=options.rollouts,
            threads=self._threads,
            connect=connected,
            explanation=sync.explain(),
            pushes=pushes,
            spans=tuple(self._spans),
            timeline=str(figure),
        )

    def _start(self) -> None:
        options, config = self._options, self._config
        # No CPUs are asked for: the demo has to fit on any machine.
        trainer = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(Trainer)
        rollout = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(Rollout)
        self._trainers = [
            trainer.remote(
                rank,
                options.trainers,
                config,
                transport=options.transport,
                threads=self._threads,
                seed=options.seed,
            )
            for rank in range(options.trainers)
        ]
        self._rollouts = [
            rollout.remote(
                rank,
                options.rollouts,
                options.ep,
                config,
                transport=options.transport,
                staged=options.staged,
            )
            for rank in range(options.rollouts)
        ]
        store = ray.get(self._trainers[0].serve.remote(), timeout=_TIMEOUT)
        checkpoint = options.checkpoint.resolve() if options.checkpoint else None
        loads = [actor.load.remote(store, checkpoint) for actor in self._trainers]
        ready = [actor.__ray_ready__.remote() for actor in self._rollouts]
        ray.get([*loads, *ready], timeout=_TIMEOUT)

    def _push(self, sync: WeightSync, version: int, sent: dict[int, int]) -> Push:
        with self._stage(f"train for version {version}"):
            losses = self._each(self._trainers, "train", self._options.steps)[0]
        with self._stage(f"push version {version}"):
            report = sync.push(version)
        with self._stage("floor"):
            refs = [
                actor.floor.remote(sent[rank], _FLOOR_REPEATS)
                for rank, actor in enumerate(self._trainers)
            ]
            floor = max(ray.get(refs, timeout=_TIMEOUT))
        with self._stage(f"check version {version}"):
            checked = self._check(version)
        return Push(report, floor, tuple(losses), checked)

    def _check(self, version: int) -> tuple[Checked, ...]:
        reference = (self._scratch / f"v{version}").resolve()
        self._each(self._trainers, "export", reference)
        checked = self._each(self._rollouts, "check", reference)
        shutil.rmtree(reference)
        return tuple(checked)

    def _each(self, actors: list[Any], method: str, *args: Any) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in actors]
        results: list[Any] = ray.get(refs, timeout=_TIMEOUT)
        return results

    def _stop(self) -> None:
        for actor in (*self._rollouts, *self._trainers):
            ray.kill(actor)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._tell(name, self._done, self._steps)
        start = time.time()
        yield
        self._spans.append(Span("driver", name.split()[0], start, time.time()))
        self._done += 1
        self._tell(name, self._done, self._steps)


def _config(options: Options) -> ModelConfig:
    if options.checkpoint is not None:
        return read_config(options.checkpoint)
    return demo_config(
        parameters=options.parameters, kind=options.kind, tp=options.rollouts, ep=options.ep
    )


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    with given_path(output):
        directory = Path(mkdtemp(prefix="reference-", dir=output))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
