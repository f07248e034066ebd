"""vLLM's cache groups: layers that share a block table, and how far their tokens look back.

Hybrid models have several groups. vLLM takes blocks of a sliding window back as soon as the next
token doesn't see them, and leaves block 0 in their places: of a prompt a decoder gets the blocks of
the last window, and a prefiller keeps these for as long as a decoder may ask.

Recurrent layers have a state, which is of one moment: a decoder computes the last token of a prompt
from the state before it. So a prefiller of such a model computes a prompt without its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_states import State, state_of

Tables = Sequence[Sequence[int]]
"""vLLM's blocks of a request: of each group, those of its tokens in order."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table."""

    block_tokens: int
    layers: tuple[str, ...] = ()
    """Their names, without those that use the cache of another layer."""
    window: int | None = None
    """Tokens that a token sees, itself included, at least 2; ``None`` for all before it."""
    silent: frozenset[str] = frozenset()
    """Indexers of sparse attention: vLLM calls no hook when they are written, and layer ``n + 1``
    is computed after the attention of layer ``n`` has read its indexer."""
    states: Mapping[str, State] = field(default_factory=dict)
    """Of recurrent layers, by their names; all layers of a group are, or none. A block has the
    state after its last token, or after the request's last; vLLM takes earlier blocks back."""

    @property
    def is_state(self) -> bool:
        return bool(self.states)

    @property
    def takes_back(self) -> bool:
        """Whether vLLM takes blocks back while their request goes on."""
        return self.window is not None or self.is_state

    @property
    def look_back(self) -> int | None:
        """Tokens before it that a token sees; ``None`` for all."""
        return None if self.window is None else self.window - 1

    def blocks(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block_tokens)

    def taken_back(self, tokens: int) -> int:
        """Leading blocks of which the token after ``tokens`` others sees none."""
        if self.is_state:
            return max(0, self.blocks(tokens) - 1)
        if self.look_back is None:
            return 0
        return max(0, tokens - self.look_back) // self.block_tokens

    def needed(self, prompt: int) -> slice:
        """The blocks of a prompt that a decoder needs, which computes its last token again unless
        there are states; of full attention all."""
        return slice(self.taken_back(prompt - (not self.is_state)), self.blocks(prompt))


def layer_groups(config: Any, caches: Any) -> tuple[LayerGroup, ...]:
    """The groups of a ``KVCacheConfig``, in the order of block tables.

    Args:
        config: vLLM's ``KVCacheConfig``.
        caches: ``vllm.v1.kv_cache_interface``.

    Raises:
        InvalidArgument: a cache that this connector doesn't move, by the name of its layer.
    """
    if not config.kv_cache_groups:
        raise InvalidArgument(
            "the model has no caches, so there is nothing to be moved; serve it without the "
            "connector"
        )
    made = []
    for group in config.kv_cache_groups:
        specs = _specs(group)
        for name, spec in specs.items():
            _check(name, spec, group, caches)
        windows = {_window(spec, caches) for spec in specs.values()}
        states = {name: state_of(spec) for name, spec in specs.items() if _is_state(spec, caches)}
        if states and len(states) != len(specs):
            raise InvalidArgument(
                f"layers {', '.join(specs)} share blocks, and only some of them have states; serve "
                "this model without the connector"
            )
        if len(windows) != 1:
            raise InvalidArgument(
                f"layers {', '.join(specs)} share blocks and have windows of {windows} tokens; "
                "serve this model without the connector"
            )
        made.append(
            LayerGroup(
                block_tokens=group.kv_cache_spec.block_size,
                layers=tuple(group.layer_names),
                window=windows.pop(),
                silent=frozenset(name for name, spec in specs.items() if _is_indexer(spec)),
                states=states,
            )
        )
    return tuple(made)


def loaded_tokens(groups: Sequence[LayerGroup], prompt: int, here: int, recomputed: int = 0) -> int:
    """How many tokens of a prompt a decoder gets, of which it has ``here``: whole blocks.

    Several draft modules read further ahead: the drafts' pages of the last ``recomputed`` tokens
    depend on what the prefiller samples, so the decoder computes these tokens again.

    vLLM computes the last token of a prompt again. If it is among those that were loaded, vLLM has
    taken back blocks which the next token doesn't see, and the last token may see one of them
    (RS-1). So with windows all tokens but the last one are loaded.
    """
    if recomputed:
        return max(here, prompt - recomputed)
    if here >= prompt - 1:
        lost = any(group.taken_back(prompt) != group.taken_back(prompt - 1) for group in groups)
        return here if lost else prompt
    return prompt if all(group.window is None for group in groups) else prompt - 1


