"""Calls of DeepEP's ``ElasticBuffer`` that are unsupported."""

from __future__ import annotations

from typing import Any, NoReturn

from fabric_ray.errors import Unsupported


class ElasticLacks:
    """Each call raises, and names an alternative."""

    def engram_write(self, *_: Any, **__: Any) -> NoReturn:
        self._no_engram()

    def engram_fetch(self, *_: Any, **__: Any) -> NoReturn:
        self._no_engram()

    def pp_set_config(self, *_: Any, **__: Any) -> NoReturn:
        self._no_pipeline()

    def pp_send(self, *_: Any, **__: Any) -> NoReturn:
        self._no_pipeline()

    def pp_recv(self, *_: Any, **__: Any) -> NoReturn:
        self._no_pipeline()

    def create_agrs_session(self, *_: Any, **__: Any) -> NoReturn:
        self._no_gather()

    def destroy_agrs_session(self, *_: Any, **__: Any) -> NoReturn:
        self._no_gather()

    def agrs_new_session(self, *_: Any, **__: Any) -> NoReturn:
        self._no_gather()

    def agrs_set_config(self, *_: Any, **__: Any) -> NoReturn:
        self._no_gather()

    def agrs_get_inplace_tensor(self, *_: Any, **__: Any) -> NoReturn:
        self._no_gather()

    def all_gather(self, *_: Any, **__: Any) -> NoReturn:
        self._no_gather()

    @staticmethod
    def _no_engram() -> NoReturn:
        raise Unsupported("there is no Engram here; read parts of regions with TransferEngine.read")

    @staticmethod
    def _no_pipeline() -> NoReturn:
        raise Unsupported("there are no pipeline calls here; write to a peer with TransferEngine")

    @staticmethod
    def _no_gather() -> NoReturn:
        raise Unsupported("there is no all_gather here; use torch.distributed's")
