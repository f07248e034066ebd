"""Tokens to experts and back through symmetric memory: ranks and offsets, no addresses.

Every rank has the same layout, a slot for each source. Dispatch fills it, combine fills it again:
counts say that a step's tokens are there, barriers that they have been read.

    python examples/moe_symmetric.py
"""

from contextlib import ExitStack

import torch

from fabric_ray import Region, RegionDescriptor, TransferEngine
from fabric_ray.engine import SymmetricMemory

RANKS, TOKENS, HIDDEN, STEPS = 4, 32, 256, 3
SHAPE = (RANKS, TOKENS, HIDDEN)  # one expert on each rank
TOKEN = HIDDEN * 4  # bytes, f32
DISPATCH, COMBINE, READ = range(3)  # immediates that they have agreed on


class Rank:
    def __init__(self, engine: TransferEngine, part: Region, parts: list[RegionDescriptor]) -> None:
        self.engine, self.slots = engine, part.tensor(torch.float32, SHAPE)
        self.memory = SymmetricMemory(engine, part, parts)
        self.out, self.outbox = engine.empty(SHAPE, torch.float32)

    def send(self, tokens: list[torch.Tensor], imm: int) -> None:
        """Tokens for each rank, into this one's slot there; no token counts as well."""
        parts = []
        for to, some in enumerate(tokens):
            self.out[to, : len(some)] = some
            slot = self.memory.at(to, self.memory.rank * TOKENS * TOKEN, len(some) * TOKEN)
            parts.append((slot, 0, to * TOKENS * TOKEN, slot.nbytes))
        self.engine.scatter(self.outbox, parts, imm=imm)

    def wait(self, imm: int, count: int) -> None:
        self.engine.plain_counter(imm).wait(count, writers=self.memory.group.peers)


def barrier(ranks: list[Rank]) -> None:
    """All slots have been read, so what was sent has arrived: slots and outboxes are free."""
    for rank in ranks:
        rank.engine.barrier(rank.memory.group, READ)
    for rank in ranks:
        rank.wait(READ, RANKS - 1)


def step(ranks: list[Rank], tokens: torch.Tensor, experts: torch.Tensor) -> None:
    """Expert e multiplies by e + 1. ``experts`` names one for each token of each rank."""
    for rank, mine, to in zip(ranks, tokens, experts, strict=True):
        rank.send([mine[to == e] for e in range(RANKS)], DISPATCH)
    computed = []
    for e, rank in enumerate(ranks):
        rank.wait(DISPATCH, RANKS)
        computed.append([(e + 1) * rank.slots[r, : (experts[r] == e).sum()] for r in range(RANKS)])
    barrier(ranks)
    for rank, results in zip(ranks, computed, strict=True):
        rank.send(results, COMBINE)
    for rank, mine, to in zip(ranks, tokens, experts, strict=True):
        rank.wait(COMBINE, RANKS)
        for e in range(RANKS):
            assert torch.equal(rank.slots[e, : (to == e).sum()], (e + 1) * mine[to == e])
    barrier(ranks)


def main() -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(TransferEngine(name=f"rank-{r}")) for r in range(RANKS)]
        regions = [engine.alloc(RANKS * TOKENS * TOKEN) for engine in engines]
        parts = [region.descriptor() for region in regions]  # exchanged once
        ranks = [Rank(e, region, parts) for e, region in zip(engines, regions, strict=True)]
        for _ in range(STEPS):
            step(ranks, torch.randn(SHAPE), torch.randint(0, RANKS, (RANKS, TOKENS)))
    print(f"{STEPS} x {RANKS} x {TOKENS} tokens arrived at their experts and came back")


if __name__ == "__main__":
    main()
