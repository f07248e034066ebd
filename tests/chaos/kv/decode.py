"""A decoder's process: asks for pages, looks at every word of them, and uses them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from fabric_ray.errors import FabricError
from fabric_ray.kvcache import Decoder, Pull
from tests.chaos.kv.draw import LAYERS, TIMEOUT, Ask, Side
from tests.chaos.kv.memory import Memory, states, tail
from tests.chaos.kv.prefill import TERMS

HANG = TIMEOUT + 10.0
"""Seconds after which a request that hasn't ended hangs."""


class Came(NamedTuple):
    """What became of a request."""

    id: int
    error: str | None
    """The error's class; ``None`` for all pages, ``hang`` if it never ended."""
    text: str = ""
    wrong: tuple[str, ...] = ()
    """Broken promises that only its decoder could see."""


class DecoderProcess:
    """A decoder, from when it opens its engines to when it closes them."""

    def __init__(self, name: str, transport: str, side: Side) -> None:
        self._memory = Memory(name, transport, side)
        self._decoder = Decoder(self._memory.ranks, name=name, terms=TERMS)
        self._met: dict[bytes, int] = {}
        self._wrong: list[str] = []

    @property
    def idle(self) -> bool:
        return self._decoder.open == 0 and self._memory.idle

    def wrong(self) -> list[str]:
        found, self._wrong = self._wrong, []
        return found

    def run(self, asks: Sequence[Ask], offers: Mapping[int, bytes], start: float) -> list[Came]:
        """Makes a round's requests, each at its time; what became of them, all released."""

        async def all_() -> list[Came]:
            return list(await asyncio.gather(*(self._one(a, offers, start) for a in asks)))

        return asyncio.run(all_())

    async def _one(self, ask: Ask, offers: Mapping[int, bytes], start: float) -> Came:
        await asyncio.sleep(max(0.0, start + ask.at - time.monotonic()))
        words = states(ask.key, ask.tokens)
        room = self._memory.take(ask.tokens)
        if room is None:
            return Came(ask.id, "hang", "pages of earlier requests are not free")
        pages, slot, wrong = room
        for layer in range(LAYERS):
            self._memory.write(pages, layer, words, 0, ask.have)
        try:
            pull = await self._ask(ask, offers[ask.prefiller], pages, slot)
        except (FabricError, OSError) as error:
            self._memory.give(pages, slot)
            return Came(ask.id, type(error).__name__, str(error), tuple(wrong))
        if ask.cancel is not None:
            asyncio.get_running_loop().call_later(ask.cancel, pull.cancel)
        error, text = None, ""
        try:
            await asyncio.wait_for(pull.ready(), HANG)
            # IC-2: whatever isn't there now is missing.
            wrong += self._look("IC-2", ask, pages, slot)
        except asyncio.TimeoutError:
            error, text = "hang", f"after {HANG} s"
        except FabricError as failed:
            error, text = type(failed).__name__, str(failed)
        try:
            await asyncio.wait_for(pull.released(), HANG)
        except asyncio.TimeoutError:
            return Came(ask.id, "hang", f"not released after {HANG} s", tuple(wrong))
        if error is None:
            wrong += self._look("RS-1", ask, pages, slot)
        self._memory.give(pages, slot)
        return Came(ask.id, error, text, tuple(wrong))

    async def _ask(self, ask: Ask, offer: bytes, pages: list[int], slot: int) -> Pull:
        number = self._met.get(offer)
        if number is None or not self._decoder.is_connected(number):
            number = self._met[offer] = self._decoder.connect(offer)
        return self._decoder.pull(
            number,
            tokens=ask.tokens,
            have=ask.have,
            tables=[pages],
            tail_slot=slot,
            payload=msgspec.msgpack.encode(ask),
            timeout=ask.timeout,
            salt=ask.salt,
        )

    def _look(self, promise: str, ask: Ask, pages: list[int], slot: int) -> list[str]:
        wrong = []
        if what := self._memory.differs(pages, states(ask.key, ask.tokens)):
            wrong.append(f"{promise}: {what}")
        if (self._memory.tail(slot) != tail(ask.key)).any():
            wrong.append(f"{promise}: the tail is another's")
        return wrong

    def close(self) -> list[str]:
        self._decoder.close()
        deadline = time.monotonic() + 8.0
        while not self.idle and time.monotonic() < deadline:
            time.sleep(0.005)
        wrong = self.wrong() + self._memory.look()
        self._memory.close()
        return wrong
