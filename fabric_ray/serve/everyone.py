"""What all replicas of a deployment say, of those that answer."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle


async def all_say(
    handle: "DeploymentHandle[Any]", method: str, *, timeout: float
) -> list[dict[str, Any]]:
    """Calls a method of every replica; those that hang or fail are left out.

    Serve's own ``results_async`` gives nothing at all where one replica hangs.

    Args:
        handle: of the deployment.
        method: which returns a dictionary.
        timeout: seconds for all of them.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    broadcast: Any = handle.broadcast(method)
    try:
        asked = await asyncio.wait_for(broadcast._fetch_replica_results_async(), timeout)
    except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError):
        return []
    answers = [asyncio.ensure_future(each.get_async()) for each in asked]
    if not answers:
        return []
    try:
        done, _ = await asyncio.wait(answers, timeout=deadline - loop.time())
        said = [each.result() for each in done if each.exception() is None]
    finally:
        for each in answers:
            each.cancel()
    return [each for each in said if isinstance(each, dict)]
