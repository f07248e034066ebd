"""What one trainer does with what it gathers, bucket by bucket: worked out before the first push.

An engine's tensor can be sent when all that it is made of has been gathered. What comes earlier is
kept; what every engine tensor has been filled from is let go. A replica is then loaded as one
rollout after the other, in the same memory: before a tensor's memory is loaded again, it must have
been sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from fabric_ray.errors import InvalidArgument

Needs = Mapping[str, Collection[str]]
"""By engine tensor: the whole tensors that it is made of."""


class Load(msgspec.Struct, frozen=True):
    """Loads a replica as one rollout and sends what is complete by that."""

    rank: int
    """The rollout; its replicas get the same."""
    tensors: tuple[str, ...]
    """What is loaded."""
    complete: tuple[str, ...]
    """Engine tensors to send."""
    after: int
    """The last load, in order, that must have been sent before; -1: none."""


class Bucket(msgspec.Struct, frozen=True):
    """Tensors that are gathered together, and the loads that follow."""

    arrive: tuple[str, ...]
    loads: tuple[Load, ...]
    drop: tuple[str, ...]
    """Tensors that no later load needs."""


class Schedule(msgspec.Struct, frozen=True):
    """One trainer's work in a push."""

    buckets: tuple[Bucket, ...]
    bucket_nbytes: int
    """Bytes of the largest bucket."""
    cache_nbytes: int
    """The most bytes that wait for a later bucket."""
    peak_nbytes: int
    """The most bytes of whole tensors at once."""


def schedule(
    sizes: Mapping[str, int], needs: Mapping[int, Needs], *, bucket: int, cache: int
) -> Schedule:
    """Works out the buckets.

    Args:
        sizes: bytes of each whole tensor, in the order in which they are gathered.
        needs: by rollout, in the order in which a replica is loaded as them.
        bucket: the most bytes to gather before any are loaded.
        cache: the most bytes to keep from one bucket to the next.

    Raises:
        InvalidArgument: either is too small; says how much would do.
    """
    work = _Work(needs)
    kept: dict[str, int] = {}
    buckets: list[Bucket] = []
    most_arrived = most_kept = peak = 0
    for arrive in _buckets(sizes, bucket):
        kept |= {name: sizes[name] for name in arrive}
        most_arrived = max(most_arrived, sum(sizes[name] for name in arrive))
        peak = max(peak, sum(kept.values()))
        complete = work.arrive(arrive)
        loads = tuple(work.load(rank, complete[rank]) for rank in needs if rank in complete)
        drop = tuple(name for name in kept if not work.pending[name])
        for name in drop:
            kept.pop(name)
        most_kept = max(most_kept, sum(kept.values()))
        buckets.append(Bucket(arrive, loads, drop))
    if most_kept > cache:
        raise InvalidArgument(
            f"up to {most_kept} bytes of tensors wait for others that make up the same engine "
            f"tensor, more than the cache of {cache}; raise the cache to that, or gather what "
            "belongs together one behind the other"
        )
    return Schedule(tuple(buckets), most_arrived, most_kept, peak)


class _Work:
    """What is still to be loaded and sent."""

    def __init__(self, needs: Mapping[int, Needs]) -> None:
        self._needs = needs
        self._uses: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for rank, engine_tensors in needs.items():
            for name, parts in engine_tensors.items():
                for part in parts:
                    self._uses[part].append((rank, name))
        self._missing = {
            (rank, name): len(parts) for rank, n in needs.items() for name, parts in n.items()
        }
        self.pending = Counter({part: len(uses) for part, uses in self._uses.items()})
        """How many engine tensors each whole tensor has yet to be loaded for."""
        self._sent: dict[str, int] = {}
        self._count = 0

    def arrive(self, names: Iterable[str]) -> dict[int, list[str]]:
        """What is complete now, by rollout."""
        complete: dict[int, list[str]] = defaultdict(list)
        for part in names:
            for rank, name in self._uses[part]:
                self._missing[rank, name] -= 1
                if not self._missing[rank, name]:
                    complete[rank].append(name)
        return complete

    def load(self, rank: int, complete: list[str]) -> Load:
        tensors = dict.fromkeys(part for name in complete for part in self._needs[rank][name])
        # Loading a tensor writes to all that it is a part of, complete or not.
        written = {name for part in tensors for r, name in self._uses[part] if r == rank}
        after = max((self._sent.get(name, -1) for name in written), default=-1)
        for name in complete:
            self._sent[name] = self._count
            self.pending.subtract(self._needs[rank][name])
        self._count += 1
        return Load(rank, tuple(tensors), tuple(complete), after)


def _buckets(sizes: Mapping[str, int], most: int) -> Iterator[tuple[str, ...]]:
    names: list[str] = []
    nbytes = 0
    for name, size in sizes.items():
        if size > most:
            raise InvalidArgument(
                f"`{name}` takes {size} bytes, more than a bucket of {most}; raise the bucket to "
                "that"
            )
        if nbytes + size > most:
            yield tuple(names)
            names, nbytes = [], 0
        names.append(name)
        nbytes += size
    if names:
        yield tuple(names)
