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

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.integrations import framework
from fabric_ray.integrations.vllm_plugin import CONNECTOR

_LOG = logging.getLogger(__name__)

_PACKAGE = "ray[serve,llm]==2.60.0"
_SERVE = "ray.llm._internal.serve"
_ray: Any = framework("ray", "serve", _PACKAGE)
_worker: Any = framework("ray._private.worker", "serve", _PACKAGE)
_registry: Any = framework(f"{_SERVE}.utils.registry", "serve", _PACKAGE)
_base: Any = framework(f"{_SERVE}.engines.vllm.kv_transfer.base", "serve", _PACKAGE)
_builder: Any = framework(f"{_SERVE}.serving_patterns.prefill_decode.builder", "serve", _PACKAGE)

_SET_TOKEN = "run `export FABRIC_RAY_TOKEN=...` in the shell of `ray start`, the same on every node"
_ROLES = {
    "prefill_config": ("kv_producer", "kv_both"),
    "decode_config": ("kv_consumer", "kv_both"),
}
_HOOKS = (
    "requires_peer_binding",
    "concurrent_handoff",
    "setup",
    "replica_metadata",
    "prepare_prefill_request",
    "prepare_decode_request",
)
if _lacking := [name for name in _HOOKS if not hasattr(_base.BaseConnectorBackend, name)]:
    raise Unsupported(
        f"Ray Serve LLM of this version doesn't call a connector's {', '.join(_lacking)}: got Ray "
        f"{_ray.__version__}, expected 2.57 to 2.60; run: pip install '{_PACKAGE}'"
    )


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Any:
    """Ray's application of that name.

    Raises:
        InvalidArgument: a side whose ``kv_role`` doesn't send or load pages, as that side must.
    """
    args = _builder.PDServingArgs.model_validate(pd_serving_args)
    for side, roles in _ROLES.items():
        transfer = getattr(args, side).engine_kwargs["kv_transfer_config"]
        if transfer.get("kv_connector") == CONNECTOR and transfer.get("kv_role") not in roles:
            raise InvalidArgument(
                f"{side}, field `kv_role` of kv_transfer_config: got {transfer.get('kv_role')!r}, "
                f"expected {' or '.join(roles)}"
            )
    return _builder.build_pd_openai_app(args)


class FabricRayConnectorBackend(_base.BaseConnectorBackend):  # type: ignore[misc]
    """Shapes the two requests of a prefill and its decoder."""

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Has a prefill engine's scheduler, a process of this host, leave its offer in a file, and
        a decode engine compute what doesn't come."""
        nodes = [node for node in _ray.nodes() if node["Alive"]] if _ray.is_initialized() else []
        if len(nodes) > 1 and not self._has_token():
            _LOG.warning(
                "this cluster has %d nodes and no token, so that this replica exchanges pages with "
                "replicas of its own node only; %s",
                len(nodes),
                _SET_TOKEN,
            )
        self.kv_transfer_config.setdefault("kv_load_failure_policy", "recompute")
        if self.kv_transfer_config.get("kv_role") == "kv_consumer":
            return
        self._folder = TemporaryDirectory(prefix="fabric-ray-")
        extra = self.kv_transfer_config.get("kv_connector_extra_config") or {}
        offer_file = str(Path(self._folder.name, "offer"))
        self.kv_transfer_config["kv_connector_extra_config"] = {**extra, "offer_file": offer_file}

    def replica_metadata(self) -> dict[str, Any]:
        """Of a prefill replica whose engine has started; Serve asks once. ``peers`` says whose
        connections its engines accept.

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
        found = {"remote_offer": path.read_text(), "peers": self._peers()}
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
            InvalidArgument: the prefill replica published no offer, its engines don't accept this
                one, or this engine loads no pages: it would compute every prompt once more.
        """
        role = self.kv_transfer_config.get("kv_role")
        if role == "kv_producer":
            raise InvalidArgument(
                "this replica decodes, and its engine loads no pages: got kv_role='kv_producer' in "
                "decode_config, expected kv_consumer or kv_both"
            )
        if request.kv_transfer_params is None:
            return request.model_copy(deep=True)
        peer = peer or {}
        offer = peer.get("remote_offer")
        if offer is None:
            raise InvalidArgument(
                "the prefill replica published no offer; name FabricRayConnector as kv_connector "
                "in prefill_config and in decode_config (MultiConnector publishes none)"
            )
        if (theirs := peer["peers"]) != (ours := self._peers()):
            raise InvalidArgument(
                f"the prefill replica's engines accept {theirs}, and this decode replica's {ours}: "
                f"no pages would come; {_SET_TOKEN}"
            )
        decode = request.model_copy(deep=True)
        decode.kv_transfer_params |= {"do_remote_prefill": True, "remote_offer": offer}
        return decode

    def _has_token(self) -> bool:
        extra = self.kv_transfer_config.get("kv_connector_extra_config") or {}
        return bool((extra.get("engine") or {}).get("token") or os.environ.get("FABRIC_RAY_TOKEN"))

    def _peers(self) -> str:
        """Which peers the engines accept: without a token they listen on loopback."""
        if self._has_token():
            return "peers with a token"
        return f"peers of node {_ray.get_runtime_context().get_node_id()}"


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


def register() -> None:
    """Tells the processes of the cluster of the back end. Ray's registry keeps what it was told
    before, and tells a second cluster of this process nothing."""
    with suppress(ValueError):  # another job of this cluster has
        _registry.ComponentRegistry("kv_connector_backend").register(
            CONNECTOR, f"{__name__}:{FabricRayConnectorBackend.__name__}"
        )


register()
_worker._post_init_hooks.append(register)
