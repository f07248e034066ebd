"""The deployment that generates tokens."""

import base64
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from fabric_ray.serve.completions import Completions
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import NoPrefill
from fabric_ray.serve.instance import Instance, tokenizer
from fabric_ray.serve.messages import Event, Generate
from fabric_ray.serve.prefillers import PrefillerOffer

logger = logging.getLogger("ray.serve")


class ServeDiscovery:
    """Finds prefillers through Serve, whose controller sends every handle the list of replicas.

    Args:
        prefill: handle of the prefill deployment.
    """

    def __init__(self, prefill: "DeploymentHandle[Any]") -> None:
        self._prefill = prefill

    async def choose(self, *, avoid: Mapping[str, int], load: Mapping[str, int]) -> PrefillerOffer:
        """See :class:`fabric_ray.serve.prefillers.Discovery`."""
        # Reserving a slot would take the whole deadline where the replica hangs. The request for
        # pages finds that out sooner.
        choice = self._prefill.offer.choose_replica(
            avoid=dict(avoid), load=dict(load), _reserve=False
        )
        try:
            async with choice as chosen:
                return offer_from(chosen.replica_metadata)
        except (RayError, RayServeException) as error:
            raise NoPrefill(f"Serve names no prefiller: {type(error).__name__}: {error}") from error


def offer_from(metadata: Mapping[str, Any]) -> PrefillerOffer:
    """The offer in a prefiller's replica metadata.

    Raises:
        NoPrefill: there is none, or it is damaged.
    """
    try:
        offer = base64.b64decode(metadata["offer"], validate=True)
        return PrefillerOffer(str(metadata["name"]).removeprefix("prefill-"), offer)
    except (KeyError, TypeError, ValueError) as error:
        raise NoPrefill(
            f"cannot read a prefiller's replica_metadata ({type(error).__name__}: {error}); run "
            "the same release everywhere"
        ) from error


class Decode:
    """A replica of decoders.

    Args:
        args: of the deployment.
        prefill: handle of the prefill deployment.
    """

    def __init__(self, args: ServeArgs, prefill: "DeploymentHandle[Any]") -> None:
        self._args = args
        self._name = f"decode-{serve.get_replica_context().replica_id.unique_id}"
        self._discovery = ServeDiscovery(prefill)
        self._tokenizer = tokenizer(args)
        self._instance = Instance(args, "decode", name=self._name)
        self._running: Completions | None = None

    @property
    def _completions(self) -> Completions:
        if self._running is None:
            self._running = Completions(
                self._instance,
                self._args.decode,
                discovery=self._discovery,
                tokenizer=self._tokenizer,
            )
        return self._running

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """The events of a request; see :meth:`Completions.generate`."""
        async with contextlib.aclosing(self._completions.generate(request)) as events:
            async for event in events:
                yield event

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {"name": self._name}

    def record_routing_stats(self) -> dict[str, float]:
        return self._running.load if self._running is not None else {}

    def check_health(self) -> None:
        """Raises:
        Unavailable: the engine stopped, or hangs.
        """
        if self._running is not None:
            self._running.check()

    async def stats(self) -> dict[str, Any]:
        """Pages, queues and counts of this replica."""
        mine = {"role": "decode", "replica": self._name, "pid": os.getpid()}
        return {**mine, **self._completions.stats()}
