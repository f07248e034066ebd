"""One of several trainers that SkyRL's own code opens: ``python skyrl_trainer.py URLS OPTIONS RANK
RANKS PORT``, with the options ``streams``, whether the source has no shards, and ``config``, fields
of SkyRL's inference engine. Input and output are those of ``sharded_trainer.py``.

Of SkyRL's worker this leaves out the GPU: its module needs flash-attn.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist

from tests.adapters.vllm.sharded_trainer import run, sharded


def opened(urls: str, options: dict[str, Any], rank: int, module: Any) -> Any:
    """The engine that SkyRL's worker holds; as ``Worker.init_weight_sync_state`` opens it."""
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine
    from skyrl.train.config import InferenceEngineConfig

    class Streamed(FsdpWeightSource):
        """Might give other tensors than its module's."""

    servers = urls.split(",")
    config = {"weight_sync_backend": "fabric", **options["config"]}
    return build_trainer_engine(
        ie_cfg=InferenceEngineConfig(**config),
        colocate_all=False,
        rank=rank,
        inference_world_size=len(servers),
        source_factory=lambda dtype, _: (Streamed if options["streams"] else FsdpWeightSource)(
            module, dtype
        ),
        draft_source_factory=lambda _: object(),
        server_urls=servers,
        data_parallel_size=1,
    )


def main(urls: str, options: dict[str, Any], rank: int, ranks: int, port: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    run(lambda module: opened(urls, options, rank, module), lambda path: sharded(path, ranks))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
