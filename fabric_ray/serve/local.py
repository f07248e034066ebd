"""A deployment on this machine, for demos, tests and first steps."""

from __future__ import annotations

import json
import time
import urllib.request
from types import TracebackType
from typing import Any

import ray
from ray import serve
from typing_extensions import Self

from fabric_ray.serve.app import build_app
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import Unavailable

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LocalApp:
    """An application that runs; a context manager that ends it.

    Args:
        url: where it listens.
        name: of the application.
    """

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name

    def stats(self) -> list[dict[str, Any]]:
        """What every replica that answers says of itself: pages, queues, counts."""
        with _OPEN.open(f"{self.url}/stats", timeout=30) as response:
            found: list[dict[str, Any]] = json.load(response)["replicas"]
        return found

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """One completion; fields as of OpenAI's interface.

        Raises:
            urllib.error.HTTPError: it was refused, or failed.
        """
        body = json.dumps({"prompt": prompt, **fields}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with _OPEN.open(request, timeout=300) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def wait_healthy(self, timeout: float = 60.0) -> None:
        """Returns when a prefiller and a decoder answer.

        Raises:
            Unavailable: they didn't in time.
        """
        deadline, cause = time.monotonic() + timeout, "nobody answered"
        while time.monotonic() < deadline:
            try:
                with _OPEN.open(f"{self.url}/health", timeout=10):
                    return
            except OSError as error:
                cause = str(error)
            time.sleep(0.2)
        raise Unavailable(f"{self.url}/health was not well after {timeout:g} s: {cause}")

    def close(self) -> None:
        """Ends the application; Serve goes on."""
        serve.delete(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def run_local(
    args: ServeArgs | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "fabric-ray",
    timeout: float = 120.0,
) -> LocalApp:
    """Starts Ray and Serve where they don't run yet, then the application, and waits until it is
    healthy.

    Args:
        args: of the deployment.
        host: where it listens, unless Serve listens elsewhere already.
        port: likewise.
        name: of the application.
        timeout: seconds until it must be healthy.
    """
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    serve.run(build_app(args or ServeArgs()), name=name, route_prefix="/")
    app = LocalApp(f"http://{host}:{port}", name)
    app.wait_healthy(timeout)
    return app
