"""The demo: ranks are started, compared, one is killed and replaced, and all is compared again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import ray
import torch

from fabric_ray.demo.cluster import cluster, named_failures
from fabric_ray.demo.moe.killer import killer_on
from fabric_ray.demo.moe.options import NEW_TOKENS, SEQUENCE, Loss, Options, Outcome, Phase
from fabric_ray.errors import FabricError
from fabric_ray.moe.group import ExpertGroup, Forward
from fabric_ray.moe.layer import Traffic
from fabric_ray.moe.model import MoeModel

Tell = Callable[[str], None]
"""Called with what is being done."""

_CPUS = 0.01
"""Ray keeps no place that takes nothing, and the demo has to fit on any machine."""
_KILL_S = 60.0


def run(options: Options, tell: Tell = lambda _: None) -> Outcome:
    """Runs it all.

    Raises:
        InvalidArgument: an option that it can't have.
        FabricError: the ranks didn't come up.
    """
    options.check()
    with cluster(options.address), named_failures():
        tell(f"starting {options.ranks} ranks, each an actor with an engine of its own")
        group = ExpertGroup(
            options.model,
            ranks=options.ranks,
            seed=options.seed,
            max_tokens=options.tokens,
            timeout=options.timeout,
            cpus_per_rank=_CPUS,
            engine={"transport": options.transport},
        )
        with group:
            return _Run(options, group, tell).outcome()


class _Run:
    def __init__(self, options: Options, group: ExpertGroup, tell: Tell) -> None:
        self._options, self._group, self._tell = options, group, tell
        self._whole = MoeModel(options.model, seed=options.seed)
        self._draw = random.Random(options.seed)
        self._killer = killer_on(group.members[-1].node_id)

    def outcome(self) -> Outcome:
        explanation = self._group.explain()
        whole = self._phase("whole")
        self._tell("killing a rank in the middle of a step")
        loss = self._kill(min(whole.seconds))
        self._tell(f"rank {loss.rank} was named after {loss.seconds:.2f} s: {loss.cause}")
        masked = self._phase("masked")
        self._tell(f"a new actor takes the place of rank {loss.rank}")
        ray.kill(self._killer)
        begin = time.monotonic()
        member = self._group.join()
        joined = time.monotonic() - begin
        again = self._phase("whole again")
        return Outcome(
            options=self._options,
            phases=(whole, masked, again),
            loss=loss,
            joined=joined,
            newcomer=member.rank == loss.rank and member.pid != loss.pid,
            explanation=explanation,
        )

    def _phase(self, name: str) -> Phase:
        """Some steps, each compared with the model in one place."""
        options, group = self._options, self._group
        self._tell(f"{name}: {options.steps} steps of {options.tokens} tokens on each rank")
        seconds, tokens, logits, wrong = [], 0, 0, 0
        traffic: dict[int, Traffic] = {}
        for _ in range(options.steps):
            batch = self._batch()
            begin = time.monotonic()
            found = group.forward(batch)
            seconds.append(time.monotonic() - begin)
            tokens += sum(map(len, batch))
            logits += sum(rows.numel() for rows in found.logits)
            wrong += self._wrong(found, batch)
            for rank, one in found.traffic.items():
                traffic[rank] = traffic.get(rank, Traffic()) + one
        prompts = self._batch()[: options.ranks]
        said = group.generate(prompts, NEW_TOKENS)
        expected = self._whole.generate(prompts, NEW_TOKENS, left_out=group.left_out)
        return Phase(
            name=name,
            left_out=group.left_out,
            steps=options.steps,
            tokens=tokens,
            seconds=tuple(seconds),
            logits=logits,
            wrong=wrong,
            said=said.tokens == expected,
            traffic=traffic,
        )

    def _kill(self, step: float) -> Loss:
        """Kills a rank half a step after one has begun, and has the group find out."""
        victim = self._group.members[-1]
        killed = self._killer.kill.remote(victim.pid, step / 2)
        deadline = time.monotonic() + _KILL_S
        found: Forward | None = None
        while found is None or not found.lost:
            # A step that was quicker than the kill knows nothing of it.
            if time.monotonic() > deadline:
                raise FabricError(f"the kill of process {victim.pid} went unnoticed")
            found = self._group.forward(self._batch())
            ended = time.time()
        at = ray.get(killed)
        by_rank = {one.rank: one for one in found.lost}
        one = by_rank.get(victim.rank, found.lost[0])
        return Loss(
            rank=victim.rank,
            pid=victim.pid,
            named=tuple(sorted(by_rank)),
            by=one.named_by,
            cause=one.cause,
            seconds=one.at - at,
            recovered=ended - at,
        )

    def _batch(self) -> list[list[int]]:
        """As many tokens for each rank as are asked for, in sequences of any length."""
        vocab = self._options.model.vocab
        lengths = []
        for _ in range(self._options.ranks):
            left = self._options.tokens
            while left:
                lengths.append(min(left, self._draw.randint(SEQUENCE // 2, SEQUENCE)))
                left -= lengths[-1]
        return [[self._draw.randrange(vocab) for _ in range(n)] for n in lengths]

    def _wrong(self, found: Forward, batch: list[list[int]]) -> int:
        """Numbers that differ from those of the model in one place."""
        expected = self._whole.forward(batch, left_out=found.left_out)
        pairs = zip(found.logits, expected, strict=True)
        return sum(int(torch.ne(one, other).sum()) for one, other in pairs)
