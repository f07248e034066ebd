"""Pages leave layer by layer while the next layer is computed: a word is bumped, a callback pushes.

Here a thread of Python computes; on a GPU a kernel would bump the word (`watch(..., device=0)`).

    python examples/layer_watcher.py
"""

import threading

import numpy as np

from fabric_ray import Transfer, TransferEngine, pages

LAYERS, PAGES, PAGE = 8, 64, 32 << 10
LAYER = PAGES * PAGE


def main() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.permutation(PAGES)  # where the decoder has room
    with TransferEngine(name="prefill") as prefill, TransferEngine(name="decode") as decode:
        kv, cache = prefill.alloc(LAYERS * LAYER), decode.alloc(LAYERS * LAYER)
        there, counter = prefill.import_region(cache.descriptor()), decode.counter()
        prefill.connect(there.peer)
        pushed: list[Transfer] = []

        def push(old: int, new: int) -> None:
            # Two layers may have ended before the thread looks: values in between go unseen.
            for layer in range(old, new):
                ours = pages(range(PAGES), stride=PAGE, offset=layer * LAYER)
                where = pages(theirs, stride=PAGE, offset=layer * LAYER)
                pushed.append(prefill.write_pages(PAGE, kv, ours, there, where, imm=counter.ref))

        layers_done = prefill.watch(push)

        def compute() -> None:
            for layer in range(LAYERS):
                bytes_of_layer = rng.integers(0, 256, LAYER, dtype=np.uint8)
                kv.numpy()[layer * LAYER :][:LAYER] = bytes_of_layer
                layers_done.add()  # after the bytes of the layer

        worker = threading.Thread(target=compute)
        worker.start()
        for layer in range(LAYERS):
            counter.wait(PAGES, writers=[decode.peer(prefill.address)])
            print(f"{(layer + 1) * PAGES} pages arrived, {layers_done.value} layers are computed")
        worker.join()
        for transfer in pushed:
            transfer.wait()
        for layer in range(LAYERS):
            sent, got = (
                r.numpy()[layer * LAYER :][:LAYER].reshape(PAGES, PAGE) for r in (kv, cache)
            )
            assert np.array_equal(got[theirs], sent)
        print(f"all of {LAYERS} layers arrived, in {len(pushed)} paged writes")


if __name__ == "__main__":
    main()
