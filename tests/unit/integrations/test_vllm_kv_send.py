"""A prefill worker's transfers, between real ends and without vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray import TransferEngine
from fabric_ray.errors import NotQuiesced
from fabric_ray.integrations import vllm_kv_content, vllm_kv_send
from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_layout import Shards, WorkerCache, worker_cache
from fabric_ray.integrations.vllm_kv_plan import Claim, Ready, digest
from fabric_ray.integrations.vllm_kv_send import Sender
from fabric_ray.kvcache import Decoder, Job, Prefiller, Pull, RankCache, Terms, errors
from tests.kv_pages import rows
from tests.processes import within

LAYERS, BLOCKS, TOKENS, WIDTH = 3, 6, 4, 8
TERMS = Terms(beat=0.05, silence=30.0)
PROMPT = list(range(2 * TOKENS))


def end(
    stack: ExitStack, name: str, layers: Sequence[int] | None = None
) -> tuple[dict[str, torch.Tensor], RankCache, WorkerCache]:
    """A whole instance, or a stage of a pipeline with these layers."""
    numbers = range(LAYERS) if layers is None else layers
    raw = torch.zeros(len(numbers), BLOCKS, 1, TOKENS, WIDTH, dtype=torch.int32)
    tensors = {f"model.layers.{n}.attn": raw[i] for i, n in enumerate(numbers)}
    shards = Shards(ranks=1, rank=0, shards=1, is_stage=layers is not None)
    groups = [LayerGroup(TOKENS, tuple(tensors))]
    cache = worker_cache(tensors, groups=groups, shards=shards, model="m", form=rows)
    engine = stack.enter_context(TransferEngine(name=name))
    regions = [engine.register(buffer) for buffer in cache.buffers]
    return tensors, RankCache(engine, cache.layouts[0], regions), cache


def at_once(call: Callable[[], object]) -> None:
    """As on the host, where nothing runs behind."""
    call()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_pass_that_could_not_begin_fails_its_transfers_and_sends_nothing_of_the_next(
    stack: ExitStack,
) -> None:
    tensors, rank, cache = end(stack, "p")
    theirs, their_rank, _ = end(stack, "d")
    prefiller = Prefiller([rank], terms=TERMS)
    sender = Sender(prefiller, cache, then=at_once, lease=30.0)
    stack.callback(sender.close)
    decoder = stack.enter_context(Decoder([their_rank], terms=TERMS))
    to = decoder.connect(sender.offer())

    def pull(name: str, table: list[int]) -> Pull:
        claim = Claim(name, digest(PROMPT), f"{name} of d", 1, "")
        return decoder.pull(to, tokens=len(PROMPT), tables=[table], payload=claim.encoded())

    def waiting() -> int:
        with sender._lock:
            return sum(len(transfer.waiting) for transfer in sender._transfers.values())

    def run(ready: Ready, fill: int) -> None:
        sender.begin([ready])
        for name, tensor in tensors.items():
            for block in ready.tables[0]:
                tensor[block] = fill
            sender.layer(name)
        sender.end()

    first, second = pull("one", [0, 1]), pull("two", [2, 3])
    ready = Ready("r1", "one", digest(PROMPT), len(PROMPT), 0, ((4, 5),))
    within(10, "both requests", lambda: waiting() == 2)
    damaged = replace(ready, tables=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sender.begin([damaged])
    for name in tensors:  # the model runs all the same
        sender.layer(name)
    sender.end()
    with pytest.raises(errors.PrefillFailed, match="could not begin to send"):
        first.wait_ready(10)
    run(replace(ready, request="r2", transfer="two"), 7)
    second.wait_ready(10)
    assert all((tensor[[2, 3]] == 7).all() for tensor in theirs.values())
    assert all((tensor[[0, 1]] == 0).all() for tensor in theirs.values())


class CountedPrefiller:
    """Counts the layers that are announced of a pass."""

    def __init__(self) -> None:
        self.layers = 0

    async def jobs(self) -> AsyncIterator[Job]:
        for job in ():
            yield job

    def begin(self, requests: Sequence[tuple[Job, int]]) -> None:
        self.layers = 0

    def layer_done(self) -> None:
        self.layers += 1

    def on_renewal(self, callback: Callable[[list[int]], object]) -> None:
        pass

    def close(self) -> None:
        pass


NAMES = tuple(f"model.layers.{i}.attn" for i in range(5))


def test_layers_without_a_hook_are_announced_with_the_next_one() -> None:
    """An indexer is written when the attention of its layer, or of the next one, is over."""
    prefiller = CountedPrefiller()
    layers = [name for i in range(3) for name in (f"layers.{i}.attn", f"layers.{i}.indexer")]
    silent = frozenset(name for name in layers if name.endswith("indexer"))
    cache = SimpleNamespace(layers=layers, silent=silent)
    sender = Sender(cast(Prefiller, prefiller), cast(WorkerCache, cache), then=at_once, lease=1.0)
    sender.begin([Ready("r", "t", b"", 4, 0, ((1,),))])
    announced = []
    for i in range(3):
        sender.layer(f"layers.{i}.attn")
        announced.append(prefiller.layers)
    assert announced == [1, 3, 5]
    sender.layer("layers.2.attn")
    assert prefiller.layers == 5, "nothing has shown that the last indexer is written"
    sender.end()
    assert prefiller.layers == 6
    sender.close()


@given(hooks=st.lists(st.sampled_from([*NAMES, "drafter.attn"]), max_size=12))
def test_rs_1_a_layer_is_announced_when_it_and_all_before_it_are_written(hooks: list[str]) -> None:
    """Decoders are told of layers by their number: hooks that come in another order, twice or not
    at all announce no page that isn't written. Those that are written leave at once."""
    prefiller = CountedPrefiller()
    cache = SimpleNamespace(layers=NAMES, silent=frozenset())
    sender = Sender(cast(Prefiller, prefiller), cast(WorkerCache, cache), then=at_once, lease=1.0)
    for _ in range(2):
        sender.begin([Ready("r", "t", b"", 4, 0, ((1,),))])
        written: set[str] = set()
        for name in hooks:
            sender.layer(name)
            written.add(name)
            assert prefiller.layers == len(list(takewhile(written.__contains__, NAMES)))
        sender.end()
        assert prefiller.layers == len(NAMES)
    sender.close()


