"""Requests whose prefillers hang, whose engines fail, or that find no prefiller."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
from starlette.requests import Request
from torch import Tensor

from fabric_ray.errors import InvalidArgument, PeerLost, Stale
from fabric_ray.inference.protocols import DecodeRow, OnLayer, PrefillChunk, Tail
from fabric_ray.kvcache import errors as kv
from fabric_ray.serve.body_reader import BodyReader, read_body
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.decode import offer_from
from fabric_ray.serve.errors import BadRequest, BodyTimeout, Busy, NoPrefill, TooLarge, Unavailable
from fabric_ray.serve.failures import AvoidLevel, FailureKind, failure_kind
from fabric_ray.serve.health import EngineHealth, is_sticky
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.messages import Failed, Finished
from fabric_ray.serve.prefill_loop import PrefillLoop
from fabric_ray.serve.prefillers import PrefillerOffer, least_loaded
from tests.processes import Other
from tests.ray.serve_world import FABRIC, Around, World, expected, prompts, request, world


def prefiller(connection: Connection, fields: dict[str, Any]) -> None:
    """A prefiller in a process of its own."""

    async def main() -> None:
        args = ServeArgs.model_validate(fields)
        made = Instance(args, "prefill", name="frozen")
        loop = PrefillLoop(made, args.prefill)
        connection.send(loop.offer)
        await loop.serve()

    asyncio.run(main())


@asynccontextmanager
async def frozen_one(**fields: Any) -> AsyncIterator[tuple[World, Other]]:
    """A decoder, and one prefiller whose process is stopped; they have met before."""
    fields = {"terms": {"beat": 5.0, "silence": 60.0}, **fields}
    async with world((), **fields) as w:
        with Other(prefiller, {"torch_threads": 1, "fabric": FABRIC, **fields}) as frozen:
            w.listed.offers["frozen"] = await asyncio.to_thread(frozen.hear, 120)
            for number in range(100, 110):
                end = await w.ask(request(number, (99,)))
                if isinstance(end, Finished):
                    break
            await w.idle()
            frozen.signal(signal.SIGSTOP)
            yield w, frozen


def failed(end: object, kind: str) -> str:
    assert isinstance(end, Failed), end
    assert end.kind == kind, end
    return end.message


@pytest.mark.long
async def test_the_last_attempt_raises_all_causes_and_waits_for_no_pages() -> None:
    """MR-1: the prefiller that hangs keeps its pages, and the decoder has no others here."""
    decode = {"cache": {"pages": 6}, "prefill_timeout": 0.3, "queue_timeout": 0.3}
    for attempts in (1, 3):
        many = {**decode, "prefill_attempts": attempts}
        async with frozen_one(decode=many) as (w, frozen):
            end = await w.ask(request(0, tuple(range(60))))
            text = failed(end, "NoPrefill")
            assert text.count("frozen: ") == 1
            assert ("no pages for another attempt" in text) == (attempts == 3)
            assert w.decode.stats()["held_pages"] > 0
            frozen.signal(signal.SIGCONT)
            await w.idle()


@pytest.mark.long
async def test_a_prefiller_that_missed_a_deadline_is_asked_again_only_if_there_is_no_other() -> (
    None
):
    decode = {"prefill_timeout": 5.0, "prefill_attempts": 3, "avoid_lost": 600}
    async with frozen_one(decode=decode) as (w, frozen):
        (first, *rest) = [request(i, p) for i, p in enumerate(prompts(7, seed=20))]
        asking = asyncio.create_task(w.ask(first))
        while not w.decode._prefillers._asked:
            await asyncio.sleep(0.01)
        w.add_prefiller("other")
        end = await asking
        assert isinstance(end, Finished), end
        assert end.timings.prefill_attempts == 2
        # Later requests go to the other prefiller at once.
        ends = [await w.ask(r) for r in rest]
        assert [e.tokens for e in [end, *ends]] == expected(w.args, [first, *rest])  # type: ignore[union-attr]
        assert {e.timings.prefill_attempts for e in ends} == {1}  # type: ignore[union-attr]
        frozen.signal(signal.SIGCONT)
        await w.idle()


def test_prefillers_are_sorted_by_avoid_level() -> None:
    loads = {"gone": 0.0, "missed": 0.0, "tried": 1.0, "slow": 2.0, "fresh": 9.0}
    avoid = {
        "gone": AvoidLevel.LOST,
        "missed": AvoidLevel.MISSED,
        "tried": AvoidLevel.TRIED,
        "slow": AvoidLevel.SLOW,
    }
    assert least_loaded(loads, avoid=avoid) == ["fresh", "slow", "tried", "missed", "gone"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kv.error_for("refused_busy", "4 prompts are queued"), FailureKind.BUSY),
        (kv.error_for("refused_too_long", "by 4 tokens"), FailureKind.TOO_LONG),
        (kv.error_for("failed", "RuntimeError: busy: no"), FailureKind.FAILED),
        (kv.error_for("refused", "page 7 of 4"), FailureKind.LOCAL),
        (kv.error_for("refused_here", "it takes nothing more"), FailureKind.FAILED),
        (kv.PullTimeout("too late"), FailureKind.SLOW),
        (kv.PrefillerLost("busy: it died"), FailureKind.LOST),
        (kv.PullCancelled("here"), FailureKind.LOCAL),
        (kv.DecoderClosed("here"), FailureKind.LOCAL),
        (InvalidArgument("tables"), FailureKind.LOCAL),
        (Stale("met before"), FailureKind.STALE),
        (PeerLost("died"), FailureKind.LOST),
        (OSError("no descriptors"), FailureKind.LOST),
    ],
)
def test_the_failure_kind_of_an_error(error: Exception, kind: FailureKind) -> None:
    assert failure_kind(error) is kind


async def test_a_prefiller_of_another_model_is_named_as_the_cause() -> None:
    async with world((), decode={"prefill_attempts": 2, "avoid_lost": 0.1}) as w:
        w.add_prefiller("p0", args=w.args.model_copy(update={"seed": 1}))
        text = failed(await w.ask(request(0, (1, 2, 3))), "NoPrefill")
        assert "p0: no session: " in text
        assert "model" in text
        await w.idle()


async def test_a_prompt_that_no_prefiller_has_room_for_is_the_clients_to_change() -> None:
    async with world(prefill={"cache": {"pages": 2}}) as w:
        text = failed(await w.ask(request(0, tuple(range(60)))), "BadRequest")
        assert "has 60 tokens, the pages of prefillers have 32" in text
        await w.idle()


async def test_a_prompt_that_is_too_long_for_a_message_is_refused_here_and_no_shorter_one() -> None:
    """What is let through is what prefillers take."""
    prefill = {"tp": 2, "cache": {"pages": 300, "page_tokens": 8}, "chunk_tokens": 512}
    async with world(terms={"max_message": 4096}, prefill=prefill, decode={"tp": 2}) as w:
        fits, too_long = 1, 2000
        while too_long - fits > 1:
            count = (fits + too_long) // 2
            end = await w.ask(request(count, (200,) * count, 1))
            if isinstance(end, Finished):
                fits = count
                continue
            text = failed(end, "BadRequest")
            assert "terms.max_message is 4096; shorten the prompt" in text
            too_long = count
        assert 1000 < fits < 1999
        await w.idle()


PATIENT = {"prefill_timeout": 600.0, "avoid_lost": 600.0}


@pytest.mark.long
async def test_prompts_end_with_the_causes_when_all_prefillers_are_lost() -> None:
    async with world(("p0", "p1"), decode=PATIENT) as w:
        for name in ("p0", "p1"):
            await asyncio.to_thread(w.prefill.pop(name).close)
        asked = [w.ask(request(i, p)) for i, p in enumerate(prompts(6, seed=22))]
        ends = await asyncio.wait_for(asyncio.gather(*asked), 120)
        told = [failed(end, "NoPrefill") for end in ends]
        assert all("p0" in text and "p1" in text for text in told), told
        await w.idle()


@pytest.mark.long
async def test_a_lost_prefiller_that_is_back_is_asked_again_where_there_is_no_other() -> None:
    async with world(decode=PATIENT) as w:
        await asyncio.to_thread(w.prefill.pop("p0").close)
        failed(await asyncio.wait_for(w.ask(request(0, (1, 2, 3))), 120), "NoPrefill")
        w.add_prefiller("p0")
        asked = [request(i, p) for i, p in enumerate(prompts(3, seed=23))]
        ends = [await asyncio.wait_for(w.ask(r), 120) for r in asked]
        assert [e.tokens for e in ends] == expected(w.args, asked)  # type: ignore[union-attr]
        assert w.decode._prefillers._lost == {}
        await w.idle()


class Lost:
    """Finds no prefiller."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def choose(self, *, avoid: Mapping[str, int], load: Mapping[str, int]) -> PrefillerOffer:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoPrefill("Serve names no prefiller"), "NoPrefill"),
        (RuntimeError("no prefiller"), "ServeError"),
    ],
)
async def test_a_request_that_finds_no_prefiller_fails_with_the_cause(
    error: Exception, kind: str
) -> None:
    async with world() as w:
        w.decode._prefillers._discovery = Lost(error)
        text = failed(await w.ask(request(0, (1, 2, 3))), kind)
        assert str(error) in text
        stats = w.decode.stats()
        assert (stats["failed"], stats["cancelled"], stats["busy"]) == (1, 0, 0)
        await w.idle()


