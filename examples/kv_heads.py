"""KV pages between unequal tensor parallelism: one plan for a page, and a request's page tables.

Which bytes of a page each prefill rank has for each decode rank follows from two layouts, once.
Here four decode ranks share two KV heads, so each head is wanted by two of them.

    python examples/kv_heads.py
"""

from contextlib import ExitStack

import torch

from fabric_ray import TransferEngine, pages
from fabric_ray.plan import Container, DType, Leaf, Mesh, Replicate, Shard, Side, Tensor, plan

HEADS, TOKENS, DIM, POOL = 2, 16, 64, 32
PREFILL, DECODE = 2, 4  # ranks
PAGE = Tensor("page", (2, HEADS, TOKENS, DIM), DType.of("bfloat16"))  # K and V
OURS, THEIRS = [4, 0, 9], [30, 7, 11]  # a request's pages, at either end


def side(ranks: int) -> Side:
    """Heads over ranks; where there are fewer heads than ranks, neighbours hold the same."""
    shards = min(ranks, HEADS)
    mesh = Mesh(tuple(range(ranks)), (shards, ranks // shards))
    leaf = Leaf(PAGE, mesh, (Shard(1), Replicate()))
    return Side.of(ranks, [Container("page", PAGE.dtype, leaf)])


def main() -> None:
    routes = plan(side(PREFILL), side(DECODE))
    nbytes = routes.local_containers("source", 0)[0].nbytes  # of a page, the same everywhere here
    whole = torch.randn(POOL, *PAGE.shape).to(torch.bfloat16)
    with ExitStack() as stack:
        decoders = [stack.enter_context(TransferEngine(name=f"decode-{r}")) for r in range(DECODE)]
        caches = [d.empty((POOL, 2, 1, TOKENS, DIM), torch.bfloat16) for d in decoders]
        counters = [decoder.counter() for decoder in decoders]
        for rank in range(PREFILL):
            prefill = stack.enter_context(TransferEngine(name=f"prefill-{rank}"))
            source = prefill.register(whole[:, :, rank].contiguous())
            for copy in routes.for_source(rank):
                there = prefill.import_region(caches[copy.peer][1].descriptor())
                for row in copy.rows():
                    for i in range(row.runs):  # K, then V
                        src = row.src_offset + i * row.src_stride
                        dst = row.dst_offset + i * row.dst_stride
                        prefill.write_pages(
                            row.nbytes,
                            source,
                            pages(OURS, stride=nbytes, offset=src),
                            there,
                            pages(THEIRS, stride=nbytes, offset=dst),
                            imm=counters[copy.peer].ref,
                        )
        for rank, ((cache, _), counter) in enumerate(zip(caches, counters, strict=True)):
            counter.wait(routes.expected_pages(rank) * len(THEIRS))
            head = rank * HEADS // DECODE
            assert torch.equal(cache[THEIRS].squeeze(2), whole[OURS][:, :, head])
            print(f"decode-{rank}: head {head} of {len(THEIRS)} pages arrived")


if __name__ == "__main__":
    main()
