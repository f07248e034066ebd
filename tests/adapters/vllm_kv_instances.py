"""Instances of vLLM for its KV connector: its scheduler, connectors for every rank, real caches.

What stands for the model writes to the pages what can be told of a token: its id, its place, its
layer and head. vLLM's own parts schedule, allocate, drive the connectors and gather their reports.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from tests.kv_pages import attention, by_rows, latent

LAYERS, HEADS, HEAD, LATENT = 3, 4, 8, 24

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
_DEEPSEEK = {
    **_LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": LATENT - 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": LAYERS,
}


@cache
def model(mla: bool) -> ModelConfig:
    """vLLM's description of a small model, from a configuration as Hugging Face has them."""
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(_DEEPSEEK if mla else _LLAMA))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )


def config(role: str, **options: Any) -> VllmConfig:
    """An instance's configuration.

    Args:
        role: ``kv_producer`` or ``kv_consumer``.
        options: ``tp``, ``mla``, ``block`` (tokens), ``chunk`` (tokens of a step), ``policy`` for
            loads that fail, ``model`` and other fields of the connector's configuration.
    """
    tp, chunk = options.pop("tp", 1), options.pop("chunk", 64)
    mla, block = options.pop("mla", False), options.pop("block", 8)
    policy = options.pop("policy", "fail")
    extra = {"model": "small", "terms": {"beat": 0.1, "silence": 2.0}, **options}
    made = VllmConfig(
        model_config=copy.deepcopy(model(mla)),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=chunk,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(
            kv_connector="FabricRayConnector",
            kv_connector_module_path="fabric_ray.integrations.vllm_kv",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
    )
    # Set here: vLLM refuses more ranks than there are GPUs.
    made.parallel_config.tensor_parallel_size = tp
    return made


def value(token: int, place: int, layer: int, head: int) -> float:
    """What a page holds of a token."""
    return float(token + 1000 * place + 600_000 * layer + 2_000_000 * head)


class Instance:
    """vLLM without a model: one process, with a connector for each rank as workers have them."""

    def __init__(
        self,
        vllm: VllmConfig,
        *,
        layout: str = "LBHNC",
        blocks: int = 24,
        kernel_block: int | None = None,
    ) -> None:
        init_none_hash(sha256)
        self.tp = vllm.parallel_config.tensor_parallel_size
        self.mla = vllm.model_config.use_mla
        self.block = vllm.cache_config.block_size
        vllm.cache_config.num_gpu_blocks = blocks
        names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        held = 1 if self.mla else max(1, HEADS // self.tp)
        if self.mla:
            spec: Any = MLAAttentionSpec(
                block_size=self.block, num_kv_heads=1, head_size=LATENT, dtype=torch.float32
            )
        else:
            spec = FullAttentionSpec(
                block_size=self.block, num_kv_heads=held, head_size=HEAD, dtype=torch.float32
            )
        order = KVCacheLayout[layout]
        size = spec.page_size_bytes * blocks * LAYERS
        layer_stride, block_stride, *_ = compute_layout_strides(spec, blocks, LAYERS, order)
        tensor = KVCacheTensor(
            size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride
        )
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers: list[ActiveKVConnector] = []
        for rank in range(self.tp):
            raw = torch.full((size,), 0x5A, dtype=torch.int8)
            views = create_kv_cache_views(raw, spec, blocks, order, tensor, kernel_block)
            self.caches.append(dict(zip(names, views, strict=True)))
            own = copy.deepcopy(vllm)
            own.parallel_config.rank = rank
            own.compilation_config.static_forward_context = {
                name: latent(view, LATENT - 8) if self.mla else attention(view, held, by_rows)
                for name, view in self.caches[rank].items()
            }
            connector = KVConnectorFactory.create_connector(own, KVConnectorRole.WORKER, kv)
            # What `ensure_kv_transfer_initialized` does in each worker's process.
            kv_transfer_state._KV_CONNECTOR_AGENT = connector
            self.workers.append(ActiveKVConnector(own, self.caches[rank]))
        self.scheduler = Scheduler(vllm, kv, StructuredOutputManager(vllm), block_size=self.block)
        handshakes = {
            (0, rank): worker.kv_connector.get_handshake_metadata()
            for rank, worker in enumerate(self.workers)
        }
        if all(handshakes.values()):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.gather = KVOutputAggregator.from_connector(self.scheduler.connector, self.tp)
        self.pages = kernel_block or self.block
        self.free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        self.ended: dict[str, Any] = {}
        """Outputs of requests that are over."""
        self.computed: dict[str, int] = {}
        """Tokens of each request's prompt that were computed here."""
        self.dies_at: tuple[str, int] | None = None
        self.hasher = get_request_block_hasher(self.block, sha256)

    def add(self, number: str, prompt: list[int], params: dict[str, Any], tokens: int = 3) -> None:
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        request = Request(number, list(prompt), sampling, None, block_hasher=self.hasher)
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
        """Rank, layer, head and token of what isn't in the pages of a request as it should."""
        table = self.table(number)
        return [
            (rank, layer, head, place)
            for rank in range(self.tp)
            for layer in range(LAYERS)
            for head in self._heads(rank)
            for place, token in enumerate(prompt)
            if not self._at(rank, layer, head, table, place)
            .eq(value(token, place, layer, head))
            .all()
        ]

    def table(self, number: str) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(number)
        return list(table)

    def _heads(self, rank: int) -> range:
        shards = 1 if self.mla else min(self.tp, HEADS)
        held = 1 if self.mla else HEADS // shards
        first = rank * shards // self.tp * held
        return range(first, first + held)

    def _at(self, rank: int, layer: int, head: int, table: list[int], place: int) -> torch.Tensor:
        cache = self.caches[rank][f"model.layers.{layer}.self_attn.attn"]
        block, inside = divmod(place, self.block)
        page = table[block] * (self.block // self.pages) + inside // self.pages
        return cache[page, head - self._heads(rank)[0], inside % self.pages]

    def _forward(self, output: Any) -> None:
        passes = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        old = output.scheduled_cached_reqs
        passes += zip(old.req_ids, old.num_computed_tokens, strict=True)
        for layer in range(LAYERS):
            for number, done in passes:
                count = output.num_scheduled_tokens[number]
                request = self.scheduler.requests[number]
                if layer == 0 and done < request.num_prompt_tokens:
                    self.computed[number] = self.computed.get(number, 0) + count
                tokens = request.all_token_ids
                table = self.table(number)
                for rank in range(self.tp):
                    for head in self._heads(rank):
                        for place in range(done, done + count):
                            at = self._at(rank, layer, head, table, place)
                            at.fill_(value(tokens[place], place, layer, head))
            self.after(layer)
            for rank, worker in enumerate(self.workers):
                name = f"model.layers.{layer}.self_attn.attn"
                worker.kv_connector.save_kv_layer(name, self.caches[rank][name], None)

    def after(self, layer: int) -> None:
        """Called when a layer is computed, before the connectors are told."""

    def _sampled(self, number: str) -> list[int]:
        request = self.scheduler.requests[number]
        whole = request.num_computed_tokens >= request.num_tokens
        return [7] if whole else []
