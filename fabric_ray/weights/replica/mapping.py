"""Assigns rollouts to trainers: a pure function of both lists.

After a gather every trainer of a pipeline stage has the same whole tensors, so any of them can fill
any rollout. Each fills a few *groups*: rollouts that hold the same, the first of which stands for
all ("peer to peer transfer plan" of the miles article on weight updates in SGLang).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Group = tuple[int, ...]
"""Rollout ranks that hold the same; the first is the one that a replica is loaded as."""


def assign(trainers: Sequence[int], replicas: Iterable[Sequence[int]]) -> dict[int, list[Group]]:
    """Deals rollouts out to the trainers of one stage, round robin.

    Every rollout belongs to exactly one trainer. Numbers of groups, which say how often a replica
    is loaded, differ by one at most; among equals the trainer with the fewest rollouts is next.
    Where there are more trainers than kinds of rollouts, replicas are divided among them.

    Args:
        trainers: ranks of a stage, at least one.
        replicas: rollout ranks; those that hold the same together.

    Returns:
        by trainer, also those that have nothing to send.
    """
    dealt: dict[int, list[Group]] = {trainer: [] for trainer in trainers}
    for group in sorted(_divided(replicas, len(trainers)), key=lambda g: (-len(g), g)):
        least = min(dealt, key=lambda t: (len(dealt[t]), sum(map(len, dealt[t]))))
        dealt[least].append(group)
    return dealt


def _divided(replicas: Iterable[Sequence[int]], parts: int) -> list[Group]:
    """Halves the largest groups until there are ``parts``, or no two replicas left to part."""
    groups = [tuple(group) for group in replicas]
    while 0 < len(groups) < parts:
        largest = max(groups, key=len)
        if len(largest) == 1:
            break
        groups.remove(largest)
        half = -(-len(largest) // 2)
        groups += [largest[:half], largest[half:]]
    return groups
