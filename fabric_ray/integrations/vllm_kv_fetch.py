"""A decode worker's end of the KV connector: asks prefillers for blocks, and reports what came."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fabric_ray import observe
from fabric_ray.errors import FabricError
from fabric_ray.integrations.vllm_kv_content import weights
from fabric_ray.integrations.vllm_kv_layout import WorkerCache
from fabric_ray.integrations.vllm_kv_offer import from_text
from fabric_ray.integrations.vllm_kv_plan import Claim, Load
from fabric_ray.kvcache import Decoder, Pull

_LOG = logging.getLogger(__name__)


class Fetcher:
    """The loads of one worker. Called by vLLM's worker thread; ends come from the engine's, which
    calls ``on_release`` then.

    ``zeroes``: whether vLLM zeroes blocks that it gives out, and leaves those that are loaded to
    the connector.

    ``block_tokens``: tokens of a block, where vLLM takes failures by blocks; ``None`` where it
    takes them by requests, because a block doesn't tell its cache group or is none.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: WorkerCache,
        *,
        ranks: int,
        block_tokens: int | None,
        timeout: float,
        zeroes: bool = False,
        on_release: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_release, self._zeroes = on_release, zeroes
        self._decoder, self._cache = decoder, cache
        self._ranks, self._block_tokens, self._timeout = ranks, block_tokens, timeout
        self._prefillers: dict[bytes, int] = {}
        self._open: dict[str, tuple[Load, Pull]] = {}
        self._ended: deque[tuple[Load, FabricError | None]] = deque()
        self._cancelled: set[str] = set()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()

    def start(self, loads: Sequence[Load]) -> None:
        """Asks for blocks. Any error is reported as the failure of its load."""
        for load in loads:
            try:
                pull = self._pull(load)
            except FabricError as error:
                # Nothing was sent, so no peer writes to its blocks.
                self._ended.append((load, error))
                continue
            self._open[load.request] = (load, pull)
            pull.on_release(partial(self._released, load, pull))

    def cancel(self, requests: Sequence[str]) -> None:
        """Gives loads up; their ends are reported when nothing can land any more (MR-1)."""
        for request in requests:
            if request in self._open:
                self._cancelled.add(request)
                self._open[request][1].cancel()

    def renew(self, leases: Mapping[str, Sequence[int]]) -> None:
        """Renews leases, by the prefiller's offer. One that was lost is not called again for it."""
        for text, numbers in leases.items():
            try:
                known = self._prefillers.get(from_text(text))
                self._decoder.renew(self._prefiller(text) if known is None else known, numbers)
            except FabricError as error:
                # The load will fail by the same.
                _LOG.debug("leases of a prefiller aren't renewed: %s", error)

    def received(self) -> set[str]:
        """Requests whose blocks no peer writes to any more, loaded or not (MR-1)."""
        over = set()
        while self._ended:
            load, error = self._ended.popleft()
            self._open.pop(load.request, None)
            over.add(load.request)
            cancelled = load.request in self._cancelled
            self._cancelled.discard(load.request)
            if error is None and not cancelled and self._zeroes:
                self._cache.clear_rest(load.tables, load.tokens)
            if error is None or cancelled:
                continue
            _LOG.error("request %s lacks its pages: %s", load.request, error)
            if self._block_tokens is None:
                self._failed.add(load.request)
            else:
                (table,) = load.tables
                self._invalid.update(table[load.have // self._block_tokens :])
        return over

    def invalid(self) -> set[int]:
        """Blocks that were to be loaded and weren't, since the last call (RS-1)."""
        found, self._invalid = self._invalid, set()
        return found

    def failed(self) -> set[str]:
        """Requests whose blocks weren't loaded, since the last call (RS-1)."""
        found, self._failed = self._failed, set()
        return found

    def close(self) -> None:
        self._decoder.close()

    def _released(self, load: Load, pull: Pull) -> None:
        self._ended.append((load, pull.error))
        self._on_release()

    def _pull(self, load: Load) -> Pull:
        claim = Claim(load.transfer, load.digest, load.request, self._ranks, weights())
        with observe.span(load.request):
            return self._decoder.pull(
                self._prefiller(load.offer),
                tokens=load.tokens,
                tables=self._cache.tables(load.tables, load.tokens),
                have=load.have,
                payload=claim.encoded(),
                timeout=self._timeout,
                salt=zlib.crc32(load.transfer.encode()),
            )

    def _prefiller(self, text: str) -> int:
        # The same offer may be written in several ways.
        offer = from_text(text)
        known = self._prefillers.get(offer)
        if known is None or not self._decoder.is_connected(known):
            live = self._prefillers.items()
            self._prefillers = {each: n for each, n in live if self._decoder.is_connected(n)}
            known = self._prefillers[offer] = self._decoder.connect(offer)
        return known
