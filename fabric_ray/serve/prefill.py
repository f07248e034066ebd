"""The deployment that computes prompts."""

import asyncio
import base64
import logging
import os
from typing import Any

from ray import serve

from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.prefill_loop import PrefillLoop
from fabric_ray.serve.scaling import METRIC

logger = logging.getLogger("ray.serve")


class Prefill:
    """A prefill replica. Decoders find it by its metadata and send requests to its transfer
    engines; none pass through Serve.

    Args:
        args: of the deployment.
    """

    def __init__(self, args: ServeArgs) -> None:
        self._name = f"prefill-{serve.get_replica_context().replica_id.unique_id}"
        self._instance = Instance(args, "prefill", name=self._name)
        self._loop = PrefillLoop(self._instance, args.prefill)
        self._serving: asyncio.Task[None] | None = None

    async def record_replica_metadata(self) -> dict[str, Any]:
        """The offer for decoders; Serve sends it to them with the list of replicas."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._loop.serve())
        return {"name": self._name, "offer": base64.b64encode(self._loop.offer).decode()}

    def record_routing_stats(self) -> dict[str, float]:
        return {"load": float(self._loop.load)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {METRIC: float(self._loop.load)}

    def check_health(self) -> None:
        """Raises:
        Unavailable: the engine stopped, or hangs.
        """
        self._loop.check()
        if self._serving is not None and self._serving.done():
            self._serving.result()
            raise RuntimeError("the prefiller accepts no more requests")

    async def offer(self) -> dict[str, Any]:
        """The replica metadata."""
        return await self.record_replica_metadata()

    async def stats(self) -> dict[str, Any]:
        """Pages, queues and counts of this replica."""
        return {"role": "prefill", "replica": self._name, "pid": os.getpid(), **self._loop.stats()}