@pytest.mark.parametrize("metadata", [{}, {"name": "p"}, {"name": "p", "offer": "?"}, {"offer": 3}])
def test_replica_metadata_without_an_offer_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(NoPrefill, match="replica_metadata"):
        offer_from(metadata)


class Failing(Around):
    """An engine that raises for prompts, or steps, that begin with 13."""

    error: Exception = RuntimeError("DefaultCPUAllocator: not enough memory\nat line 7")

    def prefill(self, chunk: PrefillChunk, on_layer: OnLayer) -> Tail | None:
        def some_layers(layer: int) -> None:
            if chunk.tokens[0] == 13 and layer == 1:
                raise self.error
            on_layer(layer)

        return self._engine.prefill(chunk, some_layers)  # type: ignore[no-any-return]

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        if any(row.position == 13 for row in rows):
            raise self.error
        return self._engine.decode(rows)  # type: ignore[no-any-return]


def failing(error: Exception) -> Callable[[Instance], None]:
    def change(instance: Instance) -> None:
        instance.engine = engine = Failing(instance.engine)  # type: ignore[assignment]
        engine.error = error

    return change


SHORT = [Failing.error, MemoryError("no more")]


@pytest.mark.parametrize("error", SHORT, ids=["torch", "python"])
async def test_a_pass_that_raises_ends_its_request_and_the_prefiller_goes_on(
    error: Exception,
) -> None:
    async with world((), decode={"prefill_attempts": 5}) as w:
        p = w.add_prefiller("p0", failing(error))
        text = failed(await w.ask(request(99, (13,) * 30)), "NoPrefill")
        assert f"{type(error).__name__}: {str(error).splitlines()[0]}" in text
        assert "line 7" not in text
        asked = [request(i, p) for i, p in enumerate(prompts(6, seed=21))]
        got = await asyncio.gather(*(w.ask(r) for r in asked))
        assert [event.tokens for event in got] == expected(w.args, asked)  # type: ignore[union-attr]
        p.check()
        await w.idle()


