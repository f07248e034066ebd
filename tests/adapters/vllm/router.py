"""A router of one prefiller and one decoder, as docs/integrations.md describes it."""

from __future__ import annotations

import random
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.adapters.vllm.servers import VOCABULARY, Server


class Router:
    """Sends each request to both servers; outputs come from the decoder."""

    def __init__(self, prefiller: Server, decoder: Server, pool: ThreadPoolExecutor) -> None:
        self.prefiller, self.decoder, self._pool = prefiller, decoder, pool
        self._offer: str | None = None

    def after_prefill(self, prompt: list[int], count: int) -> list[int]:
        """Prefill, then decode: the tokens."""
        return self.decoder.tokens(prompt, count, self.prefill(prompt, uuid.uuid4().hex))

    def before_prefill(self, prompt: list[int], count: int) -> list[int]:
        """The decoder asks, then prefill: the tokens."""
        name = uuid.uuid4().hex
        asked = self.decode_early(prompt, count, name)
        time.sleep(0.1)
        self.prefill(prompt, name)
        return asked.result()

    def prefill(self, prompt: list[int], transfer: str) -> dict[str, Any]:
        """What the prefiller's response says for the decoder."""
        asked = {"do_remote_decode": True, "transfer_id": transfer}
        answer = self.prefiller.complete(prompt, 1, asked)
        found: dict[str, Any] = answer["kv_transfer_params"]
        return found

    @property
    def offer(self) -> str:
        """The prefiller's offer, from a request of its own."""
        if self._offer is None:
            self._offer = str(self.prefill([9, 8, 7], uuid.uuid4().hex)["remote_offer"])
        return self._offer

    def decode_early(self, prompt: list[int], count: int, transfer: str) -> Future[list[int]]:
        """Has the decoder ask for the pages of a prefill that may not have begun."""
        asked = {"do_remote_prefill": True, "transfer_id": transfer, "remote_offer": self.offer}
        return self._pool.submit(self.decoder.tokens, prompt, count, asked)

    def prefill_soon(self, prompt: list[int], transfer: str) -> Future[dict[str, Any]]:
        return self._pool.submit(self.prefill, prompt, transfer)


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(4, VOCABULARY) for _ in range(length)]
