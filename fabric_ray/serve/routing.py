"""Which replica gets a request: Serve's routers for decoders and prefillers, and their policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter
from ray.serve.request_router import RunningReplica as Replica

from fabric_ray.inference.pool import page_keys
from fabric_ray.serve.prefillers import least_loaded
from fabric_ray.serve.wire import Generate


def prompt_blocks(tokens: Sequence[int], *, block_tokens: int, most: int) -> tuple[bytes, ...]:
    """A digest for each full block of a prompt's begin, of everything up to the block's end."""
    return tuple(page_keys(tokens[: block_tokens * most], block_tokens))


def prefer_prefix(
    loads: Mapping[str, float], held: Mapping[str, int], *, slack: float
) -> list[list[str]]:
    """Replicas in groups, the preferred first.

    Those that hold the longest begin of the prompt come first, except where they have more than
    ``slack`` requests more than the least loaded replica has; all others follow by load.

    Args:
        loads: requests of each replica.
        held: blocks of the prompt that a replica has seen.
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
    """Which replicas have seen which blocks; the blocks that were used longest ago are forgotten.

    Args:
        entries: pairs of block and replica that are kept.
    """

    def __init__(self, entries: int = 200_000) -> None:
        self._entries = entries
        self._seen: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self._at: dict[bytes, set[str]] = {}

    def remember(self, blocks: Sequence[bytes], replica: str) -> None:
        """A replica gets a prompt that begins so."""
        for block in blocks:
            self._seen[block, replica] = None
            self._seen.move_to_end((block, replica))
            self._at.setdefault(block, set()).add(replica)
        while len(self._seen) > self._entries:
            (block, old), _ = self._seen.popitem(last=False)
            self._drop(block, old)

    def held(self, blocks: Sequence[bytes]) -> dict[str, int]:
        """How many of the first blocks each replica has seen."""
        out: dict[str, int] = {}
        for count, block in enumerate(blocks, start=1):
            holders = [r for r in self._at.get(block, ()) if out.get(r, 0) == count - 1]
            if not holders:
                break
            out.update(dict.fromkeys(holders, count))
        return out

    def forget(self, replica: str) -> None:
        """It is gone, and what it held with it."""
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
    """Sends requests to decoders: where the begin of the prompt is, then where least is to do."""

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
    asked = request.args[0] if request is not None and request.args else None
    return asked.blocks if isinstance(asked, Generate) else ()


class PrefillRouter(RequestRouter):
    """Names prefillers to decoders: those that have least to do first, those to avoid last.

    A decoder says what it knows itself, as keyword arguments: ``avoid``, how little it wants some
    replicas, and ``load``, what it waits for at each. Those that haven't told yet how they are met
    aren't named.
    """

    def initialize_state(self, **_: Any) -> None: ...

    async def choose_replicas(
        self, candidate_replicas: list[Replica], pending_request: PendingRequest | None = None
    ) -> list[list[Replica]]:
        by_name = _by_name(candidate_replicas)
        said: dict[Any, Any] = {}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            said = pending_request.kwargs
        mine: Mapping[str, int] = said.get("load", {})
        loads = {
            name: mine.get(name, 0) + float((replica.routing_stats or {}).get("load", 0))
            for name, replica in by_name.items()
            if "offer" in replica.replica_metadata
        }
        order = least_loaded(loads, avoid=said.get("avoid"))
        return [[by_name[name]] for name in order]
