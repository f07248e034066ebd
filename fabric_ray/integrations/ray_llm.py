"""A KV connector back end for Ray Serve LLM: decoders begin at once, and pages arrive as they are
computed.

Import it where the application is built, and name the connector in both configurations::

    from fabric_ray.integrations.ray_llm import build_pd_openai_app

    app = build_pd_openai_app({"prefill_config": ..., "decode_config": ...})

with ``kv_transfer_config: {kv_connector: FabricRayConnector, kv_role: kv_producer}`` for prefill,
and ``kv_consumer`` for decode. In YAML, ``import_path`` names this builder instead of Ray's.

Ray binds each request to a prefill replica, whose offer travels in its replica metadata. So the
decode replica's request can name its pages before the prefill has begun (Ray's quadrant of peer
binding and concurrent hand-off). Without this import Ray hands off after the prefill.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations import framework
from fabric_ray.integrations.vllm_plugin import CONNECTOR

_PACKAGE = "ray[serve,llm]==2.60.0"
_KV_TRANSFER = "ray.llm._internal.serve.engines.vllm.kv_transfer"
_base: Any = framework(f"{_KV_TRANSFER}.base", "serve", _PACKAGE)
_factory: Any = framework(f"{_KV_TRANSFER}.factory", "serve", _PACKAGE)

build_pd_openai_app: Any = framework("ray.serve.llm", "serve", _PACKAGE).build_pd_openai_app


class FabricRayConnectorBackend(_base.BaseConnectorBackend):  # type: ignore[misc]
    """Shapes the two requests of a prefill and its decoder."""

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Has a prefill engine's scheduler, a process of this host, leave its offer in a file, and
        a decode engine compute what doesn't come."""
        self.kv_transfer_config.setdefault("kv_load_failure_policy", "recompute")
        if self.kv_transfer_config.get("kv_role") == "kv_consumer":
            return
        self._folder = TemporaryDirectory(prefix="fabric-ray-")
        extra = self.kv_transfer_config.get("kv_connector_extra_config") or {}
        offer_file = str(Path(self._folder.name, "offer"))
        self.kv_transfer_config["kv_connector_extra_config"] = {**extra, "offer_file": offer_file}

    def replica_metadata(self) -> dict[str, Any]:
        """Of a prefill replica whose engine has started; Serve asks once.

        Raises:
            InvalidArgument: the engine offers no pages.
        """
        extra = self.kv_transfer_config.get("kv_connector_extra_config") or {}
        path = Path(extra.get("offer_file", ""))
        if not path.is_file():
            raise InvalidArgument(
                "this replica's engine offers no pages; give prefill_config the kv_role "
                "kv_producer or kv_both, and an engine core on the replica's host"
            )
        found = {"remote_offer": path.read_text()}
        self._folder.cleanup()
        return found

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """A copy for the prefill replica. Names the transfer in the request itself, for its
        decoder: ids of requests are the client's, and may repeat."""
        request.kv_transfer_params = {"transfer_id": uuid.uuid4().hex} if _is_one(request) else None
        prefill = request.model_copy(deep=True)
        _base.clamp_request_to_single_token(prefill)
        prefill.min_tokens, prefill.n = 0, 1
        if prefill.kv_transfer_params is not None:
            prefill.kv_transfer_params["do_remote_decode"] = True
        return prefill

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """A copy for the local engine. It computes the prompt itself where several prompts, several
        answers or the prompt's logits are asked for.

        Raises:
            InvalidArgument: the prefill replica published no offer, or this engine loads no pages:
                it would compute every prompt once more.
        """
        role = self.kv_transfer_config.get("kv_role")
        if role == "kv_producer":
            raise InvalidArgument(
                "this replica decodes, and its engine loads no pages: got kv_role='kv_producer' in "
                "decode_config, expected kv_consumer or kv_both"
            )
        if request.kv_transfer_params is None:
            return request.model_copy(deep=True)
        offer = (peer or {}).get("remote_offer")
        if offer is None:
            raise InvalidArgument(
                "the prefill replica published no offer; name FabricRayConnector as kv_connector "
                "in prefill_config and in decode_config (MultiConnector publishes none)"
            )
        decode = request.model_copy(deep=True)
        decode.kv_transfer_params |= {"do_remote_prefill": True, "remote_offer": offer}
        return decode


def _is_one(request: Any) -> bool:
    """Whether both engines make one request of it, with the same prompt, whose pages suffice."""
    inputs = sum(_inputs(getattr(request, name, None)) for name in ("prompt", "prompt_embeds"))
    logits = request.prompt_logprobs is not None or request.echo
    # vLLM makes requests of its own for beams, without the parameters.
    searches = getattr(request, "use_beam_search", False)
    # -1 is what max_tokens leaves, and that differs.
    is_cut = request.truncate_prompt_tokens == -1
    return inputs <= 1 and (request.n or 1) == 1 and not (logits or searches or is_cut)


def _inputs(given: Any) -> int:
    """How many prompts a field of a request has; ids of tokens are one."""
    if isinstance(given, list) and not all(isinstance(each, int) for each in given):
        return len(given)
    return int(given is not None)


with suppress(ValueError):  # another job of this cluster has
    _factory.KVConnectorBackendFactory.register_backend(
        CONNECTOR, f"{__name__}:{FabricRayConnectorBackend.__name__}"
    )
