"""One Ray cluster of three raylets for all tests of this directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

pytest.importorskip("ray")
pytest.importorskip("torch")


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[list[str]]:
    """The ids of the cluster's nodes."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": 80 << 20}
    head = {**node, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes()
        yield [n["NodeID"] for n in ray.nodes() if n["Alive"]]
    finally:
        ray.shutdown()
        cluster.shutdown()
