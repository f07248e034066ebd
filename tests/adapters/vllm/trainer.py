"""A trainer that streams whole tensors to a real server: ``python trainer.py URL OPTIONS``, a JSON
object of ``FabricTrainerInitInfo``'s fields. With ``"unpaused"`` it never pauses the server;
``"bucket"`` is the size of its buckets, in bytes. It runs under the Python of the servers.

Each line of its input is a JSON object: the ``checkpoint`` to send, ``without`` names of tensors,
``fail_at`` the name of a tensor. Each line of its output is the error, or ``null``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any


def main(url: str, options: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from fabric_ray.integrations import vllm
    from fabric_ray.integrations.vllm_plugin import register

    @cache  # requests that run shall not end while one is read
    def load(checkpoint: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    class Source(ModuleSource):
        """Changes its module, and fails or leaves out tensors when it is told to."""

        def turn_to(self, checkpoint: str, without: list[str], fail_at: str | None) -> None:
            self._module = load(checkpoint)
            self._without, self._fail_at = without, fail_at
            # A method in vLLM 0.32, cached in 0.33.
            whole: Any = ModuleSource(self._module).metadata
            whole = whole() if callable(whole) else whole
            self.metadata = [meta for meta in whole if meta.name not in without]

        def _some(self, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            for name, tensor in named:
                if name == self._fail_at:
                    raise RuntimeError(f"{name} can't be gathered")
                if name not in self._without:
                    yield name, tensor

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return self._some(super().__iter__())

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            return self._some(super().iter_full())

    class Unpaused(HTTPVLLMWeightSyncClient):
        """Requests run through its updates."""

        def is_paused(self) -> bool:
            return False

        def pause_generation(self, mode: str) -> None:
            pass

        def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
            return True

        def reset_encoder_cache(self) -> None:
            pass

        def resume_generation(self) -> None:
            pass

    register()
    vllm.BUCKET = options.pop("bucket", vllm.BUCKET)
    client = Unpaused(url) if options.pop("unpaused", False) else HTTPVLLMWeightSyncClient(url)
    sender: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if sender is None:
                source = Source(torch.nn.Module())
                source.turn_to(asked["checkpoint"], [], None)
                sender = WeightTransferTrainerFactory.trainer_init(
                    vllm.FabricTrainerInitInfo(
                        **{"rank": 0, "workers": 1, "timeout": 60.0, **options}
                    ),
                    client=client,
                    source=source,
                )
            source.turn_to(asked["checkpoint"], asked["without"], asked["fail_at"])
            sender.send_weights()
            answer = None
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"> {json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