class BlockPins:
    """Keeps blocks that decoders may ask for, by one more user of each in vLLM's block pool.

    vLLM gives blocks of windows back while their request goes on or before it says that the request
    is over, also while they are read (MR-1). It keeps those of a finished request for a connector
    that wants it, and makes step after step meanwhile.

    Args:
        groups: the cache groups.
        every: whether :meth:`pin` keeps all blocks of a prompt. Those of a preempted request are
            then another's after the next step at the earliest, when nothing reads them any more.
    """

    def __init__(self, groups: Sequence[LayerGroup], *, every: bool = False) -> None:
        self._groups, self._every = groups, every
        self._pool: Any = None
        self._pinned: dict[str, list[Any]] = {}

    def bind(self, pool: Any) -> None:
        """Takes vLLM's ``BlockPool``, before there are requests."""
        self._pool = pool

    @property
    def is_bound(self) -> bool:
        """Whether there is a pool: vLLM before 0.32 gives none."""
        return self._pool is not None

    def pin(self, request: str, tables: Tables, prompt: int) -> bool:
        """Keeps a request's blocks that a decoder needs, of those that vLLM may take back. Returns
        whether vLLM still has all of them: a request that is resumed with hits beyond its prompt
        has fewer."""
        numbers = [
            number
            for group, table in zip(self._groups, tables, strict=True)
            if group.takes_back or self._every
            for number in table[group.needed(prompt)]
        ]
        if not numbers:
            return True
        blocks = [self._pool.blocks[number] for number in numbers]
        if any(block.is_null for block in blocks):
            return False
        self._pin(request, blocks)
        return True

    def hold(self, request: str, tables: Tables, prompt: int) -> None:
        """Keeps all blocks of a prompt that vLLM still has, beside those that are kept."""
        pairs = zip(self._groups, tables, strict=True)
        numbers = [number for group, table in pairs for number in table[: group.blocks(prompt)]]
        blocks = [self._pool.blocks[number] for number in numbers]
        self._pin(request, [block for block in blocks if not block.is_null])

    def _pin(self, request: str, blocks: list[Any]) -> None:
        self._pool.touch(blocks)
        self._pinned.setdefault(request, []).extend(blocks)

    def unpin(self, request: str) -> None:
        """Gives a request's blocks back, if any are kept."""
        blocks = self._pinned.pop(request, None)
        if blocks:
            self._pool.free_blocks(reversed(blocks))


def _specs(group: Any) -> dict[str, Any]:
    """The ``KVCacheSpec`` of each layer of a group."""
    spec = group.kv_cache_spec
    each: dict[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    # A pipeline's stage may lack all layers of a group, and the scheduler hears of the first stage.
    return each or dict.fromkeys(group.layer_names or [""], spec)


def _is_indexer(spec: Any) -> bool:
    role = getattr(spec, "cache_role", None)
    return role is not None and role.name == "INDEXER"


def _is_state(spec: Any, caches: Any) -> bool:
    return type(spec) is caches.MambaSpec


def _window(spec: Any, caches: Any) -> int | None:
    # With the hybrid manager off, layers with windows keep all blocks, as full attention does.
    return spec.sliding_window if type(spec) is caches.SlidingWindowSpec else None


def _check(name: str, spec: Any, group: Any, caches: Any) -> None:
    kind = type(spec)
    if kind is getattr(caches, "ChunkedLocalAttentionSpec", None):
        raise InvalidArgument(
            f"layer `{name}` has a cache of kind {kind.__name__}, whose blocks aren't moved; leave "
            "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE out, or start vLLM with "
            "--disable-hybrid-kv-cache-manager"
        )
    if _is_state(spec, caches):
        if spec.num_speculative_blocks:
            raise InvalidArgument(
                f"layer `{name}` keeps {spec.num_speculative_blocks} states beside its own for "
                "drafts, which isn't followed; leave --speculative-config out"
            )
        return
    known = (caches.FullAttentionSpec, caches.MLAAttentionSpec, caches.SlidingWindowSpec)
    if kind not in known or getattr(spec, "tokens_per_state", 1) != 1:
        raise InvalidArgument(
            f"layer `{name}` has a cache of kind {kind.__name__}, which isn't moved: only full "
            "attention's, sliding windows', MLA's and states are; serve this model without the "
            "connector"
        )
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise InvalidArgument(
            f"the cache of layer `{name}` lies in host memory or is rebuilt from another, which "
            "isn't moved; start vLLM without HiSparse"
        )
    if kind is caches.SlidingWindowSpec:
        if spec.sliding_window < 2:
            raise InvalidArgument(
                f"layer `{name}` has a window of {spec.sliding_window} tokens, expected 2 or more; "
                "serve this model without the connector"
            )
        if getattr(spec, "extra_retained_tokens", 0):
            raise InvalidArgument(
                f"layer `{name}` keeps {spec.extra_retained_tokens} tokens beyond its window for "
                "several draft modules, which isn't followed; start vLLM with "
                "--disable-hybrid-kv-cache-manager, or with one draft module"
            )
