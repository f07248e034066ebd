"""A KV connector for vLLM: prefill workers push blocks into decode workers', layer by layer.

vLLM loads it by name::

    --kv-transfer-config '{"kv_connector": "FabricRayConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "fabric_ray.integrations.vllm_kv"}'

A decoder's scheduler gives a request blocks, its workers ask the prefiller's workers to fill them,
and these write each layer as it is computed (fabric-lib, section 4). The request waits outside of
the decoder's batches until all blocks are there. What doesn't come is reported as invalid blocks,
and vLLM fails the request or computes it itself, by its ``kv_load_failure_policy`` (RS-1). Blocks
of either end are given back when nothing touches them any more (MR-1).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations import framework
from fabric_ray.integrations.vllm_kv_config import KvConnectorConfig
from fabric_ray.integrations.vllm_kv_content import model_content
from fabric_ray.integrations.vllm_kv_fetch import Fetcher
from fabric_ray.integrations.vllm_kv_groups import layer_groups
from fabric_ray.integrations.vllm_kv_layout import Shards, WorkerCache, worker_cache
from fabric_ray.integrations.vllm_kv_plan import Step
from fabric_ray.integrations.vllm_kv_probe import PageForm, page_form
from fabric_ray.integrations.vllm_kv_scheduler import KvScheduler, check
from fabric_ray.integrations.vllm_kv_send import Sender
from fabric_ray.integrations.vllm_kv_stream import Stream
from fabric_ray.kvcache import Decoder, Prefiller, RankCache

if TYPE_CHECKING:
    import torch

_base: Any = framework("vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm")
_caches: Any = framework("vllm.v1.kv_cache_interface", "vllm")
_envs: Any = framework("vllm.envs", "vllm")
_output: Any = framework("vllm.v1.core.sched.output", "vllm")
# vLLM 0.29 doesn't ask where hits are from.
_hit_sources: Any = getattr(_base, "CacheHitSource", None)
# vLLM before 0.32 doesn't tell all that becomes of several cache groups, so it is to have one:
# without the mark it turns its hybrid manager off.
_takes_groups = all(
    hasattr(owner, name)
    for owner, name in (
        (_base, "SupportsHMA"),
        (_base.KVConnectorBase_V1, "get_transfer_results"),
        (_base.KVConnectorBase_V1, "bind_gpu_block_pool"),
        (getattr(_output, "KVConnectorBlockState", None), "get_block_ids"),
    )
)
_bases: Any = (_base.KVConnectorBase_V1, *((_base.SupportsHMA,) if _takes_groups else ()))

# Seconds of an idle step in which nothing is over. A request that comes meanwhile waits so long.
_PAUSE = 0.002


@dataclass
class FabricMetadata(_base.KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers of a step."""

    step: Step = field(default_factory=Step)


