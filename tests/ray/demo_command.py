"""``fabric-ray demo`` as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_demo(*arguments: str, address: str = "") -> dict[str, Any]:
    """The JSON object that a demo prints, whose checks held; without an address it starts Ray."""
    command = [str(Path(sys.executable).parent / "fabric-ray"), "demo", *arguments, "--json"]
    done = subprocess.run(
        [*command, "--address", address] if address else command,
        env={**os.environ, "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["verified"] is True
    assert all(result.get("checks", {}).values())
    return result
