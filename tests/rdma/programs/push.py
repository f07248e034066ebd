"""A weight push between two processes without torch or Ray, for the guest: a plan, its writes,
a counter that tells when all is there, and every byte compared.

    push.py TRANSPORT TRAINER_NICS ROLLOUT_NICS
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from fabric_ray import CounterRef, RegionDescriptor, TransferEngine
from fabric_ray._native import bind_copies
from fabric_ray.plan import (
    Concat,
    Container,
    DType,
    Leaf,
    Mesh,
    Plan,
    Replicate,
    Shard,
    Side,
    Tensor,
    plan,
)

F32 = DType.of("float32")
TRAINERS, ROLLOUTS = (0, 1), (0, 1)
TOKEN = "push"
VERSIONS = 3
Q, K, V, DOWN = (
    Tensor("q", (256, 512), F32),
    Tensor("k", (64, 512), F32),
    Tensor("v", (64, 512), F32),
    Tensor("down", (512, 1024), F32),
)


class Place(msgspec.Struct):
    """Where a rollout takes its weights."""

    rank: int
    region: bytes
    counter: bytes


def _leaf(tensor: Tensor, ranks: Sequence[int], dim: int) -> Leaf:
    return Leaf(tensor, Mesh.line(ranks), (Shard(dim),))


def the_plan() -> Plan:
    """Rows over trainers; fused q, k, v over rollouts, and columns of the other one."""
    source = [Container(t.name, F32, _leaf(t, TRAINERS, 0)) for t in (Q, K, V, DOWN)]
    fused = Concat(0, tuple(_leaf(t, ROLLOUTS, 0) for t in (Q, K, V)))
    copy = Leaf(V, Mesh.line(ROLLOUTS), (Replicate(),))
    target = [
        Container("qkv", F32, fused),
        Container("down", F32, _leaf(DOWN, ROLLOUTS, 1)),
        Container("v_again", F32, copy),
    ]
    return plan(Side.of(TRAINERS, source), Side.of(ROLLOUTS, target))


def full(tensor: Tensor, version: int) -> np.ndarray:
    """A tensor of a version: no two elements are alike."""
    n = int(np.prod(tensor.shape))
    start = version * 1e7 + 1e6 * (Q, K, V, DOWN).index(tensor)
    return (start + np.arange(n, dtype=np.float32)).reshape(tensor.shape)


def shard(array: np.ndarray, rank: int, dim: int, ways: int) -> np.ndarray:
    return np.ascontiguousarray(np.split(array, ways, axis=dim)[rank])


def expected(rank: int, version: int) -> list[np.ndarray]:
    """What a rollout's containers hold."""
    cut = [shard(full(t, version), rank, 0, len(ROLLOUTS)) for t in (Q, K, V)]
    down = shard(full(DOWN, version), rank, 1, len(ROLLOUTS))
    return [np.concatenate(cut), down, full(V, version)]


def offsets() -> list[int]:
    ends = np.cumsum([a.nbytes for a in expected(0, 0)])
    return [0, *(int(e) for e in ends[:-1])]


def rollout(transport: str, nics: Sequence[str]) -> None:
    """Says where it takes weights, then checks each version."""
    p = the_plan()
    nbytes = sum(a.nbytes for a in expected(0, 0))
    engines = [
        TransferEngine(name=f"rollout-{r}", transport=transport, nics=tuple(nics), token=TOKEN)
        for r in ROLLOUTS
    ]
    regions = [engine.alloc(nbytes) for engine in engines]
    counters = [engine.counter() for engine in engines]
    for rank in ROLLOUTS:
        region, counter = regions[rank].descriptor().to_bytes(), counters[rank].ref.to_bytes()
        say(Place(rank, region, counter))
    for version in range(1, VERSIONS + 1):
        for rank in ROLLOUTS:
            counters[rank].wait(p.expected_pages(rank), timeout=60)
            for want, start in zip(expected(rank, version), offsets(), strict=True):
                got = regions[rank].numpy()[start : start + want.nbytes].view(np.float32)
                if not np.array_equal(got, want.reshape(-1)):
                    raise SystemExit(f"rollout {rank}: version {version} differs")
        say(version)
    # Until the trainer has seen it.
    sys.stdin.readline()


def trainer(transport: str, nics: Sequence[str], child: subprocess.Popen[bytes]) -> None:
    """Pushes versions to what the rollout process has told."""
    assert child.stdout is not None
    assert child.stdin is not None
    p = the_plan()
    places = [msgspec.json.decode(child.stdout.readline(), type=Place) for _ in ROLLOUTS]
    engines = [
        TransferEngine(name=f"trainer-{r}", transport=transport, nics=tuple(nics), token=TOKEN)
        for r in TRAINERS
    ]
    tensors = (Q, K, V, DOWN)
    shards = [[shard(full(t, 0), r, 0, len(TRAINERS)) for t in tensors] for r in TRAINERS]
    for version in range(1, VERSIONS + 1):
        transfers = []
        for rank, engine in enumerate(engines):
            for at, tensor in zip(shards[rank], tensors, strict=True):
                at[...] = shard(full(tensor, version), rank, 0, len(TRAINERS))
            sources = {i: (engine.register(a), 0) for i, a in enumerate(shards[rank])}
            for place in places:
                copies = [c for c in p.for_source(rank) if c.peer == place.rank]
                there = engine.import_region(RegionDescriptor.from_bytes(place.region))
                batch, _ = bind_copies(copies, sources, there, offsets())
                counter = CounterRef.from_bytes(place.counter)
                transfers.append(engine.submit(batch, imm=counter, timeout=60))
        for transfer in transfers:
            transfer.wait()
        if msgspec.json.decode(child.stdout.readline(), type=int) != version:
            raise SystemExit("the rollout is at another version")
    print("transport", transfers[-1].transport)
    child.stdin.write(b"\n")
    child.stdin.flush()
    if child.wait(60):
        raise SystemExit(f"the rollout process ended with {child.returncode}")


def say(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    transport, ours, theirs = sys.argv[1:4]
    if sys.argv[4:] == ["rollout"]:
        return rollout(transport, [n for n in theirs.split(",") if n])
    command = [sys.executable, *sys.argv, "rollout"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            trainer(transport, [n for n in ours.split(",") if n], child)
        except BaseException:
            child.kill()
            raise
    print(f"{VERSIONS} versions, every byte as expected")


if __name__ == "__main__":
    main()
