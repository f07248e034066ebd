"""The demo of weight pushes: train, push, check every byte, again and again."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import msgspec
import ray
from rich.console import Console

from fabric_ray.demo.actors import Checked, Rollout, Trainer
from fabric_ray.demo.common import cluster, draw_bars, make_output, plain
from fabric_ray.errors import InvalidArgument, given_path
from fabric_ray.models import ModelConfig, demo_config, read_config
from fabric_ray.models.kinds import Kind
from fabric_ray.weights import WeightSync
from fabric_ray.weights.families import target_side
from fabric_ray.weights.report import ConnectReport, LinkReport, PushReport, Span

Tell = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""

_TIMEOUT = 600.0
_FLOOR_REPEATS = 3
# A terminal of 80 columns holds this many versions, a screen this many links.
_COLUMNS = 5
_LINKS = 16


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``fabric-ray demo weights --help``."""

    trainers: int = 2
    rollouts: int = 2
    ep: int = 1
    checkpoint: Path | None = None
    kind: Kind = "llama"
    parameters: float = 300e6
    pushes: int = 4
    steps: int = 1
    transport: Literal["auto", "shm", "tcp"] = "auto"
    staged: bool = True
    digest: bool = False
    output: Path = Path("demo-output")
    address: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises InvalidArgument for what can't be run, before anything is started."""
        for name in ("trainers", "rollouts", "ep", "pushes"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; give at least 1")
        if not math.isfinite(self.parameters):
            raise InvalidArgument(f"parameters is {self.parameters}; give a number such as 300e6")
        if self.steps < 0:
            raise InvalidArgument(f"steps is {self.steps}; give 0 or more")
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            raise InvalidArgument(
                f"{self.checkpoint} is not a directory; give one that holds config.json and "
                "*.safetensors"
            )


class Push(msgspec.Struct, frozen=True):
    """One version on its way, and what it is measured against."""

    report: PushReport
    floor_seconds: float
    """A plain copy of the same bytes by the same number of threads, right after the push."""
    losses: tuple[float, ...]
    """Of the training steps before it, averaged over the trainers."""
    checked: tuple[Checked, ...]

    @property
    def verified(self) -> bool:
        return all(not c.wrong and c.changed for c in self.checked)


class Outcome(msgspec.Struct, frozen=True):
    """All that a demo found."""

    model: str
    parameters: int
    trainers: int
    rollouts: int
    threads: int
    """Copying threads of each trainer."""
    connect: ConnectReport
    explanation: str
    pushes: tuple[Push, ...]
    spans: tuple[Span, ...]
    """The driver's."""
    timeline: str

    @property
    def verified(self) -> bool:
        return all(push.verified for push in self.pushes)

    @property
    def links(self) -> tuple[LinkReport, ...]:
        return self.pushes[-1].report.links


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
    with cluster(options.address), _scratch(options.output) as scratch:
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
        _draw(figure, tuple(self._spans), pushes)
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


def _draw(path: Path, driver: Sequence[Span], pushes: Sequence[Push]) -> None:
    """Writes a PNG: the whole run above, the last push below, milliseconds from its start."""
    from matplotlib.figure import Figure

    last = pushes[-1].report
    actors = sorted({span.actor for span in last.spans}, key=lambda who: (who[0] != "t", who))
    figure = Figure(figsize=(11, 2.6 + 0.42 * (len(actors) + 1)), layout="constrained", dpi=130)
    above, below = figure.subplots(2, 1, height_ratios=[1, 0.6 + 0.6 * len(actors)])
    begin = min(span.start for span in driver)
    draw_bars(above, ["driver"], driver, begin, 1.0)
    above.set_xlabel("seconds")
    above.set_title("the whole run", loc="left", fontsize="medium")
    zero = last.started
    draw_bars(below, actors, last.spans, zero, 1e3)
    below.set_xlabel("milliseconds")
    below.axvline(last.seconds * 1e3, color="#333333", linewidth=1, linestyle="--")
    below.set_title(
        f"push of version {last.version}: {last.nbytes / 1e6:.0f} MB in "
        f"{last.seconds * 1e3:.0f} ms, {last.gbytes_per_s:.1f} GB/s; dashed: in use everywhere",
        loc="left",
        fontsize="medium",
    )
    with given_path(path):
        figure.savefig(path)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Machine-readable: rates in 1e9 bytes per second, medians over the pushes."""
    seconds = statistics.median(p.report.seconds for p in outcome.pushes)
    floor = statistics.median(p.floor_seconds for p in outcome.pushes)
    nbytes = outcome.connect.nbytes
    return {
        "verified": outcome.verified,
        "bytes": nbytes,
        "seconds": seconds,
        "gbytes_per_s": nbytes / seconds / 1e9,
        "floor_gbytes_per_s": nbytes / floor / 1e9,
        "times_floor": statistics.median(
            p.report.seconds / p.floor_seconds for p in outcome.pushes
        ),
        "model": outcome.model,
        "parameters": outcome.parameters,
        "trainers": outcome.trainers,
        "rollouts": outcome.rollouts,
        "copy_threads_per_trainer": outcome.threads,
        "connect": msgspec.to_builtins(outcome.connect),
        "links": [msgspec.to_builtins(link) for link in outcome.links],
        "pushes": [
            {
                "version": p.report.version,
                "verified": p.verified,
                "bytes_checked": sum(c.nbytes for c in p.checked),
                "wrong": [name for c in p.checked for name in c.wrong],
                "seconds": p.report.seconds,
                "gbytes_per_s": p.report.gbytes_per_s,
                "floor_seconds": p.floor_seconds,
                "stages": p.report.stages,
                "losses": p.losses,
            }
            for p in outcome.pushes
        ],
        "timeline": outcome.timeline,
    }


def show(outcome: Outcome, console: Console) -> None:
    """Prints the table and the verdict."""
    shown = outcome.pushes[-_COLUMNS:]
    table = plain(
        f"{outcome.model}, {outcome.parameters / 1e6:.0f} M parameters: "
        f"{outcome.trainers} FSDP2 trainers into {outcome.rollouts} tensor-parallel rollouts"
    )
    table.add_column("version")
    for push in shown:
        table.add_column(str(push.report.version), justify="right", no_wrap=True)
    table.add_column("median", justify="right", style="bold", no_wrap=True)

    def row(name: str, unit: str, digits: int, value: Callable[[Push], float]) -> None:
        found = [value(push) for push in shown]
        middle = statistics.median(value(push) for push in outcome.pushes)
        label = f"{name} [dim]{unit}[/]" if unit else name
        table.add_row(label, *(f"{v:.{digits}f}" for v in (*found, middle)))

    if outcome.pushes[0].losses:
        row("loss after training", "", 3, lambda p: p.losses[-1])
    for stage in outcome.pushes[0].report.stages:
        row(stage, "ms", 1, partial(_stage_ms, stage))
    row("whole push", "ms", 1, lambda p: p.report.seconds * 1e3)
    table.add_row()
    row("rate", "GB/s", 2, lambda p: p.report.gbytes_per_s)
    row("floor", "GB/s", 2, lambda p: p.report.nbytes / p.floor_seconds / 1e9)
    row("time over floor", "x", 2, lambda p: p.report.seconds / p.floor_seconds)
    table.add_row()
    for i, link in enumerate(outcome.links[:_LINKS]):
        name = f"{link.trainer} to {link.rollout}, {link.transport}, {link.nbytes / 1e6:.1f} MB"
        row(name, "GB/s", 2, partial(_link_rate, i))
    table.add_row()
    table.add_row("every byte as in the reference", *map(_verdict, shown), "")
    console.print(table)
    c = outcome.connect
    if len(outcome.links) > _LINKS:
        console.print(f"{len(outcome.links) - _LINKS} more links; --json lists them")
    times = ", ".join(f"{stage} {s * 1e3:.0f} ms" for stage, s in c.seconds.items())
    console.print(f"Connected once: {c.copies} copies planned; {times}.")
    threads = f"{outcome.threads} thread{'s' if outcome.threads > 1 else ''}"
    console.print(
        f"Floor: plain copies of the same bytes by {threads} in each trainer, after each push."
    )
    console.print(f"Bytes of one version: {c.nbytes:,}. Timeline: {outcome.timeline}")


def _stage_ms(stage: str, push: Push) -> float:
    return push.report.stages[stage] * 1e3


def _link_rate(link: int, push: Push) -> float:
    return push.report.links[link].gbytes_per_s


def _verdict(push: Push) -> str:
    if any(c.wrong for c in push.checked):
        return f"[red]{sum(len(c.wrong) for c in push.checked)} differ[/]"
    return "[green]yes[/]" if push.verified else "[red]no change[/]"
