"""Metrics as Prometheus reads them, and an endpoint that has them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from threading import Thread

from typing_extensions import Self

from fabric_ray.engine.observability import Histogram
from fabric_ray.errors import ResourceError
from fabric_ray.observe import process
from fabric_ray.observe.samples import Sample, samples

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Powers of two of nanoseconds that are told apart: from 1 us to 17 s.
FIRST_BOUND, LAST_BOUND = 10, 34

_log = logging.getLogger("fabric_ray.observe")


def render(found: Iterable[Sample]) -> str:
    """The text format, version 0.0.4; samples of one family must follow each other."""
    lines: list[str] = []
    for family, of_family in groupby(found, key=lambda sample: sample.family):
        lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        for sample in of_family:
            lines += _lines(sample)
    return "\n".join([*lines, ""])


def buckets(histogram: Histogram) -> Iterator[tuple[float, int]]:
    """Upper bounds in seconds, and how many took at most so long."""
    total = sum(histogram.buckets[:FIRST_BOUND])
    for power in range(FIRST_BOUND, LAST_BOUND + 1):
        total += histogram.buckets[power]
        yield (1 << power) / 1e9, total


def _lines(sample: Sample) -> Iterator[str]:
    name, value = sample.family.name, sample.value
    labels = dict(zip(sample.family.labels, sample.labels, strict=True))
    if not isinstance(value, Histogram):
        yield f"{name}{_labels(labels)} {value}"
        return
    for bound, n in buckets(value):
        yield f"{name}_bucket{_labels(labels | {'le': repr(bound)})} {n}"
    yield f"{name}_bucket{_labels(labels | {'le': '+Inf'})} {value.count}"
    yield f"{name}_sum{_labels(labels)} {value.total / 1e9}"
    yield f"{name}_count{_labels(labels)} {value.count}"


def _labels(labels: dict[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def text() -> str:
    """The metrics of this process's engines."""
    return render(samples(process.metrics().engines))


class Endpoint:
    """Serves ``/metrics`` over HTTP without authentication, by default on loopback only.

    Args:
        port: 0 for any that is free.
        host: a local address.
        text: what is told; by default this process's engines.

    Raises:
        ResourceError: it can't listen there.
    """

    def __init__(
        self, port: int = 0, host: str = "127.0.0.1", text: Callable[[], str] = text
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404, "ask for /metrics")
                    return
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                _log.debug(format, *args)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise ResourceError(
                f"metrics can't be told at {host}:{port}: {cause}; choose another port, "
                "or 0 for any"
            ) from None
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, name="fabric-metrics", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
