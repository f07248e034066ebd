"""Ray Serve deployments of disaggregated inference."""

from fabric_ray.serve.app import build_app
from fabric_ray.serve.config import (
    CacheArgs,
    DecodeArgs,
    PrefillArgs,
    RouterArgs,
    ServeArgs,
    TermsArgs,
)
from fabric_ray.serve.engines import EngineFactory
from fabric_ray.serve.errors import (
    BadRequest,
    Busy,
    DecoderLost,
    NoPrefill,
    NotFound,
    ServeError,
    TooLarge,
    Unavailable,
)
from fabric_ray.serve.local import LocalApp, run_local

__all__ = [
    "BadRequest",
    "Busy",
    "CacheArgs",
    "DecodeArgs",
    "DecoderLost",
    "EngineFactory",
    "LocalApp",
    "NoPrefill",
    "NotFound",
    "PrefillArgs",
    "RouterArgs",
    "ServeArgs",
    "ServeError",
    "TermsArgs",
    "TooLarge",
    "Unavailable",
    "build_app",
    "run_local",
]
