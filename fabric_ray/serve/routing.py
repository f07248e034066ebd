"""Request routers for Serve, which select decoders and prefillers, and their policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter
from ray.serve.request_router import RunningReplica as Replica

from fabric_ray.inference.pool import page_keys
from fabric_ray.serve.messages import Generate
from fabric_ray.serve.prefillers import least_loaded


def prompt_blocks(tokens: Sequence[int], *, block_tokens: int, most: int) -> tuple[bytes, ...]:
    """For each of the first full blocks of a prompt, a digest of all tokens up to its end."""
    return tuple(page_keys(tokens[: block_tokens * most], block_tokens))


def prefer_prefix(
    loads: Mapping[str, float], held: Mapping[str, int], *, slack: float
) -> list[list[str]]:
    """Groups of replicas, the preferred group first.

    The first group has the replicas with the longest prefix of the prompt, unless they have over
    ``slack`` requests more than the least loaded replica. The second has all others, by load.

    Args:
        loads: requests of each replica.
        held: leading blocks of the prompt that a replica has seen.
        slack: requests.
    """
    if not loads:
        return []
    idle = min(loads.values())
    holders = {r: n for r in loads if (n := held.get(r, 0)) and loads[r] <= idle + slack}
    best = max(holders.values(), default=0)
    first = [replica for replica, blocks in holders.items() if blocks == best]
    rest = [replica for replica in least_loaded(loads) if replica not in first]
    return [group for group in (first, rest) if group]


class PrefixMemory:
    """An LRU map of blocks to the replicas that have seen them.

    Args:
        entries: most pairs of block and replica.
    """

    def __init__(self, entries: int = 200_000) -> None:
        self._entries = entries
        self._seen: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self._at: dict[bytes, set[str]] = {}

    def remember(self, blocks: Sequence[bytes], replica: str) -> None:
        """Records that a replica gets a prompt with these leading blocks."""
        for block in blocks:
            self._seen[block, replica] = None
            self._seen.move_to_end((block, replica))
            self._at.setdefault(block, set()).add(replica)
        while len(self._seen) > self._entries:
            (block, old), _ = self._seen.popitem(last=False)
            self._drop(block, old)

    def held(self, blocks: Sequence[bytes]) -> dict[str, int]:
        """Number of leading blocks that each replica has seen."""
        out: dict[str, int] = {}
        for count, block in enumerate(blocks, start=1):
            holders = [r for r in self._at.get(block, ()) if out.get(r, 0) == count - 1]
            if not holders:
                break
            out.update(dict.fromkeys(holders, count))
        return out

    def forget(self, replica: str) -> None:
        """Drops all entries of a replica that is gone."""
        for block, holder in [key for key in self._seen if key[1] == replica]:
            del self._seen[block, holder]
            self._drop(block, holder)

    def _drop(self, block: bytes, replica: str) -> None:
        holders = self._at.get(block, set())
        holders.discard(replica)
        if not holders:
            self._at.pop(block, None)


def _by_name(replicas: Sequence[Replica]) -> dict[str, Replica]:
    return {replica.replica_id.unique_id: replica for replica in replicas}


class PrefixRouter(RequestRouter):
    """Routes requests to decoders: by the prompt's prefix, then by load."""

    def initialize_state(self, *, slack: float = 4, **_: Any) -> None:
        self._slack = slack
        self._memory = PrefixMemory()

    async def choose_replicas(
        self, candidate_replicas: list[Replica], pending_request: PendingRequest | None = None
    ) -> list[list[Replica]]:
        by_name = _by_name(candidate_replicas)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        lengths = {
            name: self.replica_queue_len_cache.get(replica.replica_id)
            for name, replica in by_name.items()
        }
        loads = {name: float(length or 0) for name, length in lengths.items()}
        held = self._memory.held(_blocks(pending_request))
        groups = prefer_prefix(loads, held, slack=self._slack)
        return [[by_name[name] for name in group] for group in groups]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._memory.remember(_blocks(pending_request), replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id.unique_id)


def _blocks(request: PendingRequest | None) -> tuple[bytes, ...]:
    argument = request.args[0] if request is not None and request.args else None
    return argument.blocks if isinstance(argument, Generate) else ()


class PrefillRouter(RequestRouter):
    """Names prefillers to decoders: by avoid level, then by load.

    A decoder passes what only it knows as keyword arguments: ``avoid``, a level for replicas, and
    ``load``, the prompts that it waits for at each. Replicas without an offer are left out.
    """

    def initialize_state(self, **_: Any) -> None: ...

    async def choose_replicas(
        self, candidate_replicas: list[Replica], pending_request: PendingRequest | None = None
    ) -> list[list[Replica]]:
        by_name = _by_name(candidate_replicas)
        options: dict[Any, Any] = {}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            options = pending_request.kwargs
        pending: Mapping[str, int] = options.get("load", {})
        loads = {
            name: pending.get(name, 0) + float((replica.routing_stats or {}).get("load", 0))
            for name, replica in by_name.items()
            if "offer" in replica.replica_metadata
        }
        order = least_loaded(loads, avoid=options.get("avoid"))
        return [[by_name[name]] for name in order]
