"""Weight synchronisation of SkyRL by the backend ``fabric``.

SkyRL chooses its backends in code, in the driver, in trainers and in inference servers. So each of
its processes calls :func:`install`. Ray has all workers of a job call it where :func:`runtime_env`
is the job's hook::

    export RAY_RUNTIME_ENV_HOOK=fabric_ray.integrations.skyrl.runtime_env

Then ``generator.inference_engine.weight_sync_backend=fabric`` in SkyRL's configuration is all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fabric_ray.errors import Unsupported
from fabric_ray.integrations import vllm_plugin

BACKEND = "fabric"
"""In SkyRL's configuration and in vLLM's."""

_SYNC = "skyrl.backends.skyrl_train.weight_sync"
# Has the same functions by name.
_SERVERS = "skyrl.backends.skyrl_train.inference_servers.utils"
_HOOK = f"{__name__}.install"
_SETUP = "worker_process_setup_hook"


def runtime_env(env: Mapping[str, Any] | None) -> dict[str, Any]:
    """A job's runtime environment, whose workers run :func:`install`: for Ray's
    ``RAY_RUNTIME_ENV_HOOK``. Under ``uv run`` Ray's own hook runs as well, which takes
    ``RAY_ENABLE_UV_RUN_RUNTIME_ENV=0``, since Ray runs no other hook there otherwise.

    Raises:
        Unsupported: the job's workers have another setup hook.
    """
    from ray._private.runtime_env.uv_runtime_env_hook import hook as under_uv

    install()  # the driver may start servers
    made: dict[str, Any] = dict(under_uv(dict(env or {})))
    if made.setdefault(_SETUP, _HOOK) != _HOOK:
        raise Unsupported(
            f"the job's workers have a setup hook of their own: got {made[_SETUP]!r}, expected "
            f"{_HOOK!r} or none; call {_HOOK}() in yours, and leave RAY_RUNTIME_ENV_HOOK unset"
        )
    return made


def install() -> None:
    """Adds the backend to SkyRL 0.4 in this process: at once to modules that are imported, and to
    others as they are. May be called again.

    Raises:
        Unsupported: this SkyRL chooses backends in another way.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _name_backend(module: ModuleType) -> None:
    """Has SkyRL choose the backend by its name, for trainers and for vLLM's servers."""
    strategy, receiver = _found(module, "get_transfer_strategy", "get_vllm_receive_backend")

    def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
        if weight_sync_backend != BACKEND:
            return str(strategy(weight_sync_backend, colocate_all))
        if colocate_all:
            raise Unsupported(
                f"the weight sync backend `{BACKEND}` has not been tried with servers that sleep "
                "on the trainers' GPUs: got trainer.placement.colocate_all=true; set it to false, "
                "or use the backend `nccl`"
            )
        return BACKEND

    def get_vllm_receive_backend(weight_sync_backend: str, colocate_all: bool) -> str:
        if weight_sync_backend != BACKEND:
            return str(receiver(weight_sync_backend, colocate_all))
        vllm_plugin.register()  # vLLM checks the name in this process
        return BACKEND

    made: Any = module
    made.get_transfer_strategy = get_transfer_strategy
    made.get_vllm_receive_backend = get_vllm_receive_backend


def _open_trainers(module: ModuleType) -> None:
    """Has SkyRL's trainers open the backend's end."""
    (other,) = _found(module, "_build_sender_init_info")

    def build(*, backend: str, **arguments: Any) -> tuple[Any, Callable[..., Any] | None]:
        if backend != BACKEND:
            info: tuple[Any, Callable[..., Any] | None] = other(backend=backend, **arguments)
            return info
        from fabric_ray.integrations.skyrl_engine import init_info

        return init_info(**arguments), None

    made: Any = module
    made._build_sender_init_info = build


_CHANGES: Mapping[str, Callable[[ModuleType], None]] = {
    _SYNC: _name_backend,
    _SERVERS: _name_backend,
    f"{_SYNC}.weight_senders": _open_trainers,
}


def _found(module: ModuleType, *names: str) -> list[Callable[..., Any]]:
    """
    Raises:
        Unsupported: the module lacks one of them.
    """
    if missing := [name for name in names if not callable(getattr(module, name, None))]:
        raise Unsupported(
            f"the weight sync backend `{BACKEND}` does not fit this SkyRL: {module.__name__} has "
            f"no {' and no '.join(missing)}; install SkyRL 0.4"
        )
    return [getattr(module, name) for name in names]


class _Finder(MetaPathFinder):
    """Finds the modules that are changed, as Python does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = _CHANGES.get(name)
        spec = PathFinder.find_spec(name, path, target) if change is not None else None
        if change is not None and spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, change)
        return spec


class _Loader(Loader):
    """Loads a module as ``own`` does, and changes it."""

    def __init__(self, own: Loader, change: Callable[[ModuleType], None]) -> None:
        self._own, self._change = own, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._change(module)