@dataclass
class FabricHandshake(_base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a prefill worker tells its scheduler when its caches are registered."""

    offer: bytes


@dataclass
class FabricReport(getattr(_base, "KVConnectorWorkerMetadata", object)):  # type: ignore[misc]
    """What workers tell the scheduler after a step."""

    freed: Counter[str]
    """How many of them have newly found that nothing reads a finished request's blocks."""

    def aggregate(self, other: FabricReport) -> FabricReport:
        return FabricReport(self.freed + other.freed)


class FabricRayConnector(*_bases):  # type: ignore[misc]
    """Either half, by its role: one lives in the scheduler's process, one in each worker's.

    Raises:
        InvalidArgument: a configuration that there isn't, or caches that it doesn't move.
    """

    _cache_hit_source = _hit_sources and _hit_sources.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._config = KvConnectorConfig.of(transfer.kv_connector_extra_config)
        check(transfer, vllm_config)
        self._groups = layer_groups(kv_cache_config, _caches)
        self._by_request = len(self._groups) > 1 or self._groups[0].takes_back
        if self._by_request and not _takes_groups:
            raise InvalidArgument(
                "this version of vLLM doesn't tell connectors what becomes of several cache groups "
                "or of windows or states; start it with --disable-hybrid-kv-cache-manager, or use "
                "vLLM 0.32 or later"
            )
        if vllm_config.model_config.enable_sleep_mode and not hasattr(
            _base.KVConnectorBase_V1, "unregister_kv_caches"
        ):
            raise InvalidArgument(
                "this version of vLLM doesn't tell connectors that it sleeps, which unmaps the "
                "caches; leave --enable-sleep-mode out, or use vLLM 0.33 or later"
            )
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            raise InvalidArgument(
                "calculate_kv_scales has each server scale its pages in its own way, which the "
                "other end can't read; leave it out, and use a checkpoint with scales"
            )
        if getattr(vllm_config.cache_config, "use_replayssm", False):
            raise InvalidArgument(
                "use_replayssm keeps states that lack their last inputs, which the other end can't "
                "read; leave it out"
            )
        if self._config.offer_file and vllm_config.parallel_config.data_parallel_size_local > 1:
            raise InvalidArgument(
                "offer_file names one file, and each data parallel rank of this server has an "
                "offer of its own; start a server for each rank"
            )
        parallel = vllm_config.parallel_config
        stages = parallel.pipeline_parallel_size
        if stages > 1 and not hasattr(
            _base.KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware"
        ):
            raise InvalidArgument(
                "this version of vLLM doesn't tell connectors of the stages of a pipeline; leave "
                "--pipeline-parallel-size out, or use vLLM 0.32 or later"
            )
        # vLLM 0.33 has no other executor of Ray's workers.
        reports_all = getattr(_envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
        if stages > 1 and parallel.distributed_executor_backend == "ray" and not reports_all:
            raise InvalidArgument(
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 has vLLM's scheduler hear of the last stage of "
                "a pipeline only, so that it would wait for pages of the others for ever; leave it "
                "out"
            )
        # Caches of states or of several precisions, in the same memory.
        self._zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
        self._engine_id = str(transfer.engine_id)
        self._scheduler: KvScheduler | None = None
        if role == _base.KVConnectorRole.SCHEDULER:
            self._scheduler = KvScheduler(
                groups=self._groups,
                engine=self._engine_id,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                # vLLM 0.29 has no drafts that read further than one token.
                recomputed=max(
                    int(any(group.is_state for group in self._groups)),
                    getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1,
                ),
                ranks=vllm_config.parallel_config.tensor_parallel_size * stages,
                # vLLM's first runner does it when connectors have heard of the step.
                zeroes=self._zeroes and vllm_config.use_v2_model_runner,
                config=self._config,
            )
        self._is_last_stage = parallel.rank // parallel.tensor_parallel_size == stages - 1
        self._released = threading.Event()
        self._freed: Counter[str] = Counter()
        self._engines: list[TransferEngine] = []
        self._sender: Sender | None = None
        self._fetcher: Fetcher | None = None
        self._stream: Stream | None = None
        self._forms: dict[str, PageForm] = {}

    # A worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the caches, and opens the ends that the role needs.

        Raises:
            InvalidArgument: caches that can't be described.
        """
        self.unregister_kv_caches()
        shards = self._shards()
        layers = self._vllm_config.compilation_config.static_forward_context
        dtype = self._vllm_config.model_config.dtype
        cache = worker_cache(
            kv_caches,
            groups=self._groups,
            shards=shards,
            model=self._model(),
            form=lambda name: self._form(name, layers.get(name), kv_caches[name], dtype),
            shared={
                name: target
                for name in kv_caches
                if (target := getattr(layers.get(name), "kv_sharing_target_layer_name", None))
            },
        )
        self._kv_caches = kv_caches
        options: dict[str, Any] = {
            "name": self._name(),
            "terms": self._config.terms,
            "layouts": cache.layouts,
            "first_rank": shards.rank,
        }
        if self._kv_transfer_config.is_kv_producer:
            self._stream = Stream(cache.buffers[0].device)
            self._sender = Sender(
                Prefiller([self._rank_cache(cache, shards)], **options),
                cache,
                then=self._stream.then,
                lease=self._config.lease,
                on_release=self._released.set,
            )
        if self._kv_transfer_config.is_kv_consumer:
            self._fetcher = Fetcher(
                Decoder([self._rank_cache(cache, shards)], **options),
                cache,
                ranks=shards.ranks * self._vllm_config.parallel_config.pipeline_parallel_size,
                block_tokens=None if self._by_request else self._groups[0].block_tokens,
                timeout=self._config.timeout,
                zeroes=self._zeroes,
                on_release=self._released.set,
            )

    def _form(self, name: str, layer: Any, cache: torch.Tensor, dtype: torch.dtype) -> PageForm:
        """The form of a layer's pages, found once: caches come back from sleep before the scales
        with which a layer writes to them."""
        if name not in self._forms:
            self._forms[name] = page_form(name, layer, cache, dtype)
        return self._forms[name]

    def unregister_kv_caches(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._fetcher is not None:
            self._fetcher.close()
        if self._stream is not None:
            self._stream.close()
        for engine in self._engines:
            engine.close()
        self._engines, self._sender, self._fetcher, self._stream = [], None, None, None

    def restore_kv_caches(self) -> None:
        if not self._engines:
            self.register_kv_caches(self._kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Prefillers that sleep come back with another offer, which the scheduler wouldn't get."""
        return not kv_transfer_config.is_kv_producer

    def get_handshake_metadata(self) -> FabricHandshake | None:
        return None if self._sender is None else FabricHandshake(self._sender.offer())

    def handle_preemptions(self, kv_connector_metadata: FabricMetadata) -> None:
        if self._sender is not None and kv_connector_metadata.step.preempted:
            self._sender.preempted(kv_connector_metadata.step.preempted)

    def bind_connector_metadata(self, connector_metadata: FabricMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        step = connector_metadata.step
        if self._sender is not None:
            for failed in step.failed:
                self._sender.give_up(failed.request, failed.transfer, failed.why, held=failed.held)
            for request, transfer in step.finished:
                self._sender.hold(request, transfer)
            self._sender.renews = not step.is_starved
            self._sender.begin(step.ready)
        if self._fetcher is not None:
            self._fetcher.cancel(step.cancelled)
            self._fetcher.decline(step.declined)
            self._fetcher.renew(step.renewals)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Asks for the blocks of requests that wait; a step doesn't wait for them."""
        if self._fetcher is not None:
            self._fetcher.start(self._get_connector_metadata().step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests join a batch when all of their layers are there: nothing is left to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Has the layer's pages leave, once they are written."""
        # A layer of a microbatch isn't the layer of the step: pages leave after the pass (RS-1).
        if self._sender is not None and not self._vllm_config.parallel_config.use_ubatching:
            self._sender.layer(layer_name)

    def wait_for_save(self) -> None:
        """Ends the pass. Blocks stay until they have left, so nothing is waited for."""
        if self._sender is not None:
            # vLLM calls this too when its model has raised.
            self._sender.end(broken=sys.exc_info()[0] is not None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._sender is not None and not self._is_last_stage:
            # With drafts vLLM's first runner has no stage but theirs save; these are computed here.
            self.wait_for_save()
        self._released.clear()
        over = self._over()
        # While blocks are held, vLLM makes step after step: without a pause these keep a core busy.
        is_idle = self._get_connector_metadata().step.is_idle
        if not any(over) and is_idle and self._released.wait(_PAUSE):
            over = self._over()
        return over

    def _over(self) -> tuple[set[str] | None, set[str] | None]:
        sent = self._sender.sent() if self._sender is not None else None
        received = self._fetcher.received() if self._fetcher is not None else None
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received = self.get_finished(finished_req_ids)
        if _takes_groups:
            self._freed.update(sent or ())
            sent = None
        return _base.KVConnectorTransferResults(
            finished_sending=sent or set(),
            finished_recving=received or set(),
            failed_recving=self._fetcher.failed() if self._fetcher is not None else set(),
        )

    def build_connector_worker_meta(self) -> FabricReport | None:
        """Not by ``finished_sending``: that is for blocks which vLLM keeps, and it would go on with
        steps until it has heard of all."""
        freed, self._freed = self._freed, Counter()
        return FabricReport(freed) if freed else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._fetcher.invalid() if self._fetcher is not None else set()

    def shutdown(self) -> None:
        self.unregister_kv_caches()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Layers are announced from Python, between the pieces."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads first, where there are several: a rank's share of a block is one run of bytes."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # The scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        # Blocks are pinned where workers report by connector metadata that they are free.
        if _takes_groups:
            self._of_scheduler().pins.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._of_scheduler().queued(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._of_scheduler().matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> FabricMetadata:
        return FabricMetadata(self._of_scheduler().step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        scheduler = self._of_scheduler()
        if report := getattr(connector_output, "kv_connector_worker_meta", None):
            scheduler.freed(report.freed)
        scheduler.over(connector_output.finished_sending, connector_output.finished_recving)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler().finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._of_scheduler().busy

    def set_xfer_handshake_metadata(self, metadata: dict[int, FabricHandshake]) -> None:
        # vLLM before 0.32 knows no stages.
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): h for rank, h in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], FabricHandshake]
    ) -> None:
        offers = {worker: handshake.offer for worker, handshake in metadata.items()}
        offer = self._of_scheduler().offered(offers)
        if offer is not None and self._config.offer_file is not None:
            path = Path(self._config.offer_file)
            made = path.with_name(f"{path.name}.new")
            made.write_text(offer)
            made.replace(path)

    def _of_scheduler(self) -> KvScheduler:
        if self._scheduler is None:
            raise InvalidArgument("this is a worker's connector; ask the scheduler's")
        return self._scheduler

    def _rank_cache(self, cache: WorkerCache, shards: Shards) -> RankCache:
        # Each end has an engine of its own, for each takes messages.
        name = f"{self._name()}-{self._vllm_config.parallel_config.rank}"
        engine = TransferEngine(**{"name": name, **self._config.engine})
        self._engines.append(engine)
        regions = [engine.register(buffer) for buffer in cache.buffers]
        return RankCache(engine, cache.layouts[shards.rank], regions)

    def _shards(self) -> Shards:
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        model = self._vllm_config.model_config
        heads = 1 if model.use_mla else model.get_total_num_kv_heads()
        # vLLM 0.29 doesn't tell layers apart.
        architecture = getattr(model, "model_arch_config", None)
        by_layer = getattr(architecture, "per_layer_overrides", None) or ()
        vary = any("total_num_kv_heads" in layer for layer in by_layer)
        return Shards(
            ranks=ranks,
            rank=parallel.rank % ranks,
            shards=min(ranks, heads),
            held_heads=0 if vary else max(1, heads // ranks),
            is_stage=parallel.pipeline_parallel_size > 1,
        )

    def _model(self) -> str:
        model = self._vllm_config.model_config
        revision = f"@{model.revision}" if model.revision else ""
        return model_content(model, self._config.model or f"{model.model}{revision}")

    def _name(self) -> str:
        return f"vllm-{self._engine_id[:64]}"