class Pair:
    """A sender, and a decoder that asks it for the pages of a prompt, at once or when told."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        then: Callable[[Callable[[], object]], None],
        lease: float,
        weights: str | None = "",
    ) -> None:
        _, rank, cache = end(stack, "p")
        self.sender = Sender(Prefiller([rank], terms=TERMS), cache, then=then, lease=lease)
        stack.callback(self.sender.close)
        _, rank, _ = end(stack, "d")
        self._decoder = stack.enter_context(Decoder([rank], terms=TERMS))
        self.ready = Ready("r", "t", digest(PROMPT), len(PROMPT), 0, ((4, 5),))
        if weights is not None:
            self.ask(weights)

    def ask(self, weights: str) -> None:
        """As a decoder that computes with these weights."""
        self.pull: Pull = self._decoder.pull(
            self._decoder.connect(self.sender.offer()),
            tokens=len(PROMPT),
            tables=[[0, 1]],
            payload=Claim("t", digest(PROMPT), "attempt", 1, weights).encoded(),
        )
        within(10, "the request", lambda: "t" in self.sender._transfers)


def test_preempted_requests_that_cannot_be_sent_block_no_batch(stack: ExitStack) -> None:
    """MR-1: a decoder that waits for layers which are not computed gets an error, and nothing reads
    the blocks when the call returns. The call returns long before the lease ends."""
    pair = Pair(stack, then=at_once, lease=3600.0)
    pair.sender.begin([pair.ready])
    pair.sender.layer("model.layers.0.attn")
    (job,) = pair.sender._transfers["t"].taken
    pair.sender.preempted(["r"])
    assert job.is_released
    with pytest.raises(errors.PrefillFailed, match="needs the pages for another request"):
        pair.pull.wait_ready(10)
    pair.pull.wait_released(10)


def test_preempted_requests_whose_pages_are_computed_are_sent(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_kv_send, "_LEAVING", 100.0)
    pair = Pair(stack, then=at_once, lease=3600.0)
    pair.sender.begin([pair.ready])
    pair.sender.end()
    pair.sender.preempted(["r"])
    pair.pull.wait_ready(10)
    pair.pull.wait_released(10)


def test_nothing_is_held_for_a_decoder_that_left_before_the_prefill(stack: ExitStack) -> None:
    pair = Pair(stack, then=at_once, lease=3600.0)
    pair.pull.cancel()
    within(10, "its end", lambda: "t" not in pair.sender._transfers)
    pair.sender.begin([pair.ready])
    pair.sender.end()
    pair.sender.hold("r", "t")
    assert pair.sender.sent() == {"r"}


def test_a_device_that_never_gets_there_is_an_error_after_a_lease(
    stack: ExitStack,
) -> None:
    pair = Pair(stack, then=lambda act: None, lease=0.2)
    pair.sender.begin([pair.ready])
    with pytest.raises(NotQuiesced, match="device did not get to preempted requests r"):
        pair.sender.preempted(["r"])


def test_rs_1_a_decoder_with_other_weights_gets_no_pages(stack: ExitStack) -> None:
    pair = Pair(stack, then=at_once, lease=3600.0, weights="v2")
    pair.sender.begin([pair.ready])
    pair.sender.end()
    with pytest.raises(errors.PrefillFailed, match="as loaded, the decoder with v2; update both"):
        pair.pull.wait_ready(10)
    pair.pull.wait_released(10)


@pytest.mark.parametrize("weights", ["", "v2"])
def test_rs_1_pages_of_earlier_weights_are_not_sent(
    weights: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update comes after a prefill whose request goes on: its pages are the old weights'."""
    pair = Pair(stack, then=at_once, lease=3600.0, weights=None)
    pair.sender.begin([pair.ready])
    pair.sender.end()
    monkeypatch.setattr(vllm_kv_content._weights, "fingerprint", "v2")
    pair.ask(weights)
    with pytest.raises(errors.PrefillFailed, match="before the prefiller's"):
        pair.pull.wait_ready(10)
    pair.pull.wait_released(10)
