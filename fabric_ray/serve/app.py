"""Builds the Serve application from its configuration.

Annotations are real types in this module: Serve reads those of :func:`build_app`.
"""

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from fabric_ray.errors import InvalidArgument
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.decode import Decode
from fabric_ray.serve.ingress import Router
from fabric_ray.serve.instance import check_model
from fabric_ray.serve.prefill import Prefill
from fabric_ray.serve.scaling import with_policy

_SLACK = 16
"""Requests beyond a replica's limit that Serve may send to it; the replica refuses them itself."""


def build_app(args: ServeArgs) -> serve.Application:
    """A router, prefillers and decoders: ``serve run fabric_ray.serve:build_app model=tiny-llama``,
    or in YAML as ``import_path`` with ``args``.

    Args:
        args: of the deployment; a dictionary is parsed.

    Raises:
        ValidationError: a field is unknown, or its value is invalid.
        BadRequest: the model is unknown.
        ModelError: its directory's files are damaged, or models of its kind can't be computed.
        FamilyError: ``tp`` ranks can't share the model.
        InvalidArgument: the engine or a routing policy can't be imported, the caches differ in
            their dtype, or prefillers may scale to zero.
    """
    if not isinstance(args, ServeArgs):
        args = ServeArgs.model_validate(args)
    check_model(args)
    prefill = _deployment(
        Prefill,
        _with_router(
            with_policy(args.prefill.options),
            "fabric_ray.serve.routing.PrefillRouter",
            request_routing_stats_period_s=1.0,
        ),
        max_ongoing_requests=1024,
    ).bind(args)
    decode = _deployment(
        Decode,
        _with_router(
            args.decode.options,
            "fabric_ray.serve.routing.PrefixRouter",
            request_router_kwargs={"slack": args.router.prefix_slack},
        ),
        max_ongoing_requests=args.decode.max_running + args.decode.max_queue + _SLACK,
        max_queued_requests=args.router.max_requests,
    ).bind(args, prefill)
    return _deployment(
        Router,
        args.router.options,
        max_ongoing_requests=2 * args.router.max_requests + _SLACK,
    ).bind(args, decode, prefill)


def _with_router(options: dict[str, Any], router: str, **defaults: Any) -> dict[str, Any]:
    """Deployment options with a routing policy: the user's ``request_router_config`` field by
    field, else this one. ``request_router_kwargs`` are of one class, so another class gets none.
    """
    given = options.get("request_router_config", {})
    if not isinstance(given, dict):
        return options
    if "request_router_class" in given:
        defaults.pop("request_router_kwargs", None)
    fields = {"request_router_class": router, **defaults, **given}
    try:
        config = RequestRouterConfig.model_validate(fields)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"request_router_config: {fields['request_router_class']} can't be used ({error}); "
            "give module.Class of a ray.serve.request_router.RequestRouter, install the module on "
            "every node, or put its folder into the application's runtime_env"
        ) from error
    return {**options, "request_router_config": config}


def _deployment(cls: type, options: dict[str, Any], **defaults: Any) -> serve.Deployment:
    """A class as a deployment; what the user says goes before what is best by default."""
    common = {
        "ray_actor_options": {"num_cpus": 0.1},
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": 10.0,
    }
    make: Any = serve.deployment
    made: serve.Deployment = make(cls).options(**{**common, **defaults, **options})
    return made
