"""Engines of a cluster that authenticates take their secret from Ray's token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CLUSTER = """
import ray
from fabric_ray import runtime

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)

@ray.remote(num_cpus=0)
class Holder:
    def open(self):
        self.engine = runtime.engine(name="holder")
        self.memory = self.engine.alloc(8)
        return self.engine.config.token, self.memory.descriptor()

here = runtime.engine(name="driver")
holder = Holder.remote()
token, descriptor = ray.get(holder.open.remote())
assert token == here.config.token == runtime.cluster_token() == runtime.ray_token()
here.write(here.alloc(8), here.import_region(descriptor)).wait(30)
print(token.hex())
"""


def test_engines_of_a_cluster_take_its_ray_token(tmp_path: Path) -> None:
    said = []
    for token in ("0123456789abcdef", "fedcba9876543210"):
        path = tmp_path / token
        path.write_text(token * 4)
        env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER],
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout)
    assert said[0] != said[1]
