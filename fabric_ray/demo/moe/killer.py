"""Somebody on the host of a process who ends it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Killer:
    """A Ray actor beside the process."""

    def kill(self, pid: int, after: float) -> float:
        """Sends SIGKILL after some seconds; returns when, seconds since the epoch."""
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        return time.time()


def killer_on(node_id: str) -> Any:
    """One on that node."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(Killer)
    return remote.options(num_cpus=0, scheduling_strategy=where).remote()
