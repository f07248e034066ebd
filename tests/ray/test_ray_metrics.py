"""What engines count reaches Ray's own metrics, by the same names."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import time
import urllib.request
from contextlib import suppress

import pytest
import ray

from fabric_ray.observe.samples import Sample

pytest.importorskip("prometheus_client", reason="Ray's agents export metrics with it")


@ray.remote(num_cpus=1)
class Worker:
    """Writes once to itself, and exports."""

    def __init__(self) -> None:
        from fabric_ray import TransferEngine
        from fabric_ray.observe.ray_metrics import RayExport

        self.engines = TransferEngine(name="to-ray"), TransferEngine(name="there")
        self.export = RayExport(interval=0.5)

    def write(self) -> str:
        a, b = self.engines
        inbox = b.alloc(1 << 16)
        a.write(a.alloc(1 << 16), a.import_region(inbox.descriptor())).wait(30)
        return ray.get_runtime_context().get_node_id()


def told(node: str) -> str:
    [at] = [n for n in ray.nodes() if n["NodeID"] == node]
    url = f"http://{at['NodeManagerAddress']}:{at['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.long
def test_what_an_engine_counts_is_exported_by_its_node() -> None:
    worker = Worker.remote()
    node = ray.get(worker.write.remote(), timeout=120)
    wanted = re.compile(r'^ray_fabric_ray_bytes_total\{[^}]*engine="to-ray"[^}]*\} 65536', re.M)
    end = time.monotonic() + 120
    up = re.compile(r'^ray_fabric_ray_peer_up\{[^}]*peer="there"[^}]*\} 1', re.M)
    histogram = re.compile(r"^ray_fabric_ray_transfer_queue_seconds_bucket\{", re.M)
    text = ""
    while not all(metric.search(text) for metric in (wanted, up, histogram)):
        assert time.monotonic() < end, f"the metrics don't arrive: {text}"
        time.sleep(1)
        with suppress(OSError):  # the node's agent doesn't listen yet
            text = told(node)
    ray.kill(worker)


def test_an_export_goes_on_after_one_that_failed() -> None:
    from fabric_ray.observe.ray_metrics import RayExport

    looks, went_on = itertools.count(), threading.Event()

    def read() -> list[Sample]:
        if next(looks) == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        went_on.set()
        return []

    export = RayExport(interval=0.01, read=read)
    try:
        assert went_on.wait(30)
    finally:
        export.close()
