"""Ray Serve LLM with disaggregated prefill on this machine's CPUs.

Run this, then examples/serve_llm/ask.sh.

It goes on until Ctrl-C; with ``--once`` it asks itself and ends. Without ``--model`` it makes a
tiny Llama with random weights, whose words are w4, w5, ... For GPUs see
"Ray Serve LLM" in docs/integrations.md.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import ray
import tiny_model
from ray import serve

from fabric_ray.integrations.ray_llm import build_pd_openai_app

# vLLM's CPU build, two engines of it on one host.
CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name or a folder; by default a tiny one is made")
    parser.add_argument("--port", type=int, default=8000)
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", type=int, default=1, help="replicas of this side")
    parser.add_argument("--prefill-up-to", type=int, metavar="N", help="scale it with its queue")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of a replica")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            tiny_model.write(Path(folder), seed=1)
        model = options.model or folder
        # Replicas reserve cores, most of which wait: a laptop may have fewer.
        cores = 4 + 2 * (max(options.prefill, options.prefill_up_to or 0) + options.decode)
        ray.init("local", num_cpus=cores, runtime_env={"env_vars": CPU})
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        replicas = {
            role: {"num_replicas": getattr(options, role)} for role in ("prefill", "decode")
        }
        if options.prefill_up_to:
            replicas["prefill"] = scaled(options.prefill, options.prefill_up_to)
        args = {role: engine(model, role, count) for role, count in replicas.items()}
        for config in args.values():
            config["engine_kwargs"]["tensor_parallel_size"] = options.tensor_parallel
            config["placement_group_config"]["bundles"] *= options.tensor_parallel
        app = build_pd_openai_app({f"{role}_config": args[role] for role in args})
        serve.run(app, name="pd", route_prefix="/")
        url = f"http://127.0.0.1:{options.port}"
        print(f"listens at {url}", flush=True)
        if options.once:
            body = {"model": "model", "prompt": "w5 w6 w7 w8", "max_tokens": 8, "temperature": 0}
            answer = ask(f"{url}/v1/completions", body)
            print(answer["choices"][0]["text"])
        with contextlib.suppress(KeyboardInterrupt):
            while not options.once:
                time.sleep(1)
        serve.shutdown()
        ray.shutdown()
    return 0


def scaled(least: int, most: int) -> dict:
    """A replica for each two requests whose prompts wait or are computed."""
    config = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 2}
    return {"autoscaling_config": {**config, "upscale_delay_s": 2, "downscale_delay_s": 10}}


def engine(model: str, role: str, replicas: dict) -> dict:
    """The configuration of one side; all that is fabric-ray's is one word, and the role."""
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    return {
        "model_loading_config": {"model_id": "model", "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "deployment_config": replicas,
        "engine_kwargs": {
            "kv_transfer_config": {"kv_connector": "FabricRayConnector", "kv_role": kv_role},
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
        },
    }


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
