"""Continuous batching: one thread computes one token of all running requests per step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fabric_ray.inference.errors import InferenceError, NonFiniteLogits
from fabric_ray.inference.protocols import DecodeEngine, DecodeRow, PageTable, Tail
from fabric_ray.inference.sampling import Sampling, sample
from fabric_ray.serve.errors import ServeError, Unavailable
from fabric_ray.serve.health import EngineHealth, one_line

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Row:
    """One request in the batch.

    Args:
        prompt_tokens: tokens whose keys and values are in the pages.
        tables: its pages, for each group; valid until ``on_out``.
        tail: of its prefill.
        sampling: how tokens are chosen.
        max_tokens: most tokens to generate.
        min_tokens: tokens before which none of ``stop`` is chosen.
        stop: tokens that end the request.
        on_token: called on the event loop with each token, and why it is the last one, if so.
        on_out: called once on the event loop, with the error if there was one, when no step
            touches the pages any more.
    """

    def __init__(
        self,
        *,
        prompt_tokens: int,
        tables: tuple[PageTable, ...],
        tail: Tail,
        sampling: Sampling,
        max_tokens: int,
        min_tokens: int = 0,
        stop: frozenset[int],
        on_token: Callable[[int, str | None], None],
        on_out: Callable[[ServeError | None], None],
    ) -> None:
        self.position = prompt_tokens
        self.tables, self.tail = tables, tail
        self.sampling, self.max_tokens, self.stop = sampling, max_tokens, stop
        self._min_tokens = min_tokens
        self.on_token, self.on_out = on_token, on_out
        self.tokens: list[int] = []
        self.removed = False

    @property
    def barred(self) -> frozenset[int]:
        """Tokens that can't be chosen next."""
        return self.stop if len(self.tokens) < self._min_tokens else frozenset()

    def take(self, token: int) -> str | None:
        """Adds a token; returns why it is the last one, if it is."""
        self.tokens.append(token)
        if token in self.stop:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None


class DecodeLoop:
    """Steps all rows of a decoder in a thread.

    Args:
        engine: used by this thread only.
        loop: runs the callbacks of rows.
        stuck_after: seconds of one step after which :meth:`check` raises.
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
        """Adds a row to the batch before the next step."""
        with self._wake:
            if not (self._closed or self._broken):
                self._new.append(row)
                self._wake.notify()
                return
        row.on_out(Unavailable(f"the decode engine stopped: {self._broken or 'it was closed'}"))

    def remove(self, row: Row) -> None:
        """Removes a row before the next step; does nothing if it is out already."""
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

    # The methods below run in the thread.

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
        self._call_on_loop([partial(row.on_out, why) for row in left])

    def _gather(self) -> bool:
        """Waits until there are rows; false once the loop is closed."""
        with self._wake:
            while True:
                if self._closed:
                    return False
                self._rows += self._new
                self._new = []
                removed = [row for row in self._rows if row.removed]
                self._rows = [row for row in self._rows if not row.removed]
                if self._rows or removed:
                    break
                self._wake.wait()
        self._call_on_loop([partial(row.on_out, None) for row in removed])
        return True

    def _step(self) -> None:
        """Chooses the first token of new rows, then computes one more token of all rows."""
        failure = self._choose_all([(row, row.tail.logits) for row in self._rows if not row.tokens])
        # A prefiller computed the logits of a tail.
        if failure is not None and not isinstance(failure, NonFiniteLogits):
            self._record_failure(failure)
        rows = list(self._rows)
        if not rows:
            return
        batch = [DecodeRow(row.tokens[-1], row.position, row.tables) for row in rows]
        try:
            logits = self._engine.decode(batch)
        except Exception as error:
            self._end_all(rows, error)
            return
        for row in rows:
            row.position += 1
        self.steps += 1
        failure = self._choose_all(list(zip(rows, logits, strict=True)))
        if failure is not None:
            self._record_failure(failure)
        else:
            self._health.worked()

    def _end_all(self, rows: Sequence[Row], error: Exception) -> None:
        """Ends all rows: the row that made the step fail is unknown."""
        self._rows = []
        if not isinstance(error, InferenceError):
            logger.exception("a step of %d requests failed", len(rows))
        why = ServeError(f"a step of {len(rows)} requests failed: {one_line(error)}")
        self._call_on_loop([partial(row.on_out, why) for row in rows])
        self._record_failure(error)

    def _record_failure(self, error: Exception) -> None:
        self._failures += 1
        self._health.failed(f"step {self._failures}", error)
        if self._health.lost is not None:
            raise Unavailable(self._health.lost) from error

    def _choose_all(self, computed: Sequence[tuple[Row, Tensor]]) -> Exception | None:
        """Chooses a token from each row's logits; returns why that failed for a row, if so."""
        callbacks: list[Callable[[], None]] = []
        failure: Exception | None = None
        for row, logits in computed:
            try:
                self._choose(row, logits, callbacks)
            except Exception as error:
                # Bad logits of one row don't affect other rows.
                failure = error
                self._rows.remove(row)
                why = ServeError(f"no token could be chosen: {one_line(error)}")
                callbacks.append(partial(row.on_out, why))
        self._call_on_loop(callbacks)
        return failure

    def _choose(self, row: Row, logits: Tensor, callbacks: list[Callable[[], None]]) -> None:
        token = sample(logits, row.sampling, len(row.tokens), barred=row.barred)
        finish = row.take(token)
        self.tokens += 1
        callbacks.append(partial(row.on_token, token, finish))
        if finish is not None:
            self._rows.remove(row)
            callbacks.append(partial(row.on_out, None))

    def _call_on_loop(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Wakes the event loop once for all callbacks: once for each would cost more than a
        step."""
        if not callbacks:
            return

        def run() -> None:
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    # A failed callback must not keep the others from running.
                    logger.exception("a request's callback failed")

        with contextlib.suppress(RuntimeError):  # The loop may be closed.
            self._loop.call_soon_threadsafe(run)
