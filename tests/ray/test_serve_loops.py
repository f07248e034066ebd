"""Prefillers and decoders of a deployment in one process, on real engines and transfers: what they
promise without Serve."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from torch import Tensor

from fabric_ray import observe
from fabric_ray.inference.errors import PageMisuse
from fabric_ray.inference.protocols import DecodeRow
from fabric_ray.inference.tokenizer import ByteTokenizer
from fabric_ray.serve.messages import Emitted, Failed, Finished, Generate
from tests.ray.serve_world import Around, expected, prompts, request, world

SIDES = {
    "gqa, 2 ranks to 1, other page sizes": {
        "model": "tiny-llama",
        "prefill": {"tp": 2, "chunk_tokens": 16, "cache": {"page_tokens": 8}},
        "decode": {"cache": {"page_tokens": 16, "order": "tokens_first", "buffers": "split"}},
    },
    "latents, 1 rank to 2": {
        "model": "tiny-mla",
        "prefill": {"chunk_tokens": 7},
        "decode": {"tp": 2},
    },
    "windows": {"model": "tiny-hybrid", "prefill": {"chunk_tokens": 32}},
}


@pytest.mark.parametrize("fields", SIDES.values(), ids=SIDES)
async def test_tokens_equal_those_of_one_engine(fields: dict[str, Any]) -> None:
    async with world(**fields) as w:
        asked = [request(i, p) for i, p in enumerate(prompts(12, seed=1))]
        got = await asyncio.gather(*(w.ask(r) for r in asked))
        assert [event for event in got if not isinstance(event, Finished)] == []
        assert [event.tokens for event in got] == expected(w.args, asked)  # type: ignore[union-attr]
        await w.idle()


async def test_a_prefix_that_the_decoder_holds_is_not_sent_and_changes_nothing() -> None:
    async with world() as w:
        (start,) = prompts(1, seed=2, most=1)
        start = start + tuple(range(100))
        # The last of these 112 is chosen and never computed with: its page isn't complete.
        asked = [request(0, start, 11), request(2, (*start[:80], 7, 8, 9)), request(4, start)]
        ends = [await w.ask(r) for r in asked]
        assert [end.tokens for end in ends] == expected(w.args, asked)  # type: ignore[union-attr]
        cached = [end.timings.cached_tokens for end in ends]  # type: ignore[union-attr]
        assert cached == [0, 80, 96]
        assert w.prefill["p0"].stats()["skipped_tokens"] == sum(cached)
        # What was generated is a prefix as well.
        more = request(6, (*start, *ends[0].tokens, 1, 2), 12)  # type: ignore[union-attr]
        assert len(more.tokens) == 114
        end = await w.ask(more)
        assert [end.tokens] == expected(w.args, [more])  # type: ignore[union-attr]
        await w.idle()


async def test_streamed_text_is_the_whole_text() -> None:
    async with world() as w:
        (prompt,) = prompts(1, seed=3)
        whole = await w.ask(request(1, prompt, 20))
        assert isinstance(whole, Finished)
        text, tokens = "", 0
        async for event in w.decode.generate(request(1, prompt, 20, stream=True)):
            assert not isinstance(event, Failed)
            text += event.text
            tokens += len(event.tokens) if isinstance(event, Emitted) else 1
        assert (text, tokens) == (whole.text, len(whole.tokens))


async def test_a_stop_text_ends_a_completion_before_it() -> None:
    async with world() as w:
        (prompt,) = prompts(1, seed=4)
        whole = await w.ask(request(1, prompt, 24))
        assert isinstance(whole, Finished)
        stop = whole.text[6:8]
        cut = await w.ask(request(1, prompt, 24, stop=(stop,)))
        assert isinstance(cut, Finished)
        assert (cut.reason, cut.text) == ("stop", whole.text[: whole.text.index(stop)])
        await w.idle()


async def test_a_stop_token_is_no_text_although_its_tokenizer_gives_it_one() -> None:
    async with world() as w:
        (prompt,) = prompts(1, seed=4)
        whole = await w.ask(request(0, prompt, 24))
        assert isinstance(whole, Finished)
        stop, tokenizer = whole.tokens[6], ByteTokenizer()
        tokenizer.stop = frozenset({stop})
        w.decode._tokenizer = tokenizer
        before = tokenizer.decode(whole.tokens[: whole.tokens.index(stop)])
        for stream in (False, True):
            events = [e async for e in w.decode.generate(request(0, prompt, 24, stream=stream))]
            assert events[-1].reason == "stop"  # type: ignore[union-attr]
            assert events[-1].tokens[-1] == stop  # type: ignore[union-attr]
            assert "".join(event.text for event in events) == before  # type: ignore[union-attr]
        await w.idle()


async def test_a_closed_stream_frees_its_pages_and_disturbs_no_other_request() -> None:
    """MR-1: pages of cancelled requests go to others only when no prefiller writes to them; if they
    went earlier, tokens of those others would be wrong."""
    draw = random.Random(5)
    small = {"cache": {"pages": 40}, "max_running": 6, "max_queue": 200}
    async with world(("p0", "p1"), decode=small, prefill={"chunk_tokens": 8}) as w:
        asked = [request(i, p, 6) for i, p in enumerate(prompts(60, seed=6))]

        async def given_up(r: Generate, after: float) -> None:
            task = asyncio.create_task(w.ask(r))
            await asyncio.sleep(after)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        kept = [r for i, r in enumerate(asked) if i % 3]
        dropped = [r for i, r in enumerate(asked) if not i % 3]
        got, _ = await asyncio.gather(
            asyncio.gather(*(w.ask(r) for r in kept)),
            asyncio.gather(*(given_up(r, draw.random() * 0.8) for r in dropped)),
        )
        assert [event for event in got if not isinstance(event, Finished)] == []
        assert [event.tokens for event in got] == expected(w.args, kept)  # type: ignore[union-attr]
        assert w.decode.stats()["cancelled"] > 0
        await w.idle()


async def test_a_stream_that_is_closed_between_tokens_gives_its_pages_back() -> None:
    async with world() as w:
        (prompt,) = prompts(1, seed=7)
        async with aclosing(w.decode.generate(request(0, prompt, 300, stream=True))) as events:
            async for event in events:
                assert isinstance(event, Emitted)
                break
        await w.idle()
        assert w.decode.stats()["cancelled"] == 1


async def test_mr_1_pages_are_held_until_their_prefiller_confirms_that_it_writes_no_more() -> None:
    """MR-1."""
    async with world() as w:
        allocator, (prompt,) = w.decode._allocator, prompts(1, seed=11)
        ask = request(0, prompt)
        reservation = await allocator.reserve(prompt, len(prompt) + 8, timeout=1)
        number = await asyncio.to_thread(w.decode._decoder.connect, w.listed.offers["p0"])
        reservation.attach(w.decode._prefill_client.pull(ask, reservation, number))
        with pytest.raises(PageMisuse, match="await quiesced"):
            reservation.attach(w.decode._prefill_client.pull(ask, reservation, number))
        taken = len(reservation.tables.fresh[0])
        reservation.release()
        stats = w.decode.stats()
        assert (stats["held_pages"], stats["taken_slots"]) == (taken, 1)
        await w.idle()


async def test_mr_1_a_hanging_prefiller_keeps_its_pages_and_the_next_attempt_gets_other_pages() -> (
    None
):
    """MR-1: a prefiller that hangs may write later."""
    async with world() as w:
        allocator, (prompt,) = w.decode._allocator, prompts(1, seed=13)
        ask = request(0, prompt)
        reservation = await allocator.reserve(prompt, len(prompt) + 8, timeout=1)
        number = await asyncio.to_thread(w.decode._decoder.connect, w.listed.offers["p0"])
        reservation.attach(w.decode._prefill_client.pull(ask, reservation, number))
        pages, slot = set(reservation.tables.fresh[0]), reservation.slot
        await reservation.replace(timeout=1)
        assert pages.isdisjoint(reservation.tables.fresh[0])
        assert reservation.slot != slot
        reservation.release()
        await w.idle()


async def test_pages_are_kept_until_the_step_that_writes_to_them_is_over() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Around):
        def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
            begun.set()
            assert go_on.wait(30)
            return self._engine.decode(rows)

    async with world() as w:
        w.decode._loop._engine = Slow(w.decode._loop._engine)
        (prompt,) = prompts(1, seed=12)
        task = asyncio.create_task(w.ask(request(0, prompt)))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert not w.decode.stats()["idle"]
        go_on.set()
        await w.idle()


async def test_another_prefiller_computes_what_a_lost_one_did_not() -> None:
    async with world(("p0", "p1"), prefill={"chunk_tokens": 4}) as w:
        asked = [request(i, p) for i, p in enumerate(prompts(24, seed=8))]
        running = asyncio.gather(*(w.ask(r) for r in asked))
        await asyncio.sleep(0.1)
        lost = w.prefill.pop("p0")  # still listed, as with Serve until it notices
        await asyncio.to_thread(lost.close)
        got = await running
        assert [event for event in got if not isinstance(event, Finished)] == []
        assert [event.tokens for event in got] == expected(w.args, asked)  # type: ignore[union-attr]
        assert w.decode.stats()["retries"] > 0
        await w.idle()


async def test_who_finds_all_queues_full_is_told_so_at_once() -> None:
    few = {"max_running": 1, "max_queue": 1, "cache": {"pages": 64}}
    async with world(decode=few) as w:
        asked = [request(i, p, 40) for i, p in enumerate(prompts(5, seed=10))]
        got = await asyncio.gather(*(w.ask(r) for r in asked))
        assert [event.kind for event in got if isinstance(event, Failed)] == ["Busy"] * 3
        await w.idle()


async def test_prefillers_that_are_full_are_asked_again_and_then_named() -> None:
    few = {"max_running": 1, "max_queue": 0, "chunk_tokens": 1}
    async with world(prefill=few, decode={"prefill_attempts": 2}) as w:
        long = [tuple(range(90)), *((i,) * 90 for i in range(1, 6))]
        got = await asyncio.gather(*(w.ask(request(i, p)) for i, p in enumerate(long)))
        kinds = {event.kind for event in got if isinstance(event, Failed)}
        assert kinds == {"Busy"}
        assert any(isinstance(event, Finished) for event in got)
        await w.idle()


async def test_a_request_that_never_fits_says_what_to_change() -> None:
    async with world(decode={"cache": {"pages": 4}}) as w:
        end = await w.ask(request(0, tuple(range(60)), 50))
        assert isinstance(end, Failed)
        assert end.kind == "BadRequest"
        assert "lower max_tokens" in end.message


async def test_a_requests_id_is_its_name_in_the_trace_of_both_sides() -> None:
    async with world() as w:
        (prompt,) = prompts(1, seed=51)
        assert isinstance(await w.ask(Generate("chatcmpl-mine", prompt, 2)), Finished)
        flights = observe.story(observe.join([observe.records()]), "chatcmpl-mine")
        ends = {(f.writer.name, f.received.at.name) for f in flights if f.received is not None}
        assert ends == {("p0-0", "d0-0")}
