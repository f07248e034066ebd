"""KV pages from a prefiller to a decoder: shuffled pages, layer by layer, one count per page.

The decoder hands out free pages and a counter, and starts when as many pages have been counted as
the request has, in all layers.

    python examples/kv_pages.py
"""

import torch

from fabric_ray import TransferEngine, pages

LAYERS, TOKENS, HEADS, DIM = 4, 16, 8, 64  # of a page: TOKENS x HEADS x DIM, bf16
POOL = 64  # pages of each layer that an engine has
PAGE = TOKENS * HEADS * DIM * 2  # bytes


def main() -> None:
    with TransferEngine(name="prefill") as prefill, TransferEngine(name="decode") as decode:
        shape = (LAYERS, POOL, TOKENS, HEADS, DIM)
        prefilled, source = prefill.empty(shape, torch.bfloat16)
        cache, target = decode.empty(shape, torch.bfloat16)
        prefilled.normal_()

        # The decoder: where to put it, and what to count.
        wanted = [40, 3, 17, 8, 22]
        counter = decode.counter()
        request = (target.descriptor(), counter.ref, wanted)

        # The prefiller: a layer is pushed as soon as it is computed.
        descriptor, arrivals, theirs = request
        there = prefill.import_region(descriptor)
        ours = [0, 1, 2, 3, 4]
        for layer in range(LAYERS):
            start = layer * POOL * PAGE
            prefill.write_pages(
                PAGE,
                source,
                pages(ours, stride=PAGE, offset=start),
                there,
                pages(theirs, stride=PAGE, offset=start),
                imm=arrivals,
            )

        # The decoder again: every page of every layer, in whatever order they came.
        counter.wait(LAYERS * len(wanted), writers=[decode.peer(prefill.address)])
        assert torch.equal(cache[:, wanted], prefilled[:, ours])
        print(f"{counter.value} pages of {PAGE} bytes arrived")


if __name__ == "__main__":
    main()
