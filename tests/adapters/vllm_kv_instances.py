"""Instances of vLLM for its KV connector: its scheduler, connectors for every rank, real caches.

What stands for the model writes to the pages what can be told of a token: its id, its place, its
layer and head. vLLM's own parts schedule, allocate, drive the connectors and gather their reports.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_planning import (
    _project_kv_cache_groups_to_worker,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.utils import allocate_kv_cache

from tests.adapters.vllm_kv_configs import HEAD, HEADS, LATENT, LAYERS
from tests.kv_pages import attention, by_rows, latent

CONV, KEYS = 3, 2
"""Rows of the last inputs of a recurrent layer's convolution, and elements of its heads' keys."""

FILL = 0x5A
"""Bytes of memory that was never written."""


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def value(token: int, place: int, layer: int, head: int) -> float:
    """What a page holds of a token."""
    return float(token + 1000 * place + 600_000 * layer + 2_000_000 * head)


def state(tokens: Sequence[int], layer: int, heads: range) -> torch.Tensor:
    """What a gated delta net's state is after these tokens: of each row of its convolution the
    queries, keys and values of the heads, then the state of the heads."""
    found = 0
    for token in tokens:
        found = (31 * found + token + 1) % 65_521
    of = torch.tensor([float(found + 100_000 * layer + 1_000_000 * head) for head in heads])
    rows = [
        (of + 0.25 * part + 0.03125 * row).repeat_interleave(width)
        for row in range(CONV)
        for part, width in enumerate((KEYS, KEYS, HEAD))
    ]
    return torch.cat([*rows, (of + 0.75).repeat_interleave(HEAD * KEYS)])


@dataclass(frozen=True)
class Layer:
    """A layer of the model that isn't there."""

    window: int | None = None
    """Tokens that a token sees, itself included; ``None`` for all before it."""
    head: int = HEAD
    """Elements of a key, and of a value."""
    reads: int | None = None
    """The layer whose cache it uses."""
    indexer: bool = False
    """Whether it is the cache of a sparse attention's indexer, as DeepSeek-V3.2 has them."""
    name: str | None = None
    """As vLLM has it, where it isn't that of an attention layer of this number."""
    state: bool = False
    """Whether it is recurrent: a block has the state after its last token."""


