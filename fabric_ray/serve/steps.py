"""Continuous batched decode: one thread, a step of all running requests at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.protocols import DecodeEngine, DecodeRow, PageTable, Tail
from fabric_ray.inference.sampling import Sampling, sample
from fabric_ray.serve.errors import ServeError, Unavailable
from fabric_ray.serve.health import EngineHealth, in_words

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Row:
    """One request in the batch.

    Args:
        prompt_tokens: positions that are in the pages already.
        tables: its pages, for each group; they stay until ``on_out``.
        tail: of its prefill.
        sampling: how tokens are chosen.
        max_tokens: after so many it is over.
        stop: tokens that end it.
        on_token: gets each token, and why it was the last; on the event loop.
        on_out: called once, on the event loop: no step touches its pages any more. With the error
            that ended it, if one did.
    """

    def __init__(
        self,
        *,
        prompt_tokens: int,
        tables: tuple[PageTable, ...],
        tail: Tail,
        sampling: Sampling,
        max_tokens: int,
        stop: frozenset[int],
        on_token: Callable[[int, str | None], None],
        on_out: Callable[[ServeError | None], None],
    ) -> None:
        self.position = prompt_tokens
        self.tables, self.tail = tables, tail
        self.sampling, self.max_tokens, self.stop = sampling, max_tokens, stop
        self.on_token, self.on_out = on_token, on_out
        self.tokens: list[int] = []
        self.removed = False

    def take(self, token: int) -> str | None:
        """Adds a token; returns why it was the last, if it was."""
        self.tokens.append(token)
        if token in self.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None


class DecodeLoop:
    """Steps all rows of a decoder, in a thread of its own.

    Args:
        engine: which this thread alone computes with.
        loop: where rows are told.
        stuck_after: seconds of a step after which :meth:`check` raises.
    """

    def __init__(
        self, engine: DecodeEngine, *, loop: asyncio.AbstractEventLoop, stuck_after: float = 120.0
    ) -> None:
        self._engine, self._loop, self._stuck_after = engine, loop, stuck_after
        self._wake = threading.Condition()
        self._new: list[Row] = []
        self._rows: list[Row] = []
        self._closed = False
        self._step_began: float | None = None
        self._broken: str | None = None
        self._health = EngineHealth()
        self._failures = 0
        self.steps = 0
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Joins a row to the batch from the next step on."""
        with self._wake:
            if not (self._closed or self._broken):
                self._new.append(row)
                self._wake.notify()
                return
        row.on_out(Unavailable(f"the decode engine stopped: {self._broken or 'it was closed'}"))

    def remove(self, row: Row) -> None:
        """Takes a row out before the next step; nothing if it is out already."""
        with self._wake:
            row.removed = True
            self._wake.notify()

    @property
    def running(self) -> int:
        return len(self._rows) + len(self._new)

    def check(self) -> None:
        """Raises:
        Unavailable: the thread has died, or hangs in a step.
        """
        began = self._step_began
        if self._broken is not None or not self._thread.is_alive():
            raise Unavailable(f"the decode engine stopped: {self._broken or 'its thread died'}")
        if began is not None and time.monotonic() - began > self._stuck_after:
            raise Unavailable(f"a step of the decode engine takes over {self._stuck_after} s")

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=5)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            while self._gather():
                self._step_began = time.monotonic()
                self._step()
                self._step_began = None
        except Exception as error:
            logger.exception("the decode engine stopped")
            with self._wake:
                self._broken = f"{type(error).__name__}: {error}"
        why = Unavailable(f"the decode engine stopped: {self._broken or 'it was closed'}")
        with self._wake:
            self._broken = self._broken or "it was closed"
            left, self._rows, self._new = [*self._rows, *self._new], [], []
        self._tell([partial(row.on_out, why) for row in left])

    def _gather(self) -> bool:
        """Waits for something to do; False if it is over."""
        with self._wake:
            while True:
                if self._closed:
                    return False
                self._rows += self._new
                self._new = []
                gone = [row for row in self._rows if row.removed]
                self._rows = [row for row in self._rows if not row.removed]
                if self._rows or gone:
                    break
                self._wake.wait()
        self._tell([partial(row.on_out, None) for row in gone])
        return True

    def _step(self) -> None:
        """First tokens of those that have none, then one token of everybody."""
        self._choose_all([(row, row.tail.logits) for row in self._rows if not row.tokens])
        rows = list(self._rows)
        if not rows:
            return
        asked = [DecodeRow(row.tokens[-1], row.position, row.tables) for row in rows]
        try:
            logits = self._engine.decode(asked)
        except Exception as error:
            self._end_all(rows, error)
            return
        for row in rows:
            row.position += 1
        self.steps += 1
        if self._choose_all(list(zip(rows, logits, strict=True))):
            self._health.worked()

    def _end_all(self, rows: Sequence[Row], error: Exception) -> None:
        """Which of them a step failed for can't be told: all end with the cause."""
        self._rows = []
        if not isinstance(error, InferenceError):
            logger.exception("a step of %d requests failed", len(rows))
        why = ServeError(f"a step of {len(rows)} requests failed: {in_words(error)}")
        self._tell([partial(row.on_out, why) for row in rows])
        self._note(error)

    def _note(self, error: Exception) -> None:
        self._failures += 1
        self._health.failed(f"step {self._failures}", error)
        if self._health.lost is not None:
            raise Unavailable(self._health.lost) from error

    def _choose_all(self, ahead: Sequence[tuple[Row, Tensor]]) -> bool:
        """Whether every row got its token."""
        said: list[Callable[[], None]] = []
        wrong: Exception | None = None
        for row, logits in ahead:
            try:
                self._choose(row, logits, said)
            except Exception as error:
                # Its logits are its own: others may have theirs.
                wrong = error
                self._rows.remove(row)
                why = ServeError(f"no token could be chosen: {in_words(error)}")
                said.append(partial(row.on_out, why))
        self._tell(said)
        if wrong is not None:
            self._note(wrong)
        return wrong is None

    def _choose(self, row: Row, logits: Tensor, said: list[Callable[[], None]]) -> None:
        token = sample(logits, row.sampling, len(row.tokens))
        finish = row.take(token)
        self.tokens += 1
        said.append(partial(row.on_token, token, finish))
        if finish is not None:
            self._rows.remove(row)
            said.append(partial(row.on_out, None))

    def _tell(self, said: Sequence[Callable[[], None]]) -> None:
        """All at once: waking the event loop for each would cost more than the step."""
        if not said:
            return

        def deliver() -> None:
            for say in said:
                try:
                    say()
                except Exception:
                    # What others are told must not depend on it.
                    logger.exception("a request could not be told what became of it")

        with contextlib.suppress(RuntimeError):  # the loop may be gone
            self._loop.call_soon_threadsafe(deliver)
