import os
from pathlib import Path

if folder := os.environ.get("FABRIC_RAY_FAKE_GPU"):
    from tests import fake_gpu

    fake_gpu.install(Path(folder))
