"""The secret that the engines of one Ray cluster share."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fabric_ray.errors import InvalidArgument

_LABEL = b"fabric_ray handshake token 1"
_TRUE = ("1", "true")


def ray_token() -> bytes | None:
    """A secret made of Ray's own authentication token; ``None`` where Ray doesn't use one.

    The same Ray token gives the same secret in several clusters, and in tools without a cluster.
    Ray's token can't be computed from the secret.

    Ray uses one where ``RAY_AUTH_MODE`` is ``token``, and takes it from ``RAY_AUTH_TOKEN``, the
    file ``RAY_AUTH_TOKEN_PATH``, or ``~/.ray/auth_token``, in this order.

    Raises:
        InvalidArgument: Ray's mode asks for a token and there is none to be read.
    """
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH", "").lower() in _TRUE:
        return None  # each pod has one of its own, which changes
    token = _read()
    # HMAC as a key derivation: the label keeps it apart from all other uses of Ray's token.
    return hmac.new(token, _LABEL, hashlib.sha256).digest()


def _read() -> bytes:
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip().encode()
    if token:
        return token
    # Not Path.home(), which raises where a user has none: then this names a file that isn't there.
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token"))
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise InvalidArgument(
            f"RAY_AUTH_MODE is token, and {path} can't be read ({error.strerror}); set "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as for Ray, or FABRIC_RAY_TOKEN"
        ) from None
    if not token:
        raise InvalidArgument(f"RAY_AUTH_MODE is token, and {path} is empty; set RAY_AUTH_TOKEN")
    return token


def cluster_token() -> bytes:
    """The secret of this Ray cluster: made of Ray's token where there is one, else drawn by the
    first caller and kept in the cluster's control store.

    Raises:
        InvalidArgument: this process isn't part of a Ray cluster, or see :func:`ray_token`.
    """
    from ray.experimental import internal_kv

    if not internal_kv._internal_kv_initialized():  # type: ignore[no-untyped-call]
        raise InvalidArgument("call ray.init() first: the token is the cluster's")
    if (derived := ray_token()) is not None:
        return derived
    key = b"fabric_ray:token"
    internal_kv._internal_kv_put(key, secrets.token_bytes(32), overwrite=False)
    token = internal_kv._internal_kv_get(key)
    if not token:
        raise InvalidArgument("the Ray cluster keeps no token; set FABRIC_RAY_TOKEN everywhere")
    return bytes(token)
