"""A decode worker's end of the KV connector: asks prefillers for blocks, and reports what came."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fabric_ray import observe
from fabric_ray.errors import FabricError
from fabric_ray.integrations.vllm_kv_content import weights
from fabric_ray.integrations.vllm_kv_layout import WorkerCache
from fabric_ray.integrations.vllm_kv_offer import check_stages, from_text
from fabric_ray.integrations.vllm_kv_plan import Claim, Load
from fabric_ray.kvcache import Decoder, Pull

_LOG = logging.getLogger(__name__)


@dataclass
class _Open:
    """A load whose blocks may still be written to."""

    load: Load
    pulls: Sequence[tuple[int, Pull]]
    """One from each stage of the prefiller's pipeline, by its session."""
    left: int
    """How many of them aren't released."""
    error: FabricError | None = None
    """Why blocks will be lacking; the first cause."""


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
        self._null_tables = [[0] for _ in cache.layouts[0].groups]
        # The sessions with a prefiller's stages, by their offers.
        self._prefillers: dict[tuple[bytes, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._ended: deque[tuple[Load, FabricError | None]] = deque()
        self._cancelled: set[str] = set()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()

    def start(self, loads: Sequence[Load]) -> None:
        """Asks for blocks. Any error is reported as the failure of its load."""
        for load in loads:
            pulls: list[tuple[int, Pull]] = []
            stages: Sequence[int] = ()
            error = None
            try:
                stages = self._stages(load.offer)
                for stage in stages:
                    pulls.append((stage, self._pull(load, stage)))
            except FabricError as raised:
                error = raised
                self._decline(load, stages[len(pulls) :])  # nothing was sent to these
            if not pulls:
                # Nothing was sent, so no peer writes to its blocks.
                self._ended.append((load, error))
                continue
            opened = self._open[load.request] = _Open(load, pulls, len(pulls), error)
            for _, pull in pulls:
                pull.on_release(partial(self._released, opened, pull))
            if error is not None:
                self._cancel(opened)

    def cancel(self, requests: Sequence[str]) -> None:
        """Gives loads up; their ends are reported when nothing can land any more (MR-1)."""
        for request in requests:
            if request in self._open:
                self._cancelled.add(request)
                self._cancel(self._open[request])

    def decline(self, loads: Sequence[Load]) -> None:
        """Tells prefillers that these pages aren't needed."""
        for load in loads:
            try:
                stages = self._stages(load.offer)
            except FabricError as error:
                _warn_of_lease(load, error)
            else:
                self._decline(load, stages)

    def renew(self, leases: Mapping[str, Sequence[int]]) -> None:
        """Renews leases, by the prefiller's offer. One that was lost is not called again for it."""
        for text, numbers in leases.items():
            try:
                known = self._prefillers.get(from_text(text))
                for stage in self._stages(text) if known is None else known:
                    self._decoder.renew(stage, numbers)
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

    def _released(self, opened: _Open, pull: Pull) -> None:
        with self._lock:
            opened.left -= 1
            is_over = opened.left == 0
            has_failed = opened.error is None and pull.error is not None
            opened.error = opened.error or pull.error
        if is_over:
            self._ended.append((opened.load, opened.error))
        elif has_failed:
            self._cancel(opened)  # its blocks would be no use
        self._on_release()

    def _cancel(self, opened: _Open) -> None:
        # A stage that never hears of a pull would hold its pages for the decoder.
        unheard = [stage for stage, pull in opened.pulls if pull.cancel()]
        self._decline(opened.load, unheard)

    def _decline(self, load: Load, stages: Sequence[int]) -> None:
        """Tells these stages of a prefiller that a load needs none of their pages."""
        declined = replace(load, digest=b"", tokens=1, have=0, tables=())
        for stage in stages:
            try:
                self._pull(declined, stage)
            except FabricError as error:
                _warn_of_lease(load, error)

    def _pull(self, load: Load, prefiller: int) -> Pull:
        claim = Claim(load.transfer, load.digest, load.request, self._ranks, weights())
        # A prefiller writes nothing for a claim without a digest.
        tables = self._cache.tables(load.tables, load.tokens) if load.digest else self._null_tables
        with observe.span(load.request):
            return self._decoder.pull(
                prefiller,
                tokens=load.tokens,
                tables=tables,
                have=load.have,
                payload=claim.encoded(),
                timeout=self._timeout,
                salt=zlib.crc32(load.transfer.encode()),
            )

    def _stages(self, text: str) -> tuple[int, ...]:
        """The open sessions with a prefiller's stages. All are asked, also those whose layers this
        rank lacks: each counts the ranks that have asked."""
        # The same offer may be written in several ways.
        offers = from_text(text)
        known = self._prefillers.get(offers)
        if known is None or not self._are_connected(known):
            check_stages(offers, self._cache.layouts[0])
            for each, stages in list(self._prefillers.items()):
                if not self._are_connected(stages):
                    self._disconnect(self._prefillers.pop(each))
            opened: list[int] = []
            try:
                for offer in offers:
                    opened.append(self._decoder.connect(offer))
            except FabricError:
                self._disconnect(opened)
                raise
            known = self._prefillers[offers] = tuple(opened)
        return known

    def _are_connected(self, stages: Sequence[int]) -> bool:
        return all(self._decoder.is_connected(stage) for stage in stages)

    def _disconnect(self, stages: Sequence[int]) -> None:
        for stage in stages:
            self._decoder.disconnect(stage)


def _warn_of_lease(load: Load, error: FabricError) -> None:
    _LOG.warning("the pages of request %s stay for a lease: %s", load.request, error)
