"""Prefill and decode in one loop: what a disaggregated deployment must equal, token for token."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec
from torch import Tensor

from fabric_ray.inference.errors import InferenceError, OutOfPages
from fabric_ray.inference.protocols import DecodeRow, PrefillChunk, WholeEngine
from fabric_ray.inference.sampling import Sampling, sample
from fabric_ray.inference.tables import CachePools, Tables

Finish = Literal["stop", "length"]


class GenerationRequest(msgspec.Struct, frozen=True):
    """A prompt, and how to go on."""

    prompt: Sequence[int]
    max_tokens: int = 16
    sampling: Sampling = Sampling()
    stop: frozenset[int] = frozenset()
    """Tokens that end the text; the one that did is its last."""


class Emitted(msgspec.Struct, frozen=True):
    """A token of a request."""

    request: int
    token: int
    finish: Finish | None = None
    """Why it was the last."""


class _Running:
    """A request that has pages."""

    def __init__(self, number: int, request: GenerationRequest, tables: Tables) -> None:
        self.number, self.request, self.tables = number, request, tables
        self.computed = tables.prefix
        """Positions whose keys and values are in the pages."""
        self.tokens: list[int] = []

    @property
    def known(self) -> list[int]:
        """The tokens at those positions."""
        return [*self.request.prompt, *self.tokens][: self.computed]


class Generator:
    """Continuous batching: each step computes one chunk of the oldest prompt and one token of every
    request past its prompt. Prefixes are shared.

    Args:
        engine: with both halves.
        chunk_tokens: tokens of a prompt that are computed at once.
        max_running: requests that have pages at the same time.
    """

    def __init__(
        self, engine: WholeEngine, *, chunk_tokens: int = 256, max_running: int = 64
    ) -> None:
        if chunk_tokens < 1 or max_running < 1:
            raise InferenceError(
                f"chunk_tokens is {chunk_tokens} and max_running {max_running}; give at least 1"
            )
        self._engine = engine
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self.pools = CachePools(engine.layout(0).groups)
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, GenerationRequest]] = deque()
        self._running: list[_Running] = []

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    def submit(self, request: GenerationRequest) -> int:
        """Takes a request in and returns its number.

        Raises:
            InferenceError: it has no prompt, asks for nothing, or could never have enough pages.
        """
        if not request.prompt or request.max_tokens < 1:
            raise InferenceError(
                f"a prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens} "
                "give nothing to compute; give at least 1 of both"
            )
        if not self.pools.fits(_positions(request)):
            raise InferenceError(
                f"{_positions(request)} tokens need more pages than the cache has; shorten the "
                "prompt, lower max_tokens, or give the cache more pages"
            )
        number = next(self._numbers)
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request now; one that is unknown or has ended is left alone."""
        self._waiting = deque(w for w in self._waiting if w[0] != number)
        for running in [r for r in self._running if r.number == number]:
            self._close(running)

    def step(self) -> list[Emitted]:
        """Computes something for every running request; returns the tokens that came out.

        Raises:
            InferenceError: a prompt has tokens that the model lacks; its request is ended.
        """
        self._admit()
        prompts = [running for running in self._running if not running.tokens]
        rows = [running for running in self._running if running.tokens]
        emitted = self._prefill(prompts[0]) if prompts else []
        return emitted + self._decode(rows) if rows else emitted

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """All tokens of each request, when all have ended."""
        numbers = [self.submit(request) for request in requests]
        out: dict[int, list[int]] = {number: [] for number in numbers}
        while self.busy:
            for emitted in self.step():
                out.setdefault(emitted.request, []).append(emitted.token)
        return [out[number] for number in numbers]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            number, request = self._waiting[0]
            try:
                tables = self.pools.open(request.prompt, _positions(request))
            except OutOfPages:
                return  # until another request ends: the oldest goes first
            self._waiting.popleft()
            self._running.append(_Running(number, request, tables))

    def _prefill(self, running: _Running) -> list[Emitted]:
        prompt, start = running.request.prompt, running.computed
        tokens = prompt[start : start + self._chunk_tokens]
        end = start + len(tokens)
        chunk = PrefillChunk(tokens, start, running.tables.tables, last=end == len(prompt))
        try:
            tail = self._engine.prefill(chunk)
        except InferenceError:
            self._close(running)
            raise
        running.computed = end
        running.tables.insert(running.known)
        running.tables.slide(end)
        return [] if tail is None else [self._emit(running, tail.logits)]

    def _decode(self, rows: Sequence[_Running]) -> list[Emitted]:
        for running in rows:
            running.tables.slide(running.computed)
        logits = self._engine.decode(
            [DecodeRow(r.tokens[-1], r.computed, r.tables.tables) for r in rows]
        )
        for running in rows:
            running.computed += 1
        return [self._emit(running, row) for running, row in zip(rows, logits, strict=True)]

    def _emit(self, running: _Running, logits: Tensor) -> Emitted:
        request, tokens = running.request, running.tokens
        tokens.append(sample(logits, request.sampling, len(tokens)))
        finish: Finish | None = None
        if tokens[-1] in request.stop:
            finish = "stop"
        elif len(tokens) == request.max_tokens:
            finish = "length"
        if finish is not None:
            running.tables.insert(running.known)
            self._close(running)
        return Emitted(running.number, tokens[-1], finish)

    def _close(self, running: _Running) -> None:
        running.tables.close()
        self._running.remove(running)


def _positions(request: GenerationRequest) -> int:
    """Tokens that get into the pages: the last one that is generated doesn't."""
    return len(request.prompt) + request.max_tokens - 1
