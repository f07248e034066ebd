"""The trainers' end of the backend ``fabric`` in SkyRL; see :mod:`fabric_ray.integrations.skyrl`.

Imports vLLM, as SkyRL's own does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar
from urllib.parse import urlsplit

from typing_extensions import Self

from fabric_ray.errors import Unsupported
from fabric_ray.integrations import framework
from fabric_ray.integrations.skyrl import BACKEND
from fabric_ray.integrations.vllm import (
    FabricTrainerInitInfo,
    FabricTrainerWeightTransferEngine,
)
from fabric_ray.integrations.vllm_control import ServerGroup, control_at
from fabric_ray.integrations.vllm_push import shards_of

logger = logging.getLogger(__name__)

_ENGINE = "FabricSkyrlTrainerEngine"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass
class FabricSkyrlInitInfo(FabricTrainerInitInfo):
    """How a trainer of SkyRL opens its end."""

    backend: ClassVar[str] = "fabric_skyrl"

    servers: tuple[str, ...] = ()
    """URLs of the inference servers."""


def init_info(
    *, ie_cfg: Any, rank: int, inference_world_size: int, server_urls: Sequence[str], **_: Any
) -> FabricSkyrlInitInfo:
    """From what SkyRL knows of a trainer and its servers.

    Raises:
        Unsupported: the servers have a draft model or a KV connector.
    """
    if ie_cfg.speculative_config is not None:
        raise Unsupported(
            f"the weight sync backend `{BACKEND}` updates no draft model: got a "
            "speculative_config; leave it out, or use the backend `nccl` or `delta`"
        )
    if ie_cfg.enable_pd or "kv_transfer_config" in dict(ie_cfg.engine_init_kwargs or {}):
        raise Unsupported(
            f"the weight sync backend `{BACKEND}` discards cached pages, which servers that SkyRL "
            "has paused do not do while a KV connector loads some: got enable_pd or a "
            "kv_transfer_config; leave them out, or use the backend `nccl`"
        )
    factory = framework("vllm.distributed.weight_transfer.factory", "vllm")
    trainers = factory.WeightTransferTrainerFactory
    if FabricSkyrlInitInfo.backend not in trainers._registry:
        trainers.register_engine(FabricSkyrlInitInfo.backend, __name__, _ENGINE)
    return FabricSkyrlInitInfo(rank=rank, workers=inference_world_size, servers=tuple(server_urls))


class FabricSkyrlTrainerEngine(FabricTrainerWeightTransferEngine):
    """Pushes the shards of a module that FSDP2 has divided, without gathers. Of SkyRL's other
    sources rank 0 streams whole tensors, as they are gathered.

    Servers that SkyRL has paused stay paused. Of a module with adapters nothing is sent: SkyRL
    writes them to files.
    """

    init_info_cls = FabricSkyrlInitInfo

    # What SkyRL's worker asks of an engine.
    skyrl_handles_prefix_cache_reset = True
    """An update discards all that was computed with the old weights."""
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = True
    skyrl_draft_source: None = None

    _adapters = False

    @classmethod
    def trainer_init(
        cls, init_info: FabricSkyrlInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """As for :class:`FabricTrainerWeightTransferEngine`."""
        if getattr(getattr(source, "model", None), "peft_config", None):
            made: Self = cls(client=client, source=source, is_sender=init_info.is_sender)
            made._adapters = True
            return made
        servers = _Servers(client, init_info.servers, init_info.timeout)
        source = _with_shards(source, init_info.rank)
        made = super().trainer_init(init_info, client=servers, source=source)
        logger.info(
            "weights go by fabric-ray to %d workers of %d servers: %s",
            init_info.workers,
            len(init_info.servers),
            "this rank writes its shards" if made._sharded else "rank 0 streams whole tensors",
        )
        return made

    def send_weights(self, weight_version: str | None = None) -> None:
        """As for :class:`FabricTrainerWeightTransferEngine`.

        Raises:
            Unsupported: the module has adapters.
        """
        if self._adapters:
            raise Unsupported(
                "the module has PEFT adapters, which SkyRL writes to files; train without LoRA, or "
                "let SkyRL send the adapters"
            )
        try:
            super().send_weights(weight_version)
        finally:
            if self._sharded is not None:
                # SkyRL may bring the module to the host until the next update.
                self._sharded.release()


def _with_shards(source: Any, rank: int) -> Any:
    """The module of a source, if its shards can be sent, and are what the source gathers."""
    sources = import_module("skyrl.backends.skyrl_train.weight_sync.sources")
    # A subclass may give other tensors than its module's. Shards have the module's names.
    if type(source) is not sources.FsdpWeightSource or source.weight_prefix:
        return source
    module = source.model
    return source if shards_of(module, rank) is None else module


class _Servers(ServerGroup):
    """SkyRL's client, and its servers. Those that SkyRL pauses around an update stay paused."""

    resumed_by = "SkyRL"

    def __init__(self, client: Any, urls: Sequence[str], timeout: float) -> None:
        super().__init__({url: control_at(url, timeout) for url in urls}, timeout)
        away = [url for url in urls if urlsplit(url).hostname not in _LOOPBACK]
        self.base_url = (away or urls)[0]
        """One of them, by which they reach this host."""
        self.close = client.close
        for name in (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ):
            setattr(self, name, getattr(client, name))
