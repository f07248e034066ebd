"""KV pages from a prefiller on one host of a Ray cluster to a decoder on another.

    RAY_ADDRESS=10.0.0.1:6379 python examples/kv_two_hosts.py

On a cluster of one host both are there.
"""

from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fabric_ray import CounterRef, RegionDescriptor, pages
from fabric_ray.engine import EngineAddress
from fabric_ray.runtime import engine

LAYERS, TOKENS, HEADS, DIM = 4, 16, 8, 64  # of a page: TOKENS x HEADS x DIM, bf16
POOL = 64  # pages of each layer that an engine has
PAGE = TOKENS * HEADS * DIM * 2  # bytes
SHAPE = (LAYERS, POOL, TOKENS, HEADS, DIM)

Request = tuple[RegionDescriptor, CounterRef, list[int]]


class Decoder:
    def ask(self, wanted: list[int]) -> Request:
        """Where the pages of a request go, and what counts them."""
        self.cache, region = engine(name="decoder").empty(SHAPE, torch.bfloat16)
        self.wanted, self.counter = wanted, engine().counter()
        return region.descriptor(), self.counter.ref, wanted

    def receive(self, prefiller: EngineAddress) -> torch.Tensor:
        """Waits until all pages of all layers are here; returns them."""
        # If the prefiller dies first, this raises PeerLost instead of waiting for ever.
        writers = [engine().peer(prefiller)]
        self.counter.wait(LAYERS * len(self.wanted), writers=writers)
        return self.cache[:, self.wanted]


class Prefiller:
    def address(self) -> EngineAddress:
        return engine(name="prefiller").address

    def push(self, request: Request, ours: list[int]) -> tuple[torch.Tensor, str]:
        """Writes each layer as it is computed; returns what was written, and over what."""
        descriptor, counter, theirs = request
        cache, region = engine().empty(SHAPE, torch.bfloat16)
        there = engine().import_region(descriptor)
        for layer in range(LAYERS):
            cache[layer].normal_()
            start = layer * POOL * PAGE
            target = pages(theirs, stride=PAGE, offset=start)
            source = pages(ours, stride=PAGE, offset=start)
            engine().write_pages(PAGE, region, source, there, target, imm=counter).wait()
        return cache[:, ours], str(engine().explain(there.peer).transport)


def actor(cls: type, node: dict[str, Any]) -> Any:
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(cls).options(num_cpus=0, scheduling_strategy=where).remote()


def main() -> None:
    ray.init()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    prefiller, decoder = actor(Prefiller, nodes[0]), actor(Decoder, nodes[-1])
    request = decoder.ask.remote([40, 3, 17, 8, 22])
    address = ray.get(prefiller.address.remote())
    arrived = decoder.receive.remote(address)
    sent, transport = ray.get(prefiller.push.remote(request, [0, 1, 2, 3, 4]))
    assert torch.equal(ray.get(arrived), sent)
    ends = " to ".join(node["NodeManagerAddress"] for node in (nodes[0], nodes[-1]))
    print(f"{LAYERS * 5} pages of {PAGE} bytes arrived over {transport}, from {ends}")
    ray.shutdown()


if __name__ == "__main__":
    main()
