"""Asynchronous GRPO on Ray: vLLM generates while FSDP2 trainers learn, and each new version of the
weights is pushed into vLLM in the middle of its requests.

    python grpo.py                  # some minutes on two cores; the reward rises
    python grpo.py --staleness 0    # samples of the newest version only
    python grpo.py --json | jq .verified

A tiny Qwen3 with random weights learns to sort digits. The exit code says whether all checks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
import task
from actors import Options, Pushed, Rollout, Trainer
from task import SampleBuffer, Samples, Update

# vLLM's CPU build, several engines of it on one host.
CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


class Loop:
    """Takes samples, updates and pushes, while rollouts draw."""

    def __init__(
        self, options: Options, trainers: list[Any], rollouts: list[Any], say: Callable[[str], None]
    ) -> None:
        self._options, self._trainers, self._rollouts = options, trainers, rollouts
        self._say = say
        self._buffer = SampleBuffer(options.trainers * options.batches, options.staleness)
        self._changed = asyncio.Condition()
        self._example = ""

    async def run(self) -> dict[str, Any]:
        """Returns what was found, as JSON can hold it."""
        # Trainers ask rollouts, whose answer has a deadline: an engine may take longer to start.
        await asyncio.gather(*(r.is_paused.remote() for r in self._rollouts))
        store = await self._trainers[0].serve.remote()
        await asyncio.gather(*(t.start.remote(store, self._rollouts) for t in self._trainers))
        first = await self._push(1)
        began = time.perf_counter()
        updates = await self._while_drawing()
        seconds = time.perf_counter() - began
        versions = await asyncio.gather(*(r.get_weight_version.remote() for r in self._rollouts))
        return self._found(updates, first, seconds, versions)

    async def _while_drawing(self) -> list[Update]:
        """All updates; a rollout that fails ends them."""
        updating = asyncio.create_task(self._updates())
        # Two for each, so that a rollout's next batch needn't wait for this process.
        drawing = [asyncio.create_task(self._draw(rollout)) for rollout in self._rollouts * 2]
        try:
            ended, _ = await asyncio.wait([updating, *drawing], return_when=asyncio.FIRST_COMPLETED)
            for each in ended:
                each.result()
            return updating.result()
        finally:
            for each in (updating, *drawing):
                each.cancel()

    async def _draw(self, rollout: Any) -> None:
        while True:
            batch = await rollout.draw.remote()
            async with self._changed:
                self._buffer.put(batch)
                self._changed.notify_all()

    async def _updates(self) -> list[Update]:
        updates = []
        for version in range(1, self._options.steps + 1):
            updates.append(await self._update(version))
            last = updates[-1]
            behind = " ".join(f"{by}:{n}" for by, n in sorted(last.staleness.items()))
            self._say(
                f"version {last.version:>4}  reward {last.reward:.3f}  push "
                f"{last.push_seconds * 1e3:>4.0f} ms  tokens by versions behind {behind}"
            )
        return updates

    async def _update(self, version: int) -> Update:
        start = time.perf_counter()
        batches = await self._take(version)
        self._example = task.readable(batches[-1].tokens[0])
        shares = [batches[rank :: self._options.trainers] for rank in range(self._options.trainers)]
        mismatches = await asyncio.gather(
            *(t.update.remote(share) for t, share in zip(self._trainers, shares, strict=True))
        )
        pushed = await self._push(version + 1)
        return Update(
            version=version + 1,
            reward=statistics.fmean(r for batch in batches for r in batch.rewards.tolist()),
            staleness=dict(task.staleness(batches, version)),
            crossed=sum(batch.crossed for batch in batches),
            mismatch=max(mismatches),
            seconds=time.perf_counter() - start,
            push_seconds=pushed.seconds,
        )

    async def _take(self, version: int) -> list[Samples]:
        async with self._changed:
            while (taken := self._buffer.take(version)) is None:
                await self._changed.wait()
            return taken

    async def _push(self, version: int) -> Pushed:
        pushed: list[Pushed] = await asyncio.gather(
            *(t.push.remote(version) for t in self._trainers)
        )
        return pushed[0]

    def _found(
        self, updates: list[Update], first: Pushed, seconds: float, versions: list[str]
    ) -> dict[str, Any]:
        first_quarter, last_quarter = task.quarters(updates)
        behind: Counter[int] = Counter()
        for update in updates:
            behind.update(update.staleness)
        mismatch = max(update.mismatch for update in updates)
        checks = {
            "versions_arrived": set(versions) == {str(updates[-1].version)},
            **task.checks(updates, self._options.staleness),
        }
        return {
            "verified": all(checks.values()),
            "checks": checks,
            "reward": {"first_quarter": first_quarter, "last_quarter": last_quarter},
            "logprob_difference": mismatch if math.isfinite(mismatch) else None,
            "tokens_by_versions_behind": dict(sorted(behind.items())),
            "samples_of_two_versions": sum(update.crossed for update in updates),
            "samples_discarded": self._buffer.discarded,
            "bytes_of_a_push": first.nbytes,
            "push_seconds": statistics.median(update.push_seconds for update in updates),
            "seconds": seconds,
            "example": self._example,
            "updates": [update._asdict() for update in updates],
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="updates; a version each; from about 20 on the reward rises enough",
    )
    parser.add_argument("--staleness", type=int, default=1, help="versions a token may be behind")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=2, help="vLLM engines")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    as_json = vars(asked).pop("json")
    options = Options(**vars(asked))
    if min(options.steps, options.trainers, options.rollouts) < 1 or options.staleness < 0:
        parser.error("give at least one step, trainer and rollout, and a staleness of at least 0")
    ray.init(
        os.environ.get("RAY_ADDRESS", "local"),
        runtime_env={"env_vars": CPU},
        log_to_driver=False,
        logging_level="WARNING",
    )
    # Most of them wait most of the time: a laptop may have fewer cores.
    spread = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
    trainer, rollout = ray.remote(**spread)(Trainer), ray.remote(**spread)(Rollout)
    trainers = [trainer.remote(rank, options) for rank in range(options.trainers)]
    rollouts = [rollout.remote(rank, options) for rank in range(options.rollouts)]

    def say(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    found = asyncio.run(Loop(options, trainers, rollouts, say).run())
    if as_json:
        print(json.dumps(found))
    else:
        print("\nOne of the last samples: " + found["example"])
        for name, value in found.items():
            if name not in ("updates", "example"):
                print(f"{name.replace('_', ' ')}: {value}")
    return 0 if found["verified"] else 1


if __name__ == "__main__":
    sys.exit(main())
