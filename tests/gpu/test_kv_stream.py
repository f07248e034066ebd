"""Pages of vLLM's caches leave when the kernels that write them are through."""

from __future__ import annotations

import threading

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.integrations.vllm_kv_stream import Stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LAYERS, TOKENS = 6, 4096


def test_rs_1_layers_leave_in_order_and_as_they_were_computed() -> None:
    cache = torch.zeros(LAYERS, TOKENS, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    left: list[int] = []
    over = threading.Event()
    with TransferEngine(name="prefiller") as ours, TransferEngine(name="decoder") as theirs:
        pages, inbox = ours.register(cache), theirs.alloc(cache.nbytes)
        there = ours.import_region(inbox.descriptor())
        stream = Stream(cache.device)

        def send(layer: int) -> None:
            at, nbytes = layer * TOKENS * 4, TOKENS * 4
            ours.write(pages, there, nbytes, src_offset=at, dst_offset=at).wait(30)
            left.append(layer)

        with torch.cuda.stream(torch.cuda.Stream()):
            for layer in range(LAYERS):
                torch.cuda._sleep(20_000_000)
                cache[layer].fill_(layer + 1)
                stream.then(lambda layer=layer: send(layer))
            stream.then(over.set)
        assert over.wait(60)
        stream.close()
        assert left == [*range(LAYERS)]
        arrived = inbox.tensor(torch.int32).view(LAYERS, TOKENS)
        assert torch.equal(arrived, torch.arange(1, LAYERS + 1).int()[:, None].expand(-1, TOKENS))
