"""The loop: take samples, update, push, while rollouts generate."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fabric_ray.demo.actors import TIMEOUT, spread, started
from fabric_ray.demo.common import Lanes, cluster, draw_timeline, make_output
from fabric_ray.demo.options import Rl as Options
from fabric_ray.demo.rl.actors import Interval, Rollout, Served, Trained, Trainer, covered
from fabric_ray.demo.rl.outcome import HEADER, Outcome, Update, line, model
from fabric_ray.demo.rl.policy import SampleBuffer, Taken, readable
from fabric_ray.weights import PushReport, Span, WeightSync

# Updates, the last ones, that the timeline shows.
_PICTURED = 6


def run(options: Options, tell: Callable[[str], None] = lambda _: None) -> Outcome:
    """Runs the demo on Ray: on a cluster if ``options.address`` or ``RAY_ADDRESS`` names one.

    Raises:
        FabricError: whatever went wrong, by name.
    """
    options.check()
    make_output(options.output)
    with cluster(options.address):
        trainer = spread(Trainer)
        # Pushes and questions are answered while it draws.
        rollout = spread(Rollout, concurrency_groups={"draw": 1})
        trainers = [trainer.remote(rank, options) for rank in range(options.trainers)]
        rollouts = [rollout.remote(rank, options) for rank in range(options.rollouts)]
        with started(trainers, rollouts):
            return asyncio.run(_Loop(options, trainers, rollouts, tell).outcome())


class _Pushed(NamedTuple):
    report: PushReport
    generating: list[tuple[Interval, ...]]
    """Of each rollout, since the push before."""


class _Loop:
    def __init__(
        self,
        options: Options,
        trainers: list[Any],
        rollouts: list[Any],
        tell: Callable[[str], None],
    ) -> None:
        self._options, self._tell = options, tell
        self._trainers, self._rollouts = trainers, rollouts
        self._sync = WeightSync(trainers, rollouts, digest=True, timeout=TIMEOUT)
        self._buffer = SampleBuffer(
            batches=options.trainers * options.batches, staleness=options.staleness
        )
        self._changed = asyncio.Condition()
        self._example = ("", "")
        self._wrong: list[str] = []
        self._spans: deque[list[Span]] = deque(maxlen=_PICTURED)

    async def outcome(self) -> Outcome:
        await asyncio.to_thread(self._sync.connect)
        first = await self._push(1)
        start = time.perf_counter()
        updates = await self._while_drawing()
        return Outcome(
            options=self._options,
            parameters=model().parameter_count,
            nbytes=first.report.nbytes,
            updates=tuple(updates),
            wrong=tuple(self._wrong),
            example=self._example,
            seconds=time.perf_counter() - start,
            transport=first.report.links[0].transport,
            timeline=self._picture(),
        )

    async def _while_drawing(self) -> list[Update]:
        """All updates; a rollout that fails ends them."""
        updates = asyncio.create_task(self._updates())
        # Two for each, so that a rollout's next batch needn't wait for this process.
        draws = [asyncio.create_task(self._draw(rollout)) for rollout in self._rollouts * 2]
        try:
            ended, _ = await asyncio.wait([updates, *draws], return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                each.result()
            return updates.result()
        finally:
            for each in (updates, *draws):
                each.cancel()

    async def _draw(self, rollout: Any) -> None:
        """Has a rollout draw one batch after the other."""
        while True:
            batch = await rollout.draw.remote()
            async with self._changed:
                self._buffer.put(batch)
                self._changed.notify_all()

    async def _updates(self) -> list[Update]:
        updates = []
        for step in range(1, self._options.steps + 1):
            updates.append(await self._update(step, version=step))
            if step == 1:
                self._tell(HEADER)
            self._tell(line(updates[-1]))
        return updates

    async def _update(self, step: int, version: int) -> Update:
        start, discarded = time.perf_counter(), self._buffer.discarded
        taken = await self._take(version)
        self._example = readable(taken.batches[-1].tokens[0])
        trained = await self._train(taken)
        pushed = await self._push(version + 1)
        training = min(t.start for t in trained), max(t.end for t in trained)
        report = pushed.report
        pushing = report.started, report.started + report.seconds
        self._spans.append(_spans(trained, pushing, pushed.generating))
        rewards = [reward for batch in taken.batches for reward in batch.rewards.tolist()]
        return Update(
            step=step,
            version=version + 1,
            reward=statistics.fmean(rewards),
            solved=sum(reward == 1 for reward in rewards) / len(rewards),
            staleness=taken.staleness,
            discarded=self._buffer.discarded - discarded,
            clipped=statistics.fmean(t.clipped for t in trained),
            mismatch=max(t.mismatch for t in trained),
            seconds=time.perf_counter() - start,
            train_seconds=training[1] - training[0],
            push_seconds=report.seconds,
            generating_in_training=statistics.fmean(
                covered(training, by) for by in pushed.generating
            ),
            generating_in_push=statistics.fmean(covered(pushing, by) for by in pushed.generating),
        )

    async def _take(self, version: int) -> Taken:
        async with self._changed:
            while (taken := self._buffer.take(version)) is None:
                await self._changed.wait()
            return taken

    async def _train(self, taken: Taken) -> Sequence[Trained]:
        world = self._options.trainers
        shares = [taken.batches[rank::world] for rank in range(world)]
        refs = (t.update.remote(s) for t, s in zip(self._trainers, shares, strict=True))
        trained: list[Trained] = await asyncio.gather(*refs)
        return trained

    async def _push(self, version: int) -> _Pushed:
        """Pushes, and compares what every rollout serves with what the trainers hold."""
        report = await self._sync.push_async(version)
        published = [t.publish.remote(version) for t in self._trainers]
        # Rollouts draw meanwhile; a call that waits for its arguments would delay their next one.
        await asyncio.gather(*published)
        served: list[Served] = await asyncio.gather(
            *(r.served.remote(*published) for r in self._rollouts)
        )
        for rank, each in enumerate(served):
            names = each.wrong
            if each.version != version:
                names = (f"is at version {each.version}", *names)
            self._wrong.extend(f"version {version}, rollout {rank}: {name}" for name in names)
        return _Pushed(report, [each.generating for each in served])

    def _picture(self) -> str:
        path = self._options.output / "rl-timeline.png"
        spans = [span for each in self._spans for span in each]
        begin = min(span.start for span in spans)
        draw_timeline(path, Lanes(f"the last {len(self._spans)} updates", spans, begin))
        return str(path)


def _spans(
    trained: Sequence[Trained], pushing: Interval, generating: Sequence[Sequence[Interval]]
) -> list[Span]:
    spans = [Span(f"trainer {rank}", "train", t.start, t.end) for rank, t in enumerate(trained)]
    spans.append(Span("weights", "push", *pushing))
    for rank, intervals in enumerate(generating):
        spans.extend(Span(f"rollout {rank}", "generate", *each) for each in intervals)
    return spans
