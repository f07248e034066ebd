"""An engine inside each of two Ray actors, found by name.

python examples/ray_actors.py
"""

from typing import Any

import ray
import torch

from fabric_ray import CounterRef, RegionDescriptor
from fabric_ray.runtime import directory, engine

N = 1 << 20


class Receiver:
    def offer(self) -> tuple[RegionDescriptor, CounterRef]:
        self.tensor, self.region = engine(name="receiver").empty(N, torch.float32)
        self.counter = engine().counter()
        return self.region.descriptor(), self.counter.ref

    def sum(self) -> float:
        # If the sender's process dies first, this raises PeerLost instead of waiting for ever.
        writer = engine().peer(directory().lookup("sender"))
        self.counter.wait(1, writers=[writer])
        return float(self.tensor.sum())


class Sender:
    def push(self, offer: tuple[RegionDescriptor, CounterRef]) -> str:
        descriptor, counter = offer
        tensor, region = engine(name="sender").empty(N, torch.float32)
        tensor.fill_(2.0)
        there = engine().import_region(descriptor)
        engine().write(region, there, imm=counter).wait()
        return str(engine().explain(there.peer).transport)


def main() -> None:
    ray.init()
    receiver: Any = ray.remote(Receiver).remote()
    sender: Any = ray.remote(Sender).remote()
    offer = ray.get(receiver.offer.remote())  # descriptors pickle
    transport = ray.get(sender.push.remote(offer))
    assert ray.get(receiver.sum.remote()) == 2.0 * N
    print(f"{4 * N} bytes arrived over {transport}")
    ray.shutdown()


if __name__ == "__main__":
    main()