@pytest.mark.parametrize("error", SHORT, ids=["torch", "python"])
async def test_a_step_that_raises_ends_its_requests_and_the_decoder_goes_on(
    error: Exception,
) -> None:
    async with world() as w:
        failing(error)(w.decode._instance)
        w.decode._loop._engine = w.decode._instance.engine
        text = failed(await w.ask(request(99, (1,) * 10)), "ServeError")
        assert f"{type(error).__name__}: {str(error).splitlines()[0]}" in text
        (prompt,) = ((7,) * 20,)
        end = await w.ask(request(1, prompt))
        assert [end.tokens] == expected(w.args, [request(1, prompt)])  # type: ignore[union-attr]
        w.decode.check()
        await w.idle()


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 0, 0)], ids=["their own", "a client's one"])
async def test_a_prefiller_whose_passes_keep_failing_is_unhealthy_and_others_are_asked(
    ids: tuple[int, ...],
) -> None:
    async with world((), decode={"prefill_attempts": 2}) as w:
        p = w.add_prefiller("p0", failing(Failing.error))
        for length, number in enumerate(ids, 28):
            p.check()
            failed(await w.ask(request(number, (13,) * length)), "NoPrefill")
        with pytest.raises(Unavailable, match="3 failures in a row, the last: RuntimeError"):
            p.check()
        w.add_prefiller("p1")
        end = await w.ask(request(9, (13,) * 30))
        assert [end.tokens] == expected(w.args, [request(9, (13,) * 30)])  # type: ignore[union-attr]


async def test_a_decoder_whose_device_is_lost_is_unhealthy_at_once() -> None:
    async with world() as w:
        failing(RuntimeError("CUDA error: an illegal memory access"))(w.decode._instance)
        w.decode._loop._engine = w.decode._instance.engine
        failed(await w.ask(request(0, (1,) * 10)), "ServeError")
        for _ in range(200):
            if not w.decode._loop._thread.is_alive():
                break
            await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="an illegal memory access"):
            w.decode.check()
        failed(await w.ask(request(1, (1,) * 10)), "Unavailable")


async def ended(thread: threading.Thread) -> None:
    for _ in range(200):
        if not thread.is_alive():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{thread.name} goes on")


class NotFinite(Around):
    """An engine of damaged weights: the logits of prompts, or of steps, are NaN."""

    prompts = steps = False

    def prefill(self, chunk: PrefillChunk, on_layer: OnLayer) -> Tail | None:
        tail = self._engine.prefill(chunk, on_layer)
        if tail is not None and self.prompts:
            tail.logits[-1] = float("nan")
        return tail  # type: ignore[no-any-return]

    def decode(self, rows: Sequence[DecodeRow]) -> Tensor:
        logits = self._engine.decode(rows)
        if self.steps:
            logits[:, -1] = float("nan")
        return logits  # type: ignore[no-any-return]


