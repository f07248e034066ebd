"""A decoder's process under load: many requests at a time, retries, cancellations."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any, Literal

import msgspec

from benchmarks.kvcache.nodes import Asked, Instance, Setup
from fabric_ray.errors import Stale
from fabric_ray.inference.errors import OutOfPages
from fabric_ray.inference.protocols import DecodeRow
from fabric_ray.inference.sampling import Sampling, sample
from fabric_ray.inference.tables import Tables
from fabric_ray.kvcache import Decoder, Pull
from fabric_ray.kvcache.errors import KvError

_BATCH = 64
_ATTEMPTS = 20
_TIMEOUT = 300.0

Outcome = Literal["done", "cancelled", "failed"]


class Order(msgspec.Struct, frozen=True):
    """A client's request."""

    number: int
    prompt: list[int]
    max_tokens: int
    patience: float | None = None
    """Seconds after which the client has gone."""


class Ended(msgspec.Struct, frozen=True):
    """What became of one."""

    number: int
    outcome: Outcome
    tokens: list[int]
    attempts: int
    """Prefillers that were asked."""
    first: float | None
    """Seconds to the first token."""
    cause: str = ""


class _Open:
    """A request that has not ended."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.start = time.monotonic()
        self.first: float | None = None
        self.tokens: list[int] = []
        self.attempts = 0
        self.gone = False
        self.pull: Pull | None = None
        self.over = asyncio.Event()

    @property
    def full(self) -> bool:
        return len(self.tokens) == self.order.max_tokens

    def emit(self, token: int) -> None:
        self.first = self.first or time.monotonic() - self.start
        self.tokens.append(token)
        if self.full:
            self.over.set()


class LoadedDecoder:
    """A decoder's process.

    Args:
        setup: shapes.
        name: of the decoder.
        slots: requests that may have pages at a time.
    """

    def __init__(self, setup: Setup, name: str, slots: int) -> None:
        self._node = Instance(setup, name, slots)
        self._decoder = Decoder([self._node.rank], name=name, terms=self._node.terms)
        self._slots, self._free = slots, list(range(slots))
        self._prefillers: list[int] = []
        self._turn = itertools.count()
        self._open: dict[int, _Open] = {}
        self._decoding: dict[int, tuple[_Open, Tables]] = {}
        self._ended: list[Ended] = []
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Condition()
        self._work = asyncio.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def meet(self, offer: bytes) -> None:
        number = self._decoder.connect(offer)
        asyncio.run_coroutine_threadsafe(self._met(number), self._loop).result()

    def submit(self, orders: list[Order]) -> None:
        for order in orders:
            asyncio.run_coroutine_threadsafe(self._request(_Open(order)), self._loop)

    def take(self) -> list[Ended]:
        """What ended since the last call."""
        if self._failure is not None:
            raise RuntimeError("the decoder's thread has ended") from self._failure
        ended, self._ended = self._ended, []
        return ended

    def state(self) -> dict[str, Any]:
        """Whether anything is left of any request."""
        idle = self._node.pools.idle and len(self._free) == self._slots
        return {"open": self._decoder.open + len(self._open), "idle": idle}

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._decode())
        except BaseException as error:
            self._failure = error
            raise

    async def _met(self, number: int) -> None:
        async with self._room:
            self._prefillers.append(number)
            self._room.notify_all()

    async def _request(self, one: _Open) -> None:
        order = one.order
        self._open[order.number] = one
        timer = None
        if order.patience is not None:
            timer = self._loop.call_later(order.patience, self._cancel, one)
        cause = ""
        try:
            while not one.over.is_set() and one.attempts < _ATTEMPTS:
                cause, retry = await self._attempt(one)
                if not retry:
                    break
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
        outcome: Outcome = "done" if one.full else "cancelled" if one.gone else "failed"
        if timer is not None:
            timer.cancel()
        del self._open[order.number]
        self._ended.append(Ended(order.number, outcome, one.tokens, one.attempts, one.first, cause))

    async def _attempt(self, one: _Open) -> tuple[str, bool]:
        """Asks one prefiller, and decodes to the end if its pages come; else why not, and whether
        to ask another."""
        order = one.order
        tables, slot, prefiller = await self._reserve(order)
        try:
            if one.over.is_set():
                return "", False
            one.attempts += 1
            try:
                pull = self._pull(one, tables, slot, prefiller)
            except Stale as error:
                self._forget(prefiller)
                return str(error), True
            one.pull = pull
            try:
                await pull.ready()
            except KvError as error:
                tables.hold()
                await pull.released()
                tables.release()
                if not self._decoder.is_connected(prefiller):
                    self._forget(prefiller)
                return f"{type(error).__name__}: {error}", error.retryable
            finally:
                one.pull = None
            tail = self._node.engine.read_tail(self._node.tails[slot])
            if not one.over.is_set():
                one.emit(sample(tail.logits, Sampling(), 0))
            if not one.over.is_set():
                self._decoding[order.number] = (one, tables)
                self._work.set()
                await one.over.wait()
                self._decoding.pop(order.number, None)
            await pull.released()
            return "", False
        finally:
            tables.close()
            async with self._room:
                self._free.append(slot)
                self._room.notify_all()

    async def _reserve(self, order: Order) -> tuple[Tables, int, int]:
        """Pages, a slot for the tail, and a prefiller."""
        async with self._room:
            while True:
                if self._free and self._prefillers:
                    try:
                        positions = len(order.prompt) + order.max_tokens - 1
                        tables = self._node.pools.open(order.prompt, positions, most=0)
                    except OutOfPages:
                        pass  # until another request ends
                    else:
                        turn = next(self._turn) % len(self._prefillers)
                        return tables, self._free.pop(), self._prefillers[turn]
                await self._room.wait()

    def _pull(self, one: _Open, tables: Tables, slot: int, prefiller: int) -> Pull:
        prompt = one.order.prompt
        pages = [
            table[: -(-len(prompt) // group.page_tokens)]
            for table, group in zip(tables.tables, self._node.pools.groups, strict=True)
        ]
        return self._decoder.pull(
            prefiller,
            tokens=len(prompt),
            tables=pages,
            tail_slot=slot,
            payload=msgspec.msgpack.encode(Asked(prompt)),
            timeout=_TIMEOUT,
        )

    def _cancel(self, one: _Open) -> None:
        if not one.full:
            one.gone = True
            one.over.set()
            if one.pull is not None:
                one.pull.cancel()

    def _forget(self, prefiller: int) -> None:
        if prefiller in self._prefillers:
            self._prefillers.remove(prefiller)

    async def _decode(self) -> None:
        """A step for as many requests as a batch takes, for ever."""
        while True:
            rows = [row for row in self._decoding.values() if not row[0].over.is_set()][:_BATCH]
            if not rows:
                self._work.clear()
                await self._work.wait()
                continue
            logits = self._node.engine.decode(
                [
                    DecodeRow(
                        one.tokens[-1],
                        len(one.order.prompt) + len(one.tokens) - 1,
                        tables.tables,
                    )
                    for one, tables in rows
                ]
            )
            for (one, _), row in zip(rows, logits, strict=True):
                one.emit(sample(row, Sampling(), len(one.tokens)))
            await asyncio.sleep(0)