class Instance:
    """vLLM without a model: one process, with a connector for each rank as workers have them."""

    def __init__(
        self,
        vllm: VllmConfig,
        *,
        layers: Sequence[Layer] = (Layer(),) * LAYERS,
        layout: str = "LBHNC",
        blocks: int = 24,
        kernel_block: int | None = None,
    ) -> None:
        init_none_hash(sha256)
        self.tp = vllm.parallel_config.tensor_parallel_size
        self.pp = vllm.parallel_config.pipeline_parallel_size
        self.mla = vllm.model_config.use_mla
        self.block = vllm.cache_config.block_size
        self.state_block = vllm.cache_config.mamba_block_size
        self.mode = vllm.cache_config.mamba_cache_mode
        self.layers = layers
        self.names = [layer.name or name_of(i) for i, layer in enumerate(layers)]
        self.number = {name: i for i, name in enumerate(self.names)}
        vllm.cache_config.num_gpu_blocks = vllm.cache_config.num_gpu_blocks_override = blocks
        vllm.cache_config.kv_cache_layout = layout
        held = 1 if self.mla else max(1, HEADS // self.tp)
        # vLLM's own grouping and placement of layers.
        specs = {self.names[i]: self._spec(i, held) for i in self._own()}
        groups = get_kv_cache_groups(vllm, specs)
        stages = [
            get_kv_cache_config_from_groups(vllm, self._of_stage(groups, specs, stage), 1 << 40)
            for stage in range(self.pp)
        ]
        whole = [group.kv_cache_spec.block_size for group in groups]
        kernel_blocks = [
            size if isinstance(group.kv_cache_spec, MambaSpec) else kernel_block or size
            for size, group in zip(whole, groups, strict=True)
        ]
        group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        self.group = [group_of[self.names[self._source(i)]] for i in range(len(layers))]
        """The cache group of each layer."""
        self.blocks = [groups[i].kv_cache_spec.block_size for i in self.group]
        """Tokens of a block of each layer."""
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers: list[ActiveKVConnector] = []
        for rank in range(self.tp * self.pp):
            kv = stages[rank // self.tp]
            views = allocate_kv_cache(kv, torch.device("cpu"), KVCacheLayout[layout], kernel_blocks)
            for view in views.values():
                raw = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
                raw.fill_(FILL)
            here = [i for i in range(len(layers)) if rank in self._ranks(i)]
            for i in here:
                views[self.names[i]] = views[self.names[self._source(i)]]
            self.caches.append(views)
            own = copy.deepcopy(vllm)
            own.parallel_config.rank = rank
            own.compilation_config.static_forward_context = {
                name: self._module(name, view, held) for name, view in views.items()
            }
            for i in here:
                module = own.compilation_config.static_forward_context[self.names[i]]
                reads = layers[i].reads
                target = None if reads is None else self.names[reads]
                module.kv_sharing_target_layer_name = target
            connector = KVConnectorFactory.create_connector(own, KVConnectorRole.WORKER, kv)
            # What `ensure_kv_transfer_initialized` does in each worker's process.
            kv_transfer_state._KV_CONNECTOR_AGENT = connector
            self.workers.append(ActiveKVConnector(own, self.caches[rank]))
        kv = generate_scheduler_kv_cache_config(stages)
        block, hash_block = resolve_kv_cache_block_sizes(kv, vllm)
        self.scheduler = Scheduler(
            vllm, kv, StructuredOutputManager(vllm), block_size=block, hash_block_size=hash_block
        )
        handshakes = {
            divmod(rank, self.tp): worker.kv_connector.get_handshake_metadata()
            for rank, worker in enumerate(self.workers)
        }
        if all(handshakes.values()):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.gather = KVOutputAggregator.from_connector(self.scheduler.connector, self.tp * self.pp)
        self.free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        self.ended: dict[str, Any] = {}
        """Outputs of requests that are over."""
        self.computed: dict[str, int] = {}
        """Tokens of each request's prompt that were computed here."""
        self.misread: list[tuple[str, int, int]] = []
        """Request, layer and token of what a step read and wasn't as it should."""
        self.dies_at: tuple[str, int] | None = None
        self.hasher = get_request_block_hasher(hash_block, sha256)

    def _stage(self, layer: int) -> int:
        """The stage of the pipeline that computes a layer; drafts are the last one's."""
        name = self.names[self._source(layer)]
        if name.startswith("draft_model."):
            return self.pp - 1
        own = [self.names[i] for i in self._own()]
        numbers = [int(n.split(".")[2]) for n in own if n.startswith("model.")]
        return int(name.split(".")[2]) * self.pp // (max(numbers) + 1)

    def _ranks(self, layer: int) -> range:
        """The workers that have a layer."""
        first = self._stage(layer) * self.tp
        return range(first, first + self.tp)

    def _of_stage(self, groups: list[Any], specs: dict[str, Any], stage: int) -> list[Any]:
        own = (i for i in self._own() if self._stage(i) == stage)
        names = [self.names[i] for i in own]
        return _project_kv_cache_groups_to_worker(groups, {name: specs[name] for name in names})

    def _own(self) -> Iterator[int]:
        return (i for i, layer in enumerate(self.layers) if layer.reads is None)

    def _source(self, layer: int) -> int:
        reads = self.layers[layer].reads
        return layer if reads is None else reads

    def _module(self, name: str, view: torch.Tensor, held: int) -> Any:
        if self.layers[self.number[name]].indexer:
            # vLLM's have no method that writes: a kernel of its own does.
            backend = SimpleNamespace(get_name=lambda: "DEEPSEEK_V32_INDEXER")
            return SimpleNamespace(attn_backend=backend, kv_cache=view.squeeze(1))
        return latent(view, LATENT - 8) if self.mla else attention(view, held, by_rows)

    def _spec(self, layer: int, held: int) -> Any:
        kind = self.layers[layer]
        if kind.state:
            # As vLLM has it, of the size of an attention layer's page.
            return MambaSpec(
                block_size=self.state_block,
                shapes=((CONV, held * (2 * KEYS + HEAD)), (held, HEAD, KEYS)),
                dtypes=(torch.float32, torch.float32),
                page_size_padded=self.block * held * 2 * HEAD * 4,
                mamba_cache_mode=self.mode,
                mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            )
        common: dict[str, Any] = {"block_size": self.block, "dtype": torch.float32}
        if kind.indexer:
            role = SparseCacheRole.INDEXER
            return MLAAttentionSpec(num_kv_heads=1, head_size=kind.head, cache_role=role, **common)
        if self.mla:
            return MLAAttentionSpec(num_kv_heads=1, head_size=LATENT, **common)
        common |= {"num_kv_heads": held, "head_size": kind.head}
        if kind.window is None:
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(sliding_window=kind.window, **common)

    def add(
        self,
        number: str,
        prompt: list[int],
        params: dict[str, Any],
        tokens: int = 3,
        **fields: Any,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        request = Request(number, list(prompt), sampling, None, block_hasher=self.hasher, **fields)
        self.scheduler.add_request(request)

    def abort(self, number: str) -> None:
        self.scheduler.finish_requests([number], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step of vLLM's engine core and its workers."""
        output = self.scheduler.schedule()
        numbers = list(output.num_scheduled_tokens)
        result = []
        for worker in self.workers:
            worker.pre_forward(output)
        if numbers:
            self._forward(output)
        for worker in self.workers:
            worker.finish_forward()
            report = worker.post_forward(output.finished_req_ids)
            made = ModelRunnerOutput(numbers, {n: i for i, n in enumerate(numbers)})
            made.sampled_token_ids = [self._sampled(n) for n in numbers]
            made.kv_connector_output = report
            result.append(made)
        outputs = self.scheduler.update_from_output(output, self.gather.aggregate(result))
        for client in outputs.values():
            for each in client.outputs:
                if each.finished:
                    self.ended[each.request_id] = each

    def close(self) -> None:
        for worker in self.workers:
            worker.kv_connector.shutdown()

    def wrong(self, number: str, prompt: list[int]) -> list[tuple[int, int, int, int]]:
        """Rank, layer, head and token of what isn't in the pages of a request as it should. Of
        layers with windows, what the last token of the prompt sees."""
        tables = self.tables(number)
        found = []
        for layer, kind in enumerate(self.layers):
            if kind.state:
                ranks = self._ranks(layer)
                bad = [r for r in ranks if not self._has_state(r, layer, number, prompt)]
                found += [(rank, layer, 0, len(prompt)) for rank in bad]
                continue
            first = 0 if kind.window is None else max(0, len(prompt) - kind.window)
            places = range(first, len(prompt))
            for rank in self._ranks(layer):
                bad = self._differs(rank, layer, tables[self.group[layer]], prompt, places)
                found += [
                    (rank, layer, head, place)
                    for column, head in enumerate(self._heads(rank))
                    for row, place in enumerate(places)
                    if bad[row, column]
                ]
        return found

    def table(self, number: str) -> list[int]:
        """Of an instance with one cache group."""
        (table,) = self.tables(number)
        return table

    def tables(self, number: str) -> list[list[int]]:
        return [list(each) for each in self.scheduler.kv_cache_manager.get_block_ids(number)]

    def null_block_is_untouched(self) -> bool:
        """Whether nothing was written to block 0, which stands for blocks that were taken back."""
        for caches in self.caches:
            for layer, pages in caches.items():
                if not (
                    pages[: self.pages_of_block(layer)].contiguous().view(torch.uint8) == FILL
                ).all():
                    return False
        return True

    def pages_of_block(self, name: str) -> int:
        """Of a layer's cache: kernels may have smaller blocks than the scheduler."""
        number = self.number[name]
        tokens = self.caches[self._ranks(number)[0]][name].shape[2]
        return 1 if self.layers[number].state else self.blocks[number] // tokens

    def _state(self, rank: int, layer: int, number: str, tokens: int) -> torch.Tensor:
        """The state of a request after so many of its tokens."""
        table = self.tables(number)[self.group[layer]]
        block = table[-(-tokens // self.blocks[layer]) - 1]
        assert block, f"{number} has no state after {tokens} tokens"
        return self.caches[rank][self.names[layer]][block, 0, 0].view(torch.float32)

    def _has_state(self, rank: int, layer: int, number: str, tokens: Sequence[int]) -> bool:
        held = self._state(rank, layer, number, len(tokens))
        return torch.equal(held, state(tokens, layer, self._heads(rank)))

    def _heads(self, rank: int) -> range:
        shards = 1 if self.mla else min(self.tp, HEADS)
        held = 1 if self.mla else HEADS // shards
        first = rank % self.tp * shards // self.tp * held
        return range(first, first + held)

    def _at(self, rank: int, layer: int, head: int, table: list[int], place: int) -> torch.Tensor:
        cache = self.caches[rank][self.names[layer]]
        pages, inside = self._rows(rank, layer, table, [place])
        return cache[pages[0], head - self._heads(rank)[0], inside[0]]

    def _rows(
        self, rank: int, layer: int, table: list[int], places: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of tokens, and their places in them."""
        tokens = self.caches[rank][self.names[layer]].shape[2]
        block = self.blocks[layer]
        at = torch.tensor(list(places), dtype=torch.long)
        blocks = torch.tensor(table, dtype=torch.long)[at // block]
        return blocks * (block // tokens) + at % block // tokens, at % tokens

    def _values(
        self, rank: int, layer: int, tokens: Sequence[int], places: Sequence[int]
    ) -> torch.Tensor:
        """[tokens, heads] of what pages hold of tokens."""
        source = self._source(layer)
        return torch.tensor(
            [[value(tokens[p], p, source, head) for head in self._heads(rank)] for p in places]
        )

    def _differs(
        self, rank: int, layer: int, table: list[int], tokens: Sequence[int], places: Sequence[int]
    ) -> torch.Tensor:
        """[tokens, heads]: whether the content isn't what it should be."""
        if not len(places):
            return torch.zeros(0, len(self._heads(rank)), dtype=torch.bool)
        pages, inside = self._rows(rank, layer, table, places)
        held = self.caches[rank][self.names[layer]][pages, :, inside]
        return (held != self._values(rank, layer, tokens, places).unsqueeze(-1)).any(-1)

    def _forward(self, output: Any) -> None:
        passes = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        old = output.scheduled_cached_reqs
        passes += zip(old.req_ids, old.num_computed_tokens, strict=True)
        for layer, kind in enumerate(self.layers):
            for number, done in passes:
                count = output.num_scheduled_tokens[number]
                request = self.scheduler.requests[number]
                if layer == 0 and done < request.num_prompt_tokens:
                    self.computed[number] = self.computed.get(number, 0) + count
                if kind.state:
                    self._renew(layer, number, done, done + count)
                elif kind.reads is None:
                    self._write(layer, number, range(done, done + count))
            for number, done in passes if not kind.state else ():
                self._read(layer, number, done)
            self.after(layer)
            name = self.names[layer]
            for rank in () if kind.indexer or kind.state else self._ranks(layer):
                view = self.caches[rank][name]
                self.workers[rank].kv_connector.save_kv_layer(name, view, None)

    def _renew(self, layer: int, number: str, done: int, end: int) -> None:
        """Reads the state after ``done`` tokens, and writes the one after ``end``."""
        tokens = self.scheduler.requests[number].all_token_ids
        for rank in self._ranks(layer):
            if done and not self._has_state(rank, layer, number, tokens[:done]):
                self.misread.append((number, layer, done))
            now = state(tokens[:end], layer, self._heads(rank))
            self._state(rank, layer, number, end).copy_(now)

    def _write(self, layer: int, number: str, places: range) -> None:
        tokens = self.scheduler.requests[number].all_token_ids
        table = self.tables(number)[self.group[layer]]
        for rank in self._ranks(layer):
            pages, inside = self._rows(rank, layer, table, places)
            values = self._values(rank, layer, tokens, places)
            self.caches[rank][self.names[layer]][pages, :, inside] = values.unsqueeze(-1)

    def _read(self, layer: int, number: str, done: int) -> None:
        """What the first token of a step sees before it."""
        window = self.layers[layer].window
        places = range(0 if window is None else max(0, done - window + 1), done)
        tokens = self.scheduler.requests[number].all_token_ids
        table = self.tables(number)[self.group[layer]]
        for rank in self._ranks(layer):
            bad = self._differs(rank, layer, table, tokens, places).any(-1)
            self.misread += [
                (number, layer, place) for place, b in zip(places, bad, strict=True) if b
            ]

    def after(self, layer: int) -> None:
        """Called when a layer is computed, before the connectors are told."""

    def _sampled(self, number: str) -> list[int]:
        request = self.scheduler.requests[number]
        whole = request.num_computed_tokens >= request.num_tokens
        return [7] if whole else []