async def test_a_prefiller_of_damaged_weights_is_unhealthy_and_no_decoder_is() -> None:
    async with world((), decode={"prefill_attempts": 2}) as w:
        made: list[NotFinite] = []

        def damaged(instance: Instance) -> None:
            made.append(NotFinite(instance.engine))
            made[0].prompts = True
            instance.engine = made[0]  # type: ignore[assignment]

        p = w.add_prefiller("p0", damaged)
        for number in range(3):
            p.check()
            text = failed(await w.ask(request(number, (13,) * (28 + number))), "NoPrefill")
            assert "logits are not finite" in text
        await ended(p._thread)
        with pytest.raises(Unavailable, match="3 failures in a row, the last: NonFiniteLogits"):
            p.check()
        w.decode.check()
        w.add_prefiller("p1")
        end = await w.ask(request(9, (13,) * 30))
        assert [end.tokens] == expected(w.args, [request(9, (13,) * 30)])  # type: ignore[union-attr]
        w.decode.check()


async def test_a_decoder_of_damaged_weights_is_unhealthy() -> None:
    async with world() as w:
        engine = NotFinite(w.decode._instance.engine)
        w.decode._loop._engine = engine  # type: ignore[assignment]
        assert isinstance(await w.ask(request(0, (7,) * 16)), Finished)
        engine.steps = True
        for number in range(1, 4):
            w.decode.check()
            failed(await w.ask(request(number, (7 + number,) * 16)), "ServeError")
        await ended(w.decode._loop._thread)
        with pytest.raises(Unavailable, match="3 failures in a row, the last: NonFiniteLogits"):
            w.decode.check()


def test_failures_count_by_request_and_until_something_goes_right() -> None:
    health, error = EngineHealth(), RuntimeError("CUDA out of memory")
    for what in ("a", "a", "a", "a", "b"):
        health.failed(what, error)
    assert health.lost is None
    health.worked()
    health.failed("a", error)
    health.failed("b", BadRequest("the input"))
    assert health.lost is None
    health.failed("c", error)
    assert health.lost == "3 failures in a row, the last: RuntimeError: CUDA out of memory"
    assert not is_sticky(RuntimeError("CUDA error: out of memory"))
    assert is_sticky(RuntimeError("CUDA error: device-side assert triggered"))


async def test_being_cancelled_while_pages_come_too_late_is_being_cancelled() -> None:
    async with world(decode={"max_running": 1}) as w:
        allocator = w.decode._allocator
        reservation = await allocator.reserve((1, 2), 8, timeout=5)
        task = asyncio.create_task(allocator.reserve((1, 2), 8, timeout=500))
        await asyncio.sleep(0)
        allocator._expire(allocator._queue[0], 500)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert allocator.waiting == 0
        reservation.release()
        assert allocator.taken == 0


@pytest.mark.parametrize("said", [True, False])
async def test_a_body_is_read_up_to_its_limit(said: bool) -> None:
    def body(parts: list[bytes]) -> tuple[Request, list[dict[str, Any]]]:
        left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        left.append({"type": "http.request", "body": b"", "more_body": False})

        async def receive() -> dict[str, Any]:
            return left.pop(0)

        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-length", length)] if said else []
        return Request({"type": "http", "method": "POST", "headers": headers}, receive), left

    asked, left = body([b"x" * 60, b"y" * 40])
    assert await read_body(asked, 100) == b"x" * 60 + b"y" * 40
    assert left == []
    asked, left = body([b"x" * 60, b"y" * 41, b"z" * 1000])
    with pytest.raises(TooLarge, match="more than 100 bytes") as caught:
        await read_body(asked, 100)
    assert caught.value.status == 413
    assert len(left) == (4 if said else 2)


async def test_bodies_end_after_their_timeout_and_the_oldest_makes_room_for_a_newer_one() -> None:
    def idle() -> Request:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError("read for too long")

        return Request({"type": "http", "method": "POST", "headers": []}, receive)

    def whole() -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        return Request({"type": "http", "method": "POST", "headers": []}, receive)

    reader = BodyReader(max_bytes=100, max_open=2, timeout=0.5)
    waiting = [asyncio.create_task(reader.read(idle())) for _ in range(2)]
    await asyncio.sleep(0)
    assert reader.open == 2
    assert await reader.read(whole()) == b"{}"
    # That there are too many requests is no fault of a client that sends its body.
    with pytest.raises(Busy) as caught:
        await waiting[0]
    assert caught.value.status == 429
    assert not waiting[1].done()
    with pytest.raises(BodyTimeout) as late:
        await waiting[1]
    assert late.value.status == 408
    assert (reader.open, reader.timed_out) == (0, 2)
    left = asyncio.create_task(reader.read(idle()))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert reader.open == 0
