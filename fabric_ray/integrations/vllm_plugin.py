"""What vLLM loads as a plug-in: it names the backend ``fabric``, and imports nothing else."""

from __future__ import annotations

from contextlib import suppress

from fabric_ray.integrations import framework

_MODULE = "fabric_ray.integrations.vllm"


def register() -> None:
    """Registers both ends with vLLM's factories; may be called again.

    vLLM finds it by the entry point ``vllm.general_plugins``; a trainer calls it itself.
    """
    factory = framework("vllm.distributed.weight_transfer.factory", "vllm")
    with suppress(ValueError):  # registered already
        factory.WeightTransferEngineFactory.register_engine(
            "fabric", _MODULE, "FabricWeightTransferEngine"
        )
    with suppress(ValueError):
        factory.WeightTransferTrainerFactory.register_engine(
            "fabric", _MODULE, "FabricTrainerWeightTransferEngine"
        )
