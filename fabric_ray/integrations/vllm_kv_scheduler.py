"""The scheduler's half of the KV connector: which requests' blocks are moved, and which are held.

A request says what it wants by its ``kv_transfer_params``, as with vLLM's own connectors:
``do_remote_decode`` has its blocks kept for a decoder, ``do_remote_prefill`` has them filled by a
prefiller. Both name a ``transfer_id``; the second also the prefiller's ``remote_offer``.

What vLLM schedules isn't computed yet. Its prefix cache has blocks from the moment at which they
are allocated, so a request's hits may be blocks that another request computes in the same step.
:attr:`Ready.computed` counts only what earlier steps wrote (RS-1).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv_config import KvConnectorConfig
from fabric_ray.integrations.vllm_kv_groups import BlockPins, LayerGroup, Tables, loaded_tokens
from fabric_ray.integrations.vllm_kv_leases import Admissions, Renewals
from fabric_ray.integrations.vllm_kv_offer import instance
from fabric_ray.integrations.vllm_kv_plan import Failed, Load, Ready, Step, digest_of, remember

_LOG = logging.getLogger(__name__)

# Seconds after the end of a prefill for which steps are wanted that look whether its blocks are
# free. Decoders commonly ask sooner; later ends are noticed by the next step that is made anyway.
_ASKING = 1.0

# As `vllm.v1.request.RequestStatus` names requests whose prefill is whole.
_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


# A transfer and its prompt's digest.
_Named = tuple[str, bytes]


@dataclass
class _Prefill:
    """A request whose blocks a decoder wants."""

    transfer: str
    digest: bytes
    tokens: int
    ready: bool = False
    admitted: bool = True
    """Whether no step has run since its blocks were allocated: hits may be of that very step."""
    lost: bool = False
    """Whether vLLM has taken blocks of a window back, so that it never becomes ready."""
    resumes: bool = False
    """Whether more of the prompt may come, whose tokens would change a state that is sent."""
    is_wanted: bool = True
    """Whether the decoder loads any of it: of the shortest prompts it computes all."""


@dataclass
class _Held:
    """A finished request whose blocks are kept."""

    ranks: int
    """How many workers may still read them."""
    since: float
    """When it was over, on the clock of this process."""


class _Tables:
    """The block tables of the requests of a step."""

    def __init__(self) -> None:
        self._known: dict[str, Tables] = {}

    def of(self, output: Any) -> Callable[[str], Tables]:
        """A function that finds a request's tables in a step's ``SchedulerOutput``."""
        state = output.kv_connector_block_state
        find: Callable[[str], Tables] | None = getattr(state, "get_block_ids", None)
        if find is None:
            # vLLM before 0.32 has the tables that changed.
            for number in output.finished_req_ids:
                self._known.pop(number, None)
            self._known.update(state.block_ids)
            find = self._known.__getitem__
        return find


class KvScheduler:
    """Keeps what :meth:`step` tells the workers. Called by one thread, vLLM's engine core.

    Args:
        groups: the cache groups, in the order of block tables.
        engine: the instance's name.
        produces: whether its workers send pages.
        consumes: whether they ask for pages.
        recomputed: last tokens of a prompt that a decoder computes again, for its draft modules or
            for states; with states a prefiller doesn't compute them.
        ranks: number of workers, each of which reports that blocks are free.
        zeroes: whether workers zero the blocks that a step gives to requests before they hear whose
            blocks it took.
        config: the instance's.
    """

    def __init__(
        self,
        *,
        groups: Sequence[LayerGroup],
        engine: str,
        produces: bool = True,
        consumes: bool = True,
        recomputed: int = 0,
        ranks: int = 1,
        zeroes: bool = False,
        config: KvConnectorConfig | None = None,
    ) -> None:
        self._groups, self._engine = groups, engine
        self._recomputed, self._ranks = recomputed, ranks
        self._produces, self._consumes = produces, consumes
        self._offer: str | None = None
        self._prefills: dict[str, _Prefill] = {}
        self._local: dict[str, int] = {}
        self._loading: dict[str, _Named] = {}
        self._ending: set[str] = set()  # of those, the cancelled ones
        self._names: dict[str, _Named] = {}
        self._coming: set[_Named] = set()
        self._loaded: OrderedDict[_Named, None] = OrderedDict()
        self._held: dict[str, _Held] = {}  # the latest one is last
        self._stepped = 0.0
        self._takes_back = any(group.takes_back for group in groups)
        self._shortens = recomputed if any(group.is_state for group in groups) else 0
        self.pins = BlockPins(groups, every=zeroes)
        self._unpin_after: list[str] = []
        self._loads_elsewhere = False
        self._tables = _Tables()
        self._next = Step()
        config = config or KvConnectorConfig()
        self._renewals = Renewals(config.terms.beat)
        self._admissions = Admissions(config.lease)

    def offered(self, offers: Mapping[tuple[int, int], bytes]) -> str | None:
        """Takes what the workers offer, by stage and rank in it; returns it as text."""
        if offers:
            self._offer = instance(offers)
        return self._offer

    def queued(self, request: Any) -> None:
        """A request has come, and vLLM hasn't looked for its hits yet, which must not be beyond
        what is computed. Its prefiller keeps the pages while it waits for blocks here."""
        params = request.kv_transfer_params or {}
        is_sent = params.get("do_remote_decode") and self._produces
        if is_sent and request.request_id not in self._held:
            self._prefill_of(request)
        offer = params.get("remote_offer")
        if self._consumes and params.get("do_remote_prefill") and isinstance(offer, str):
            self._renewals.add(request.request_id, offer, _transfer(request))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens a prefiller will bring beyond those ``computed``, between steps; None
        while that is not known yet."""
        if self._produces:
            self._admissions.tried(request.request_id)
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        if not self._consumes:
            _LOG.error(
                "request %s wants a prefiller's pages, and this instance's kv_role takes none; it "
                "computes them; use kv_consumer or kv_both",
                request.request_id,
            )
            return 0, False
        # Logits of the whole prompt are wanted. vLLM before 0.32 asks connectors all the same.
        if request.get_skip_reading_prefix_cache():
            return 0, False
        # Several answers to one prompt (n) share its transfer: one of them brings the pages, and
        # the others find them here.
        transfer = self._named(request)
        if transfer in self._coming:
            self._admissions.over(request.request_id)  # it waits for pages
            return None, False
        if transfer in self._loaded:
            return 0, False
        self._local[request.request_id] = computed
        prompt = request.num_prompt_tokens
        count = loaded_tokens(self._groups, prompt, computed, self._recomputed) - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, tables: Tables, external: int) -> None:
        """A request has blocks, of which ``external`` tokens are a prefiller's."""
        self._admissions.over(request.request_id)
        self._renewals.drop(request.request_id)
        params = request.kv_transfer_params
        if not params:
            return
        number = request.request_id
        if number in self._held:
            _LOG.error("request %s: the pages of an earlier request of this id are held", number)
        elif params.get("do_remote_decode") and self._produces:
            prefill = self._prefill_of(request)
            prefill.admitted, prefill.lost = True, prefill.resumes
        if params.get("do_remote_prefill"):
            have = self._local.pop(number, 0)
            # What a preemption loses later is computed here.
            params["do_remote_prefill"] = False
            if external <= 0:
                self._decline(request)
                return
            tokens, offer = have + external, params.get("remote_offer")
            transfer, digest = self._named(request)
            load = Load(
                request=number,
                transfer=transfer,
                digest=digest,
                offer=offer if isinstance(offer, str) else "",
                tokens=tokens,
                have=have,
                tables=self._first(tables, tokens),
            )
            self._next.loads.append(load)
            self._loading[number] = transfer, digest
            self._coming.add(self._loading[number])

    def _decline(self, request: Any) -> None:
        """A request loads none of its pages. Its prefiller is told, unless another answer to the
        prompt loads them."""
        offer, named = request.kv_transfer_params.get("remote_offer"), self._named(request)
        is_asked = named in self._coming or named in self._loaded
        is_asked |= self._renewals.names(named[0])
        if self._consumes and isinstance(offer, str) and not is_asked:
            load = Load(request.request_id, named[0], b"", offer, tokens=1, have=0, tables=())
            self._next.declined.append(load)

    def _prefill_of(self, request: Any) -> _Prefill:
        prefill = self._prefills.get(request.request_id)
        if prefill is None:
            named, is_wanted = digest_of(request), request.num_prompt_tokens > self._recomputed
            resumes = self._shortens > 0 and getattr(request, "resumable", False)
            if not resumes:
                _shorten(request, self._shortens)
            prefill = _Prefill(
                _transfer(request),
                named,
                request.num_prompt_tokens,
                is_wanted=is_wanted,
                lost=resumes,
                resumes=resumes,
            )
            self._prefills[request.request_id] = prefill
        return prefill

    def step(self, output: Any) -> Step:
        """What the workers need to know of a step, from its ``SchedulerOutput``."""
        self._stepped = time.monotonic()
        made, self._next = self._next, Step()
        made.is_idle = output.total_num_scheduled_tokens == 0
        made.is_starved = self._admissions.are_starved
        made.renewals = self._renewals.due()
        for number in output.preempted_req_ids or ():
            prefill = self._prefills.get(number)
            if prefill is not None and prefill.ready:
                prefill.ready = False
                made.preempted.append(number)
                self.pins.unpin(number)
        # Loads of another connector may fail, and vLLM hears of it after the step. Where there
        # are any, prefills are sent when they are over.
        self._loads_elsewhere |= output.has_sync_kv_loads
        tables = self._tables.of(output)
        written: set[int] | None = None
        for number, computed in _scheduled(output):
            prefill = self._prefills.get(number)
            if prefill is None or prefill.ready or prefill.lost or not prefill.is_wanted:
                continue
            admitted, prefill.admitted = prefill.admitted, False
            if computed + output.num_scheduled_tokens.get(number, 0) < prefill.tokens:
                continue
            if self._loads_elsewhere:
                continue
            if admitted and computed:
                written = self._written(output, tables) if written is None else written
                computed = min(computed, self._unwritten(tables(number), written))
            prefill.lost = not self.pins.pin(number, tables(number), prefill.tokens)
            if not prefill.lost:
                made.ready.append(self._ready(number, prefill, tables(number), computed))
        # Blocks that are given back now are another request's in the next step at the earliest.
        for number in self._unpin_after:
            self.pins.unpin(number)
        self._unpin_after.clear()
        return made

    def _ready(self, number: str, prefill: _Prefill, tables: Tables, computed: int) -> Ready:
        prefill.ready = True
        return Ready(
            request=number,
            transfer=prefill.transfer,
            digest=prefill.digest,
            tokens=prefill.tokens,
            computed=min(computed, prefill.tokens),
            tables=self._first(tables, prefill.tokens),
        )

    def _written(self, output: Any, tables: Callable[[str], Tables]) -> set[int]:
        """The blocks to which a step writes. No two groups have the same block at once."""
        written: set[int] = set()
        for number, computed in _scheduled(output):
            end = computed + output.num_scheduled_tokens.get(number, 0)
            for group, table in zip(self._groups, tables(number), strict=True):
                written.update(table[computed // group.block_tokens : group.blocks(end)])
        return written

    def _unwritten(self, tables: Tables, written: set[int]) -> int:
        """How many tokens of a request come before the first block that a step writes."""
        first = []
        for group, table in zip(self._groups, tables, strict=True):
            hits = (i for i, block in enumerate(table) if block in written)
            first.append(group.block_tokens * next(hits, len(table)))
        return min(first)

    def _first(self, tables: Tables, tokens: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of so many tokens."""
        pairs = zip(self._groups, tables, strict=True)
        return tuple(tuple(table[: group.blocks(tokens)]) for group, table in pairs)

    def _covers(self, tables: Tables, tokens: int) -> bool:
        """Whether they have blocks of so many tokens."""
        pairs = zip(self._groups, tables, strict=True)
        return all(len(table) >= group.blocks(tokens) for group, table in pairs)

    def finished(self, request: Any, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        """A request with these blocks is over: whether they are held, and what its response
        carries."""
        self._admissions.over(request.request_id)
        self._renewals.drop(request.request_id)
        params = request.kv_transfer_params
        if not params:
            return False, None
        number = request.request_id
        if params.get("do_remote_prefill"):
            self._decline(request)
        self._local.pop(number, None)
        self._names.pop(number, None)
        if number in self._loading:
            # vLLM holds the blocks of a request that waits, until the worker reports it.
            self._next.cancelled.append(number)
            self._ending.add(number)
        if not params.get("do_remote_decode") or not self._produces:
            return False, None
        if number in self._held:
            why = "the pages of an earlier request of its id are held"
            # Without the id: by that the worker knows the earlier one's transfer.
            self._next.failed.append(Failed("", _transfer(request), why, held=False))
            return False, None
        prefill = self._prefills.pop(number, None)
        if prefill and prefill.ready and not self._covers(tables, prefill.tokens):
            # It was preempted between two steps: vLLM has its blocks back, and jobs may read them.
            prefill.ready = False
            self._next.preempted.append(number)
            self._unpin_after.append(number)
        transfer = prefill.transfer if prefill else _transfer(request)
        whole = request.status.name in _WHOLE
        if prefill and whole and self._loads_elsewhere and not prefill.ready:
            kept = self._covers(tables, prefill.tokens)  # by none that was preempted
            if kept and not self._takes_back:
                self._next.ready.append(self._ready(number, prefill, tables, prefill.tokens))
        delays = False
        if prefill and whole and not prefill.is_wanted:
            return False, self._answer(transfer)
        if ready := prefill is not None and prefill.ready:
            delays = self._hold(number, tables, prefill.tokens)
        if not ready or not whole:
            why = f"the prefill ended as {request.status.name}"
            if prefill and prefill.resumes:
                why = "more of the prompt may come, which would change the states that are sent"
            elif prefill and prefill.lost:
                why = "pages of a window or a state were taken back when the prefill was preempted"
            elif whole and self._takes_back and self._loads_elsewhere:
                why = (
                    "another connector loads pages within steps, and this model has windows or "
                    "states"
                )
            self._next.failed.append(Failed(number, transfer, why, held=ready))
            return delays, None
        self._next.finished.append((number, transfer))
        return delays, self._answer(transfer)

    def _answer(self, transfer: str) -> dict[str, Any]:
        """What the response of a prefill carries for its decoder."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_engine_id": self._engine,
            "remote_offer": self._offer,
        }

    def _hold(self, number: str, tables: Tables, tokens: int) -> bool:
        """Keeps the blocks of a finished prompt. Returns whether vLLM is to do it, and makes steps
        until it hears that they are free."""
        self._held[number] = _Held(self._ranks, time.monotonic())
        if self.pins.is_bound:
            self.pins.hold(number, tables, tokens)
        return not self.pins.is_bound

    def freed(self, reports: Mapping[str, int]) -> None:
        """So many workers don't read the blocks of these requests any more, and didn't say so
        before (MR-1)."""
        for number, count in reports.items():
            held = self._held.get(number)
            if held is not None:
                held.ranks -= count
            if held is None or held.ranks <= 0:
                self._held.pop(number, None)
                self.pins.unpin(number)

    def over(self, sent: set[str] | None, received: set[str] | None) -> None:
        """All workers have reported the end of transfers."""
        self.freed(dict.fromkeys(sent or (), self._ranks))
        for number in received or ():
            self._ending.discard(number)
            if (transfer := self._loading.pop(number, None)) is not None:
                self._coming.discard(transfer)
                remember(self._loaded, transfer, None)

    @property
    def busy(self) -> bool:
        """Whether workers must be asked on: steps alone bring their reports. A request that loads
        is vLLM's own work, unless vLLM is paused, when it must come to rest. Blocks that stay for
        long are asked about when vLLM wakes for something else, at most once in ``_ASKING``."""
        step, now = self._next, time.monotonic()
        if self._ending or step.ready or step.failed or step.cancelled or step.declined:
            return True
        if not self._held:
            return False
        latest = next(reversed(self._held.values()))
        return now - latest.since < _ASKING or now - self._stepped >= _ASKING

    def _named(self, request: Any) -> _Named:
        name: str = request.request_id
        if name not in self._names:
            self._names[name] = _transfer(request), digest_of(request)
        return self._names[name]


def check(transfer: Any, config: Any) -> None:
    """Refuses instances whose workers divide tokens, or whose prompts it can't name.

    Args:
        transfer: vLLM's ``KVTransferConfig``.
        config: its ``VllmConfig``.

    Raises:
        InvalidArgument: what it is, and what to do.
    """
    for name in ("decode_context", "prefill_context"):
        size = getattr(config.parallel_config, f"{name}_parallel_size")
        if size != 1:
            raise InvalidArgument(
                f"{name}_parallel_size is {size}: tokens are divided among workers, which this "
                "connector doesn't follow; use tensor or pipeline parallelism"
            )
    if transfer.kv_role is None:
        raise InvalidArgument("the connector needs a kv_role: kv_producer, kv_consumer or kv_both")
    media = config.model_config.multimodal_config
    if media and media.mm_processor_cache_gb == 0 and not config.cache_config.enable_prefix_caching:
        # vLLM then numbers images and sounds, and digests of equal prompts differ (RS-1).
        raise InvalidArgument(
            "--mm-processor-cache-gb is 0 and --no-enable-prefix-caching is set, so vLLM doesn't "
            "hash images and sounds, and a decoder can't tell prompts apart; leave out one of them"
        )


def _scheduled(output: Any) -> list[tuple[str, int]]:
    """Requests of a step, and how many tokens of each were computed before it."""
    new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
    old = output.scheduled_cached_reqs
    return new + list(zip(old.req_ids, old.num_computed_tokens, strict=True))


def _shorten(request: Any, tokens: int) -> None:
    """Has vLLM not compute the last tokens of a prompt, as its NIXL connector does. Prompts that
    aren't longer stay, and so do those of requests whose decoders compute all of it."""
    if not 0 < tokens < request.num_prompt_tokens or request.get_skip_reading_prefix_cache():
        return
    if request.prompt_token_ids is not None:
        # The list may be the caller's, or that of other answers to the prompt.
        request.prompt_token_ids = request.prompt_token_ids[:-tokens]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    if getattr(request, "prompt_is_token_ids", None) is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-tokens]
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1


def _transfer(request: Any) -> str:
    """The name that a prefill and its decoder's request share."""
    return str(request.kv_transfer_params.get("transfer_id") or request.request_id)
