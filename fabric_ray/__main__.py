"""``python -m fabric_ray``: the command, where ``fabric-ray`` isn't on the path."""

from __future__ import annotations

from fabric_ray.cli.main import app

if __name__ == "__main__":
    # The name that help, examples and completion have.
    app(prog_name="fabric-ray")
