"""A prefiller's process: computes what is asked of it, in turns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

import msgspec

from fabric_ray.errors import Cancelled
from fabric_ray.kvcache import Job, Prefiller, Terms
from tests.chaos.kv.draw import BEAT, LAYERS, SILENCE, TAIL, Ask, Side
from tests.chaos.kv.memory import Memory, Words, states, tail

TERMS = Terms(beat=BEAT, silence=SILENCE, tail_nbytes=TAIL)
_IDLE = 0.0005


class _Work:
    """A request on its way."""

    def __init__(self, job: Job, ask: Ask, words: Words, pages: list[int], slot: int) -> None:
        self.job, self.ask, self.words, self.pages, self.slot = job, ask, words, pages, slot
        self.done = ask.have
        self.passes = 0


class PrefillerProcess:
    """One thread that serves a prefiller until it is closed.

    Every other pass is of two requests at once, where two are there.
    """

    def __init__(self, name: str, transport: str, side: Side) -> None:
        self._memory = Memory(name, transport, side)
        self.prefiller = Prefiller(self._memory.ranks, name=name, terms=TERMS)
        self._waiting: deque[Job] = deque()
        self._turns: deque[_Work] = deque()
        self._held: dict[int, tuple[Job, list[int], int]] = {}
        self._wrong: list[str] = []
        self._closed = False
        self._passes = 0
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not (self._held or self._waiting or self.prefiller.open) and self._memory.idle

    def wrong(self) -> list[str]:
        found, self._wrong = self._wrong, []
        if not self._thread.is_alive() and not self._closed:
            found.append("error: the thread of the prefiller has ended")
        return found

    def close(self) -> list[str]:
        self.prefiller.close()
        deadline = time.monotonic() + 8.0
        while not self.idle and time.monotonic() < deadline:
            time.sleep(0.005)
        self._closed = True
        self._thread.join(5.0)
        wrong = self.wrong() + self._memory.look()
        self._memory.close()
        return wrong

    def _run(self) -> None:
        try:
            while not self._closed:
                self._waiting += self.prefiller.take()
                self._free()
                self._admit()
                if self._turns:
                    self._pass()
                else:
                    time.sleep(_IDLE)
        except Exception as error:
            self._wrong.append(f"error: {error!r}")
            raise

    def _free(self) -> None:
        for job, pages, slot in [h for h in self._held.values() if h[0].is_released]:
            del self._held[job.id]
            self._memory.give(pages, slot)

    def _admit(self) -> None:
        while self._waiting:
            ask = msgspec.msgpack.decode(self._waiting[0].payload, type=Ask)
            room = self._memory.take(ask.tokens)
            if room is None:
                return
            job, (pages, slot, wrong) = self._waiting.popleft(), room
            self._wrong += wrong
            self._held[job.id] = (job, pages, slot)
            work = _Work(job, ask, states(ask.key, ask.tokens), pages, slot)
            for layer in range(LAYERS):
                self._memory.write(pages, layer, work.words, 0, ask.have)
            try:
                job.accept([pages], computed=ask.have)
            except Cancelled:
                continue
            self._turns.append(work)

    def _pass(self) -> None:
        self._passes += 1
        together = [
            self._turns.popleft() for _ in range(min(len(self._turns), 1 + self._passes % 2))
        ]
        together = [work for work in together if not work.job.stopped]
        for work in [w for w in together if w.passes == w.ask.fails]:
            work.job.fail(work.ask.reason)
            together.remove(work)
        if not together:
            return
        ends = [(w, min(w.done + w.ask.chunk, w.ask.tokens)) for w in together]
        self.prefiller.begin([(work.job, end) for work, end in ends])
        for layer in range(LAYERS):
            for work, end in ends:
                self._memory.write(work.pages, layer, work.words, work.done, end)
            if pause := max(work.ask.pause for work in together):
                time.sleep(pause)
            self.prefiller.layer_done(layer)
        for work, end in ends:
            work.done, work.passes = end, work.passes + 1
            self._go_on(work)

    def _go_on(self, work: _Work) -> None:
        if work.done < work.ask.tokens:
            self._turns.append(work)
            return
        self._memory.tail(work.slot)[:] = tail(work.ask.key)
        with contextlib.suppress(Cancelled):
            work.job.finish(work.slot)
