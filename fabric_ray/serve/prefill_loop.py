"""Computes prompts for decoders in one thread: one chunk of each prompt in turn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from fabric_ray.decoding import from_msgpack
from fabric_ray.errors import FabricError
from fabric_ray.inference.errors import InferenceError, OutOfPages
from fabric_ray.inference.protocols import PrefillChunk
from fabric_ray.inference.sampling import check_finite
from fabric_ray.inference.tables import Tables
from fabric_ray.kvcache import Job, Prefiller
from fabric_ray.kvcache.errors import RefusalReason
from fabric_ray.serve.config import PrefillArgs
from fabric_ray.serve.errors import Unavailable
from fabric_ray.serve.health import EngineHealth, one_line
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.messages import Prompt

logger = logging.getLogger(__name__)


class _Work:
    """A prompt from its request until its pages are free."""

    def __init__(self, job: Job, prompt: Prompt) -> None:
        self.job, self.id, self.tokens = job, prompt.id, prompt.tokens
        self.done = 0
        """Tokens whose keys and values are in the pages."""
        self.tables: Tables | None = None
        self.slot: int | None = None
        self.arrived = time.monotonic()
        self.began = 0.0
        self.pass_began = 0.0


class PrefillLoop:
    """Serves the requests of a prefiller. Only its thread touches the engine and the pools.

    Args:
        instance: engine, pages, tails.
        args: chunk and limits.
    """

    def __init__(self, instance: Instance, args: PrefillArgs) -> None:
        self._instance, self._args = instance, args
        self._prefiller = Prefiller(instance.ranks, name=instance.name, terms=instance.terms)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Work] = deque()
        self._turns: deque[_Work] = deque()
        self._accepted: set[_Work] = set()
        """Prompts with pages: being computed, or being sent."""
        self._slots = list(range(instance.slots))
        self._pass_began: float | None = None
        self._health = EngineHealth()
        self._broken: str | None = None
        self._closed = False
        self._counts = {"computed_prompts": 0, "computed_tokens": 0, "skipped_tokens": 0}
        self._counts |= {"busy": 0, "failed": 0}
        self._last_sent: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)
        self._thread.start()

    @property
    def offer(self) -> bytes:
        """What decoders need to connect."""
        return self._prefiller.offer()

    async def serve(self) -> None:
        """Takes requests until the prefiller is closed."""
        under_way: set[asyncio.Task[None]] = set()
        async for job in self._prefiller.jobs():
            task = asyncio.create_task(self._take(job))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    async def _take(self, job: Job) -> None:
        try:
            prompt = from_msgpack(job.payload, Prompt)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            job.fail(f"cannot decode the prompt ({error}); run the same release everywhere")
            return
        if len(prompt.tokens) != job.tokens:
            job.fail(f"prompt: got {len(prompt.tokens)} tokens, expected {job.tokens}")
            return
        work = _Work(job, prompt)
        job.on_stop(lambda _: self._commands.put(self._drop_stopped))
        self._commands.put(lambda: self._queue(work))
        await job.released()
        self._commands.put(lambda: self._release(work))

    def check(self) -> None:
        """Raises:
        Unavailable: the thread has died, or hangs in a pass.
        """
        began = self._pass_began
        if self._broken is not None or not self._thread.is_alive():
            raise Unavailable(f"the prefill engine stopped: {self._broken or 'its thread died'}")
        if began is not None and time.monotonic() - began > self._args.stuck_after:
            raise Unavailable(f"a pass of the prefill engine takes over {self._args.stuck_after} s")

    @property
    def load(self) -> int:
        """Prompts that wait or are computed."""
        return len(self._waiting) + len(self._turns)

    def stats(self) -> dict[str, Any]:
        return {
            **self._instance.stats(),
            **self._counts,
            "waiting": len(self._waiting),
            "running": len(self._turns),
            "sending": len(self._accepted) - len(self._turns),
            "free_slots": len(self._slots),
            "slots": self._instance.slots,
            "last_sent": self._last_sent,
        }

    def close(self) -> None:
        """Stops all jobs and tells their decoders."""
        self._closed = True
        self._commands.put(lambda: None)
        self._prefiller.close()
        self._thread.join(timeout=5)

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                self._run_commands(wait=not self._turns)
                self._admit()
                if self._turns:
                    self._pass(self._turns[0])
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            logger.exception("the prefill engine stopped")
            # Decoders ask other prefillers at once, until Serve has replaced this replica.
            self._prefiller.close()

    def _run_commands(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=wait)()
                wait = False

    def _queue(self, work: _Work) -> None:
        if not self._instance.pools.fits(len(work.tokens)):
            most = min(pool.total * pool.page_tokens for pool in self._instance.pools.pools)
            work.job.refuse(
                RefusalReason.TOO_LONG,
                f"the prompt has {len(work.tokens)} tokens, the pages of prefillers have {most}; "
                "shorten it or raise prefill.cache.pages",
            )
        elif len(self._waiting) >= self._args.max_queue and (self._waiting or not self._slots):
            self._counts["busy"] += 1
            work.job.refuse(RefusalReason.BUSY, f"{len(self._waiting)} prompts are queued")
        else:
            self._waiting.append(work)

    def _drop_stopped(self) -> None:
        self._waiting = deque(work for work in self._waiting if not work.job.stopped)

    def _admit(self) -> None:
        """Gives pages to queued prompts, the oldest first."""
        while self._waiting and self._slots:
            work = self._waiting[0]
            if work.job.stopped:
                self._waiting.popleft()
                continue
            try:
                work.tables = self._instance.pools.open(work.tokens, len(work.tokens))
            except OutOfPages:
                return  # The oldest goes first: none overtakes it.
            self._waiting.popleft()
            work.slot = self._slots.pop()
            work.began = time.monotonic()
            work.done = work.tables.prefix
            self._accepted.add(work)
            try:
                work.job.accept(work.tables.tables, computed=work.done)
            except FabricError as error:
                self._fail(work, error)
            else:
                self._counts["skipped_tokens"] += work.job.have
                self._turns.append(work)

    def _pass(self, work: _Work) -> None:
        """Computes one chunk of one prompt; its pages are pushed layer by layer."""
        work.pass_began = time.monotonic()
        self._turns.rotate(-1)
        if work.job.stopped:
            self._turns.remove(work)
            return
        assert work.tables is not None, "a prompt in turn has pages"
        assert work.slot is not None, "a prompt in turn has a slot"
        end = min(work.done + self._args.chunk_tokens, len(work.tokens))
        last = end == len(work.tokens)
        chunk = PrefillChunk(work.tokens[work.done : end], work.done, work.tables.tables, last=last)
        try:
            self._compute(work, chunk, work.slot)
        except Exception as error:
            # Too little memory or a failed kernel need not affect other prompts.
            if not isinstance(error, InferenceError):
                logger.exception("%s: a pass of %d tokens failed", work.id, len(chunk.tokens))
            self._fail(work, error)
            # Clients choose ids, and may choose one for all.
            self._health.failed(f"{work.id} {hash(work.tokens)}", error)
            if self._health.lost is not None:
                raise Unavailable(self._health.lost) from error
            return
        self._health.worked()
        self._counts["computed_tokens"] += end - work.done
        work.done = end
        if last:
            self._finish(work, work.tables, work.slot)

    def _compute(self, work: _Work, chunk: PrefillChunk, slot: int) -> None:
        """Runs one pass; the last pass of a prompt writes its tail to its slot."""
        layers = 0

        def on_layer(layer: int) -> None:
            nonlocal layers
            layers += 1
            self._prefiller.layer_done()

        self._prefiller.begin([(work.job, chunk.start + len(chunk.tokens))])
        self._pass_began = time.monotonic()
        try:
            tail = self._instance.engine.prefill(chunk, on_layer)
            if tail is not None:
                check_finite(tail.logits)
                self._instance.engine.write_tail(tail, self._instance.tail(slot))
        except Exception as error:
            # The job ends first, so that the missing layers are not sent.
            work.job.fail(one_line(error))
            # Every pass counts all layers: the next one depends on it.
            for _ in range(layers, self._layers):
                self._prefiller.layer_done()
            raise
        finally:
            self._pass_began = None

    def _finish(self, work: _Work, tables: Tables, slot: int) -> None:
        """The prompt is computed: sends its tail."""
        self._turns.remove(work)
        tables.insert(work.tokens)
        now = time.monotonic()
        self._instance.write_times(
            slot, waited=work.began - work.arrived, computed=now - work.began
        )
        self._counts["computed_prompts"] += 1
        try:
            work.job.finish(slot)
        except FabricError as error:
            self._fail(work, error)

    @property
    def _layers(self) -> int:
        return sum(len(group.layers) for group in self._instance.pools.groups)

    def _fail(self, work: _Work, error: Exception) -> None:
        if work in self._turns:
            self._turns.remove(work)
        if not work.job.stopped:
            self._counts["failed"] += 1
            work.job.fail(one_line(error))

    def _release(self, work: _Work) -> None:
        """Frees the pages: nothing reads them any more (MR-1)."""
        if work in self._turns:
            self._turns.remove(work)
        self._accepted.discard(work)
        if work.done == len(work.tokens) and not work.job.stopped:
            self._last_sent = _layer_times(work)
        if work.tables is not None:
            work.tables.close()
            work.tables = None
        if work.slot is not None:
            self._slots.append(work.slot)
            work.slot = None
        with contextlib.suppress(ValueError):
            self._waiting.remove(work)


def _layer_times(work: _Work) -> dict[str, Any]:
    """Times of the layers of a prompt's last pass, in seconds from its start."""

    def since(ns: int | None) -> float | None:
        return None if ns is None else ns / 1e9 - work.pass_began

    return {
        "tokens": len(work.tokens),
        "layers": [
            {
                "layer": at.layer,
                "computed": since(at.computed),
                "posted": since(at.posted),
                "delivered": since(at.delivered),
            }
            for at in work.job.timeline()
        ],
    }
