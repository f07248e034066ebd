"""Disaggregated inference on this machine: run this, then examples/serve/ask.sh.

It goes on until Ctrl-C; with ``--once`` it asks itself and ends.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

from fabric_ray.serve import DecodeArgs, ServeArgs, run_local


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-llama", help="a small model, or a directory")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    # A checkpoint has a chat template of its own.
    template = None if Path(options.model).is_dir() else Path(__file__).with_name("chat.jinja")
    args = ServeArgs(
        model=options.model,
        chat_template=None if template is None else str(template.resolve()),
        decode=DecodeArgs(options={"num_replicas": 2}),
    )
    with run_local(args, port=options.port) as app:
        print(f"listens at {app.url}")
        answer = app.complete("Pages of a prompt", max_tokens=12, seed=1)
        times = answer["x-fabric"]
        print(
            f"{answer['usage']['completion_tokens']} tokens arrived, "
            f"the first after {times['first_token'] * 1e3:.1f} ms: "
            f"prefill {times['prefill'] * 1e3:.1f} ms, transfer beside it "
            f"{times['transfer'] * 1e3:.1f} ms"
        )
        for replica in app.stats():
            print(f"{replica['role']:8} {replica['replica']}: pid {replica['pid']}")
        with contextlib.suppress(KeyboardInterrupt):
            while not options.once:
                time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
