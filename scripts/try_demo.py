"""Runs the demo of an installed wheel: ``python scripts/try_demo.py`` where `[ray]` is installed.

In an empty directory, with next to nothing in the environment, and as user 1000 without any
capability where it is started by root: what a container is at its barest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fabric_ray

ROOT = Path(__file__).parents[1]
USER = 1000
PUSHES = 2
COMMAND = ("demo", "weights", "--parameters", "20e6", "--pushes", str(PUSHES), "--json")


def main() -> None:
    home = Path(fabric_ray.__file__).parent
    assert home != ROOT / "fabric_ray", "this is the checkout, not a wheel"
    script = Path(sys.executable).with_name("fabric-ray")
    who: dict[str, Any] = {}
    # Ray's sockets have long names: a short one is left for them.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="try-") as empty:
        if os.geteuid() == 0:
            who = {"user": USER, "group": USER, "extra_groups": []}
            check_interpreter(who)
            os.chown(empty, USER, USER)
        environment = {
            "HOME": empty,
            "TMPDIR": empty,
            "PATH": f"{script.parent}:/usr/bin:/bin",
            "RAY_ADDRESS": "local",
        }
        done = subprocess.run(
            [script, *COMMAND], cwd=empty, env=environment, stdout=subprocess.PIPE, **who
        )
    assert done.returncode == 0, f"the demo ended with {done.returncode}"
    result = json.loads(done.stdout)
    assert result["verified"]
    assert len(result["pushes"]) == PUSHES
    print(
        f"fabric_ray {fabric_ray.__version__}: {PUSHES} pushes of {result['bytes']} bytes, every "
        f"byte checked, as user {who.get('user', os.geteuid())}"
    )


def check_interpreter(who: dict[str, Any]) -> None:
    """Ends in words where another user can't run this Python, as one below /root."""
    try:
        subprocess.run([sys.executable, "-c", ""], check=True, **who)
    except PermissionError:
        base = Path(sys.executable).resolve()
        sys.exit(
            f"user {USER} can't run {base}; name another: make wheel-demo PYTHONS=/usr/bin/python3"
        )


if __name__ == "__main__":
    main()
