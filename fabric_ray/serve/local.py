"""A deployment on this machine, for demos, tests and first steps."""

from __future__ import annotations

import json
import time
import urllib.request
from types import TracebackType
from typing import Any, Literal

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from typing_extensions import Self

from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import Unavailable
from fabric_ray.serve.instance import model_config

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LocalApp:
    """An application that runs; a context manager that ends it.

    Args:
        args: of the deployment.
        url: where it listens.
        name: of the application.
    """

    def __init__(self, args: ServeArgs, *, url: str, name: str) -> None:
        self.args, self.url, self.name = args, url, name
        self._replicas: dict[str, int] = {}
        self._deploy()

    def scale(self, deployment: Literal["Router", "Prefill", "Decode"], replicas: int) -> None:
        """Changes how many replicas of a deployment there should be, and returns; those that stay
        go on as they are."""
        self._replicas[deployment] = replicas
        self._deploy()

    def _deploy(self) -> None:
        # As from a file: what serve.run deploys, it deploys anew each time.
        application = {
            "name": self.name,
            "route_prefix": "/",
            "import_path": "fabric_ray.serve:build_app",
            "args": self.args.revealed(),
            "deployments": [
                {"name": name, "num_replicas": count} for name, count in self._replicas.items()
            ],
        }
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        client: Any = _get_global_client()
        client.deploy_apps(schema)

    def wait_running(self, timeout: float = 120.0) -> None:
        """Returns when as many replicas run as there should be.

        Raises:
            Unavailable: they don't, or can't be started; the message has Serve's reason.
        """
        deadline, said = time.monotonic() + timeout, "it is not known"
        while time.monotonic() < deadline:
            here = serve.status().applications.get(self.name)
            if here is not None:
                said = f"{here.status.value} {here.message}".strip()
                if here.status.value == "RUNNING":
                    return
                if here.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise Unavailable(f"application {self.name} doesn't run: {said}")
            time.sleep(0.2)
        raise Unavailable(f"application {self.name} did not run within {timeout:g} s: {said}")

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
    args = args or ServeArgs()
    model_config(args)  # a wrong name is better found here than by a builder
    app = LocalApp(args, url=f"http://{host}:{port}", name=name)
    app.wait_running(timeout)
    app.wait_healthy(timeout)
    return app
