"""What the package's extras bring, as what can be typed wherever the package itself came from."""

from __future__ import annotations

import re
import shlex

_RAY = ("ray>=2.49,<3", "torch>=2.6,<3", "safetensors>=0.4,<1", "matplotlib>=3.8,<4")

# Those of pyproject.toml that errors name; a package that runs from a clone has no metadata to ask.
EXTRAS: dict[str, tuple[str, ...]] = {
    "ray": _RAY,
    "serve": (*_RAY, "ray[serve]>=2.60,<3", "pyyaml>=6,<7", "jinja2>=3.1,<4"),
    "verl": (*_RAY, "verl>=0.9.1,<0.10"),
    "vllm": ("vllm>=0.30,<0.34",),
    "cuda": ("nvidia-cuda-nvrtc>=13,<14",),
}


def how_to_install(extra: str, *packages: str) -> str:
    """The command that installs what an extra brings, or only some packages of it."""
    wanted = [r for r in EXTRAS[extra] if not packages or _name(r) in packages]
    return f"run: {shlex.join(['pip', 'install', *wanted])} (fabric-ray's extra [{extra}])"


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0]


__all__ = ["EXTRAS", "how_to_install"]
