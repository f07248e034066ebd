"""What vLLM loads as a plug-in: it names the KV connector and the weight transfer backend
``fabric``, and imports nothing else."""

from __future__ import annotations

import logging
import re
from contextlib import suppress

from fabric_ray.errors import Unsupported
from fabric_ray.integrations import MissingFramework, framework

logger = logging.getLogger(__name__)

CONNECTOR = "FabricRayConnector"
"""The KV connector's name in vLLM and Ray, and its class in its module."""

CONNECTOR_MODULE = "fabric_ray.integrations.vllm_kv"

_MODULE = "fabric_ray.integrations.vllm"
# Of major version 0.
_OLDEST, _NEWEST = 30, 33


def check_version() -> None:
    """
    Raises:
        Unsupported: this vLLM has another interface for weight transfer.
        MissingFramework: there is no vLLM.
    """
    version = framework("vllm.version", "vllm").__version__
    minor = re.match(r"0\.(\d+)(?=\D|$)", version)
    if minor is None or not _OLDEST <= int(minor[1]) <= _NEWEST:
        raise Unsupported(
            f"the weight transfer backend `fabric` does not fit this vLLM: got version {version}, "
            f"expected 0.{_OLDEST} to 0.{_NEWEST}; install one of these: pip install "
            f"'vllm>=0.{_OLDEST},<0.{_NEWEST + 1}'"
        )


def register() -> None:
    """Registers both ends with vLLM's factories; may be called again. A trainer calls it.

    Raises:
        Unsupported: this vLLM has another interface for weight transfer; the message names both
            versions.
    """
    check_version()
    factory = framework("vllm.distributed.weight_transfer.factory", "vllm")
    with suppress(ValueError):  # registered already
        factory.WeightTransferEngineFactory.register_engine(
            "fabric", _MODULE, "FabricWeightTransferEngine"
        )
    with suppress(ValueError):
        factory.WeightTransferTrainerFactory.register_engine(
            "fabric", _MODULE, "FabricTrainerWeightTransferEngine"
        )


def load() -> None:
    """The entry point ``vllm.general_plugins``: every vLLM process of this environment runs it.

    A vLLM that isn't supported goes on without the backend.
    """
    with suppress(MissingFramework, ValueError):  # there are no connectors; registered already
        connectors = framework("vllm.distributed.kv_transfer.kv_connector.factory", "vllm")
        connectors.KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    try:
        register()
    except Unsupported as error:
        logger.warning("the KV connector can be used, weight updates can't: %s", error)
