"""Every query of the Grafana dashboard, against a Prometheus that scrapes the endpoint.

Grafana itself is in no package registry; its queries and their answers are all here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric_ray import TransferEngine
from fabric_ray.errors import FabricError
from fabric_ray.observe import Endpoint
from fabric_ray.observe.dashboard import dashboard
from tests.lacks import lacks
from tests.ports import free_ports
from tests.processes import within

HOW = "apt-get install prometheus, or name it by FABRIC_RAY_PROMETHEUS=/path"
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in dashboard()["panels"]
    for target in panel["targets"]
]
# What there is nothing of while all goes well: an empty answer is the right one.
MAY_BE_EMPTY = ("retries", "failures", "exclusions", "quota_waits")


def program() -> str:
    wanted = os.environ.get("FABRIC_RAY_PROMETHEUS", "")
    found = shutil.which(wanted if wanted not in ("", "require") else "prometheus")
    return found or lacks("FABRIC_RAY_PROMETHEUS", f"Prometheus isn't installed: {HOW}")


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, query: str) -> list[dict[str, Any]]:
        """What a query finds now; raises where Prometheus calls it wrong."""
        words = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
        return found

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                return True
        except OSError:
            return False


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has read the metrics of two engines at work, several times."""
    binary, folder = program(), tmp_path_factory.mktemp("prometheus")
    with (
        TransferEngine(name="a", transport="tcp") as a,
        TransferEngine(name="b", transport="tcp") as b,
        Endpoint() as endpoint,
    ):
        over = threading.Event()
        working = threading.Thread(target=work, args=(a, b, over))
        working.start()
        port, _ = free_ports()
        with started(binary, folder, port, endpoint.port) as found:
            try:
                counted = 'count_over_time(up{job="fabric-ray"}[1m])'
                within(
                    60,
                    "a fifth look at the endpoint",
                    lambda: any(float(r["value"][1]) >= 5 for r in found.ask(counted)),
                )
                yield found
            finally:
                over.set()
                working.join()


def work(a: TransferEngine, b: TransferEngine, over: threading.Event) -> None:
    """Writes, one of them waited for at a time."""
    inbox, counter = b.alloc(1 << 16), b.counter()
    there, source = a.import_region(inbox.descriptor()), a.alloc(1 << 16)
    while not over.is_set():
        try:
            expected = counter.expect(1)
            a.write(source, there, imm=counter.ref).wait(10)
            expected.wait(10)
        except FabricError:
            return
        time.sleep(0.01)


class started:
    """A Prometheus that looks once a second; ended with the block."""

    def __init__(self, binary: str, folder: Path, port: int, endpoint: int) -> None:
        config = folder / "prometheus.yml"
        config.write_text(
            "scrape_configs:\n- job_name: fabric-ray\n  scrape_interval: 1s\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{endpoint}']}}]\n"
        )
        self._found = Prometheus(port)
        self._log = folder / "log"
        self._command = [
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]

    def __enter__(self) -> Prometheus:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        try:
            within(60, f"the start of Prometheus ({self._log})", self._found.is_up)
        except BaseException:
            self.__exit__()
            raise
        return self._found

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def filled_in(query: str) -> str:
    """As Grafana fills in its variables: the endpoint's names, all engines, some seconds."""
    query = query.replace("${prefix}", "").replace("$__rate_interval", "1m")
    query = query.replace("$engine", ".*")
    assert "$" not in query, f"{query} has a variable that the dashboard doesn't fill in"
    return query


@pytest.mark.parametrize("query", TARGETS)
def test_a_panels_query_is_answered(prometheus: Prometheus, query: str) -> None:
    found = prometheus.ask(filled_in(query))
    if not any(f"fabric_ray_{name}" in query for name in MAY_BE_EMPTY):
        assert found, f"{query} shows nothing while two engines work"
    labels = set(re.findall(r"{{(\w+)}}", "".join(legends(query))))
    for series in found:
        # Rails of tcp have no device, and Prometheus keeps no empty label.
        assert labels - {"device"} <= set(series["metric"])


def legends(query: str) -> list[str]:
    """How the panel calls what the query finds."""
    return [
        target["legendFormat"]
        for panel in dashboard()["panels"]
        for target in panel["targets"]
        if target["expr"] == query
    ]


def test_the_variable_of_engines_finds_them(prometheus: Prometheus) -> None:
    [variable] = [v for v in dashboard()["templating"]["list"] if v["name"] == "engine"]
    [(metric, label)] = re.findall(r"label_values\((\S+), (\w+)\)", variable["query"])
    found = prometheus.ask(filled_in(metric))
    assert {series["metric"][label] for series in found} == {"a", "b"}
