"""Runs a deployment on this machine, for demos, tests and first steps."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any, Literal

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema
from typing_extensions import Self

from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import Unavailable
from fabric_ray.serve.instance import check_model

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LocalApp:
    """A running application; as a context manager it deletes the application at the end.

    Args:
        args: of the deployment.
        url: of its HTTP server.
        name: of the application.
    """

    def __init__(self, args: ServeArgs, *, url: str, name: str) -> None:
        self.args, self.url, self.name = args, url, name
        self._replicas: dict[str, int] = {}
        self._deploy()

    def scale(self, deployment: Literal["Router", "Prefill", "Decode"], replicas: int) -> None:
        """Sets the number of replicas of a deployment, without waiting; other replicas go on."""
        self._replicas[deployment] = replicas
        self._deploy()

    def _deploy(self) -> None:
        # As from a file: serve.run would restart all replicas.
        application = {
            "name": self.name,
            "route_prefix": "/",
            "import_path": "fabric_ray.serve:build_app",
            "args": self.args.revealed(),
            "deployments": [
                {"name": name, "num_replicas": count} for name, count in self._replicas.items()
            ],
        }
        client: Any = _get_global_client()
        running = client.get_serve_details()
        found = [
            one.get("deployed_app_config")  # none: from serve.run, which this leaves alone
            for name, one in running["applications"].items()
            if name != self.name
        ]
        # Serve deletes those from a file that the next one doesn't name.
        fields = {"applications": [*filter(None, found), application]}
        if (capacity := running.get("target_capacity")) is not None:
            fields["target_capacity"] = capacity
        client.deploy_apps(ServeDeploySchema.model_validate(fields))

    def wait_running(self, timeout: float = 120.0) -> None:
        """Returns when all replicas run.

        Raises:
            Unavailable: they don't in time, or can't be started; the message has Serve's reason.
        """
        deadline, state = time.monotonic() + timeout, "Serve doesn't list it"
        while time.monotonic() < deadline:
            application = serve.status().applications.get(self.name)
            if application is not None:
                status = application.status
                state = f"{status.value} {application.message}".strip()
                if status is ApplicationStatus.RUNNING:
                    return
                if status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                    raise Unavailable(f"application {self.name} doesn't run: {state}")
            time.sleep(0.2)
        raise Unavailable(f"application {self.name} did not run within {timeout:g} s: {state}")

    def stats(self) -> list[dict[str, Any]]:
        """Pages, queues and counts of every replica that answers."""
        with _OPEN.open(f"{self.url}/stats", timeout=30) as response:
            replicas: list[dict[str, Any]] = json.load(response)["replicas"]
        return replicas

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """One completion; ``fields`` are those of OpenAI's interface.

        Raises:
            urllib.error.HTTPError: the request was refused or failed.
        """
        body = json.dumps({"prompt": prompt, **fields}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with _OPEN.open(request, timeout=300) as response:
            completion: dict[str, Any] = json.load(response)
        return completion

    def wait_healthy(self, timeout: float = 60.0) -> None:
        """Returns when a prefiller and a decoder answer.

        Raises:
            Unavailable: they don't in time.
        """
        deadline, cause = time.monotonic() + timeout, "no replica answered"
        while time.monotonic() < deadline:
            try:
                with _OPEN.open(f"{self.url}/health", timeout=10):
                    return
            except OSError as error:
                cause = str(error)
            time.sleep(0.2)
        raise Unavailable(f"{self.url}/health did not succeed within {timeout:g} s: {cause}")

    def close(self) -> None:
        """Deletes the application; Serve goes on."""
        serve.delete(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_local(
    args: ServeArgs | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str = "fabric-ray",
    timeout: float = 120.0,
) -> LocalApp:
    """Starts Ray and Serve unless they run already, then the application; returns when it is
    healthy. Other applications go on.

    Args:
        args: of the deployment.
        host: address of Serve's HTTP server, if this call starts it.
        port: likewise.
        name: of the application.
        timeout: seconds for each step of the start.
    """
    args = args or ServeArgs()
    check_model(args)
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    client: Any = _get_global_client()
    port = client.http_config.port  # of a Serve that ran already, another one
    app = LocalApp(args, url=f"http://{host}:{port}", name=name)
    try:
        app.wait_running(timeout)
        app.wait_healthy(timeout)
    except BaseException:
        app.close()
        raise
    return app
