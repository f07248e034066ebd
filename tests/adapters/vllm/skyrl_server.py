"""SkyRL's own vLLM server, with the arguments of ``vllm serve``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor

    _, model, *rest = sys.argv[1:]
    # Otherwise it takes the class of GPUs.
    worker = ["--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"]
    vllm_server_actor.main(["--model", model, *worker, *rest])
