"""Calls a method of all replicas of a deployment."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle


async def broadcast(
    handle: "DeploymentHandle[Any]", method: str, *, timeout: float
) -> list[dict[str, Any]]:
    """The results of all replicas that answer in time; those that hang or fail are left out.

    Serve's own ``results_async`` returns nothing at all where one replica hangs.

    Args:
        handle: of the deployment.
        method: returns a dictionary.
        timeout: seconds for all replicas together.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    response: Any = handle.broadcast(method)
    try:
        replicas = await asyncio.wait_for(response._fetch_replica_results_async(), timeout)
    except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError):
        return []
    calls = [asyncio.ensure_future(replica.get_async()) for replica in replicas]
    if not calls:
        return []
    try:
        done, _ = await asyncio.wait(calls, timeout=deadline - loop.time())
        results = [call.result() for call in done if call.exception() is None]
    finally:
        for call in calls:
            call.cancel()
    return [result for result in results if isinstance(result, dict)]
