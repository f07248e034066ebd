"""The demo of weight pushes: train, push, check every byte, again and again."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import ray
from rich.console import Console

from fabric_ray.demo.actors import TIMEOUT, Checked, Rollout, Trainer, spread, started
from fabric_ray.demo.common import Lanes, cluster, draw_timeline, make_output, named, plain
from fabric_ray.demo.options import Weights as Options
from fabric_ray.errors import given_path
from fabric_ray.models import ModelConfig, demo_config, read_config
from fabric_ray.weights import WeightSync
from fabric_ray.weights.families import target_side
from fabric_ray.weights.report import ConnectReport, LinkReport, PushReport, Span

_FLOOR_REPEATS = 3
# A terminal of 80 columns holds this many versions, a screen this many links.
_COLUMNS = 5
_LINKS = 16


def model(options: Options) -> ModelConfig:
    """That of the checkpoint, or of the size that is asked for."""
    if options.checkpoint is not None:
        return read_config(options.checkpoint)
    return demo_config(
        parameters=options.parameters, kind=options.kind, tp=options.rollouts, ep=options.ep
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

    options: Options
    model: str
    parameters: int
    threads: int
    """Copying threads of each trainer."""
    connect: ConnectReport
    pushes: tuple[Push, ...]
    timeline: str

    @property
    def verified(self) -> bool:
        return all(push.verified for push in self.pushes)

    @property
    def links(self) -> tuple[LinkReport, ...]:
        return self.pushes[-1].report.links

    def summary(self) -> dict[str, Any]:
        """Machine-readable: rates in 1e9 bytes per second, medians over the pushes."""
        pushes, nbytes = self.pushes, self.connect.nbytes
        seconds = statistics.median(p.report.seconds for p in pushes)
        floor = statistics.median(p.floor_seconds for p in pushes)
        return {
            "verified": self.verified,
            "bytes": nbytes,
            "seconds": seconds,
            "gbytes_per_s": nbytes / seconds / 1e9,
            "floor_gbytes_per_s": nbytes / floor / 1e9,
            "times_floor": statistics.median(p.report.seconds / p.floor_seconds for p in pushes),
            "model": self.model,
            "parameters": self.parameters,
            "trainers": self.options.trainers,
            "rollouts": self.options.rollouts,
            "copy_threads_per_trainer": self.threads,
            "connect": msgspec.to_builtins(self.connect),
            "links": msgspec.to_builtins(self.links),
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
                for p in pushes
            ],
            "timeline": self.timeline,
        }

    def show(self, console: Console) -> None:
        """Prints the table and the verdict."""
        options, pushes = self.options, self.pushes
        shown = pushes[-_COLUMNS:]
        table = plain(
            f"{self.model}, {self.parameters / 1e6:.0f} M parameters: {options.trainers} FSDP2 "
            f"trainers into {options.rollouts} tensor-parallel rollouts"
        )
        table.add_column("version")
        for push in shown:
            table.add_column(str(push.report.version), justify="right", no_wrap=True)
        table.add_column("median", justify="right", style="bold", no_wrap=True)

        def row(name: str, unit: str, digits: int, values: list[float]) -> None:
            label = f"{name} [dim]{unit}[/]" if unit else name
            found = (*values[-_COLUMNS:], statistics.median(values))
            table.add_row(label, *(f"{value:.{digits}f}" for value in found))

        reports = [push.report for push in pushes]
        if pushes[0].losses:
            row("loss after training", "", 3, [p.losses[-1] for p in pushes])
        for stage in reports[0].stages:
            row(stage, "ms", 1, [r.stages[stage] * 1e3 for r in reports])
        row("whole push", "ms", 1, [r.seconds * 1e3 for r in reports])
        table.add_row()
        row("rate", "GB/s", 2, [r.gbytes_per_s for r in reports])
        row("floor", "GB/s", 2, [p.report.nbytes / p.floor_seconds / 1e9 for p in pushes])
        row("time over floor", "x", 2, [p.report.seconds / p.floor_seconds for p in pushes])
        table.add_row()
        for i, link in enumerate(self.links[:_LINKS]):
            name = f"{link.trainer} to {link.rollout}, {link.transport}, {link.nbytes / 1e6:.1f} MB"
            row(name, "GB/s", 2, [r.links[i].gbytes_per_s for r in reports])
        table.add_row()
        table.add_row("every byte as in the reference", *map(_verdict, shown), "")
        console.print(table)
        c = self.connect
        if len(self.links) > _LINKS:
            console.print(f"{len(self.links) - _LINKS} more links; --json lists them")
        times = ", ".join(f"{stage} {s * 1e3:.0f} ms" for stage, s in c.seconds.items())
        console.print(f"Connected once: {c.copies} copies planned; {times}.")
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        console.print(
            f"Floor: plain copies of the same bytes by {threads} in each trainer, after each push."
        )
        console.print(f"Bytes of one version: {c.nbytes:,}. Timeline: {self.timeline}")


def run(options: Options, tell: Callable[[str], None] = lambda _: None) -> Outcome:
    """Runs the demo on Ray: on a cluster if ``options.address`` or ``RAY_ADDRESS`` names one.

    The reference checkpoint lies under ``options.output`` while it is needed; actors on several
    hosts must share that directory.

    Raises:
        FabricError: whatever went wrong, by name.
    """
    options.check()
    made = ("--parameters", "--rollouts", "--ep")
    with named(*made if options.checkpoint is None else ("--checkpoint",)):
        config = model(options)
    # Bad sizes end here, before any process is started.
    with named("--rollouts", "--ep"):
        target_side(config, tp=options.rollouts, ep=options.ep)
    make_output(options.output)
    with given_path(options.output):
        scratch = TemporaryDirectory(
            prefix="reference-", dir=options.output, ignore_cleanup_errors=True
        )
    with scratch, cluster(options.address):
        return _Run(options, config, Path(scratch.name).resolve(), tell).outcome()


class _Run:
    def __init__(
        self, options: Options, config: ModelConfig, scratch: Path, tell: Callable[[str], None]
    ) -> None:
        self._options, self._config, self._scratch = options, config, scratch
        # A laptop's cores are shared by all trainers on it.
        self._threads = max(1, min(4, (os.cpu_count() or 1) // options.trainers))
        self._tell = tell
        self._spans: list[Span] = []
        self._trainers: list[Any] = []
        self._rollouts: list[Any] = []

    def outcome(self) -> Outcome:
        options, config = self._options, self._config
        with ExitStack() as actors:
            with self._stage("start"):
                self._make_actors()
                checkpoint = options.checkpoint and options.checkpoint.resolve()
                actors.enter_context(started(self._trainers, self._rollouts, checkpoint))
            sync = WeightSync(
                self._trainers, self._rollouts, digest=options.digest, timeout=TIMEOUT
            )
            with self._stage("connect"):
                connected = sync.connect()
            pushes = tuple(self._push(sync, version + 1) for version in range(options.pushes))
        figure = options.output / "timeline.png"
        last, spans = pushes[-1].report, self._spans
        # Trainers first.
        of_push = sorted(last.spans, key=lambda span: (span.actor[0] != "t", span.actor))
        title = (
            f"push of version {last.version}: {last.nbytes / 1e6:.0f} MB in "
            f"{last.seconds * 1e3:.0f} ms, {last.gbytes_per_s:.1f} GB/s; dashed: in use everywhere"
        )
        draw_timeline(
            figure,
            Lanes("the whole run", spans, spans[0].start),
            Lanes(title, of_push, last.started, milliseconds=True, end=last.seconds),
        )
        sizes = config.kind, config.parameter_count, self._threads
        return Outcome(options, *sizes, connected, pushes, str(figure))

    def _make_actors(self) -> None:
        options, config = self._options, self._config
        trainer, rollout = spread(Trainer), spread(Rollout)
        given: dict[str, Any] = {"threads": self._threads, "seed": options.seed}
        given["transport"] = options.transport
        self._trainers = [
            trainer.remote(rank, options.trainers, config, **given)
            for rank in range(options.trainers)
        ]
        given = {"staged": not options.in_place, "transport": options.transport}
        self._rollouts = [
            rollout.remote(rank, options.rollouts, options.ep, config, **given)
            for rank in range(options.rollouts)
        ]

    def _push(self, sync: WeightSync, version: int) -> Push:
        with self._stage(f"train for version {version}"):
            losses = self._each(self._trainers, "train", self._options.steps)[0]
        with self._stage(f"push version {version}"):
            report = sync.push(version)
        with self._stage("floor"):
            sent = dict.fromkeys(range(self._options.trainers), 0)
            for link in report.links:
                sent[link.trainer] += link.nbytes
            refs = [
                trainer.floor.remote(sent[rank], _FLOOR_REPEATS)
                for rank, trainer in enumerate(self._trainers)
            ]
            floor = max(ray.get(refs, timeout=TIMEOUT))
        with self._stage(f"check version {version}"):
            reference = self._scratch / f"v{version}"
            self._each(self._trainers, "export", reference)
            checked = self._each(self._rollouts, "check", reference)
            shutil.rmtree(reference)
        return Push(report, floor, tuple(losses), tuple(checked))

    def _each(self, actors: list[Any], method: str, *args: Any) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in actors]
        results: list[Any] = ray.get(refs, timeout=TIMEOUT)
        return results

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._tell(f"{name} ({len(self._spans) + 1} of {2 + 4 * self._options.pushes})")
        start = time.time()
        yield
        self._spans.append(Span("driver", name.split()[0], start, time.time()))


def _verdict(push: Push) -> str:
    if any(c.wrong for c in push.checked):
        return f"[red]{sum(len(c.wrong) for c in push.checked)} differ[/]"
    return "[green]yes[/]" if push.verified else "[red]no change[/]"
