"""Rollouts pass a version on to one another, and one joins and gets it, without torch or Ray, for
the guest: real rollouts, each with an engine of its own, every byte compared.

    relay.py TRANSPORT NICS NICS
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np

from fabric_ray import CounterRef, RegionDescriptor, TransferEngine
from fabric_ray._native import bind_copies
from fabric_ray.plan import (
    Container,
    DType,
    Leaf,
    LocalContainer,
    Mesh,
    Replicate,
    Side,
    Tensor,
    first_replicas,
    plan,
)
from fabric_ray.weights.fanout import Fanout
from fabric_ray.weights.report import PushTarget
from fabric_ray.weights.staging import StagingMemory
from fabric_ray.weights.target import WeightTarget

F32 = DType.of("float32")
MODEL = [Tensor(f"layers.{i}", (96, 128 + 16 * i), F32) for i in range(6)]
ROLLOUTS, JOINER = (0, 1, 2), 3
TOKEN = "relay"
TIMEOUT = 60.0


def everything(ranks: int) -> Side:
    """Each rank holds all tensors, so that all are replicas."""
    mesh = Mesh.line(range(ranks))
    return Side.of(ranks, [Container(t.name, F32, Leaf(t, mesh, (Replicate(),))) for t in MODEL])


def full(tensor: Tensor, version: int) -> np.ndarray:
    """A tensor of a version: no two elements are alike."""
    start = version * 1e6 + 1e5 * MODEL.index(tensor)  # all exact in float32
    count = int(np.prod(tensor.shape))
    return (start + np.arange(count, dtype=np.float32)).reshape(tensor.shape)


class NumpyStaging(StagingMemory):
    """Shows its memory as arrays: torch takes minutes to load on an emulated CPU."""

    def lend(self, container: LocalContainer) -> np.ndarray:  # type: ignore[override]
        part = self._memory[self.offsets[container.index] :][: container.nbytes]
        return part.view(np.float32).reshape(container.shape)


class World:
    def __init__(self, transport: str, nics: tuple[str, str]) -> None:
        self._transport, self._nics = transport, nics
        self.target = everything(len(ROLLOUTS))
        self.plan = plan(everything(1), first_replicas(self.target))
        self.trainer = self._engine("trainer", 0)
        self.rollouts = {n: self._rollout(n, rank=n) for n in ROLLOUTS}
        self.fanout = Fanout(
            self.plan,
            self.target,
            relay=True,
            ranks={n: n for n in ROLLOUTS},
            trainers=[self.trainer.address.to_bytes()],
            rollouts={n: rollout.address() for n, rollout in self.rollouts.items()},
        )
        self.push_targets = {n: self._accept(n) for n in ROLLOUTS}
        self.version = 0

    def _engine(self, name: str, host: int) -> TransferEngine:
        nics = tuple(nic for nic in self._nics[host].split(",") if nic)
        # On an emulated CPU that others use as well, a handshake takes seconds.
        patience = {"peer_timeout": 20.0}
        return TransferEngine(
            name=name, transport=self._transport, nics=nics, token=TOKEN, **patience
        )

    def _rollout(self, number: int, rank: int) -> WeightTarget:
        # Neighbours in the chain are on different hosts.
        engine = self._engine(f"rollout-{number}", (number + 1) % 2)
        name = f"rollout {number}"
        return WeightTarget(self.target, rank=rank, name=name, engine=engine)

    def _accept(self, number: int, giver: int | None = None) -> PushTarget:
        fanout, name = self.fanout, f"rollout {number}"
        plan = fanout.inbound(number) if giver is None else fanout.copied_by(number, giver)
        share = fanout.share("session", number, name, plan, self.plan.to_bytes(), delta=False)
        return self.rollouts[number].accept(share)

    def push(self) -> None:
        """The trainer writes to the head, which passes on what has arrived; then all flip."""
        self.version += 1
        for number, children in self.fanout.children.items():
            arms = [self.push_targets[child] for child in children]
            self.rollouts[number].pass_on(arms, timeout=TIMEOUT)
        [head] = self.fanout.heads.values()
        digest = self._write(self.push_targets[head])
        for number, rollout in self.rollouts.items():
            rollout.confirm(self.version, timeout=TIMEOUT, digest=digest)
            print(f"rollout {number} has version {self.version}", flush=True)
        self.push_targets = {
            n: rollout.commit(self.version) for n, rollout in self.rollouts.items()
        }
        self.check()

    def _write(self, push_target: PushTarget) -> int:
        tensors = [full(tensor, self.version) for tensor in MODEL]
        sources = {i: (self.trainer.register(array), 0) for i, array in enumerate(tensors)}
        there = self.trainer.import_region(RegionDescriptor.from_bytes(push_target.region))
        sent, total = [], 0
        for stripe, counter in enumerate(push_target.counters):
            copies = [
                c for c in self.plan.for_source(0) if push_target.stripes[c.dst_container] == stripe
            ]
            if copies:
                batch, digest = bind_copies(copies, sources, there, push_target.offsets)
                total += digest.compute()
                imm = CounterRef.from_bytes(counter)
                sent.append(self.trainer.submit(batch, imm=imm, timeout=TIMEOUT))
        for transfer in sent:
            transfer.wait()
        print("transport", sent[-1].transport)
        return total & ((1 << 64) - 1)

    def join(self) -> None:
        """Another one is given the version by the last in the chain, and stands behind it then."""
        giver = max(self.fanout.replicas(0))
        self.rollouts[JOINER] = joiner = self._rollout(JOINER, rank=0)
        self.fanout.join(JOINER, 0, joiner.address())
        push_target = self._accept(JOINER, giver)
        digest = self.rollouts[giver].give(push_target, self.version, timeout=TIMEOUT)
        joiner.confirm(self.version, timeout=TIMEOUT, digest=digest)
        joiner.commit(self.version, joining=True)
        self.check()
        self.push_targets = {
            n: rollout.set_inbound(self.fanout.inbound(n)) for n, rollout in self.rollouts.items()
        }

    def check(self) -> None:
        for number, rollout in self.rollouts.items():
            held: Mapping[str, object] = rollout.weights
            for tensor in MODEL:
                if not np.array_equal(held[tensor.name], full(tensor, self.version)):
                    raise SystemExit(f"rollout {number}: `{tensor.name}` of {self.version} differs")


def main() -> None:
    import fabric_ray.weights.target

    fabric_ray.weights.target.StagingMemory = NumpyStaging  # type: ignore[misc]
    transport, a, b = sys.argv[1:4]
    world = World(transport, (a, b))
    world.push()
    world.push()
    world.join()
    world.push()
    print(f"{len(world.rollouts)} rollouts at version {world.version}, every byte as expected")


if __name__ == "__main__":
    main()
