"""A prefill worker's end of the KV connector: pushes blocks layer by layer, and holds them until
nothing reads them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fabric_ray.errors import Cancelled, DecodeError, InvalidArgument, NotQuiesced
from fabric_ray.integrations.vllm_kv_content import weights
from fabric_ray.integrations.vllm_kv_layout import WorkerCache
from fabric_ray.integrations.vllm_kv_leases import lease_number
from fabric_ray.integrations.vllm_kv_plan import Claim, Ready, remember
from fabric_ray.kvcache import Job, Prefiller

_LOG = logging.getLogger(__name__)

# Seconds that pages of preempted requests have to leave: the whole batch waits meanwhile.
_LEAVING = 0.5


@dataclass
class _Transfer:
    """One request's blocks, and the decoders that ask for them, perhaps before it is scheduled."""

    ready: Ready | None = None
    weights: str = ""
    """Those that its pages are computed with."""
    computed: bool = False
    """Whether all of its tokens are in the pages."""
    waiting: list[tuple[Job, Claim]] = field(default_factory=list)
    taken: list[Job] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """How many ranks' jobs of each attempt are over."""
    served: bool = False
    """Whether all ranks of a decoder that asked are done, with pages or without."""
    request: str | None = None
    """The transfer of a finished request whose blocks are held."""
    lease: int | None = None
    """The number by which decoders renew its lease."""
    deadline: float = math.inf
    """On the clock of this process, for a decoder to ask."""
    why: str | None = None
    """Why decoders get no more of its pages."""


class Sender:
    """The transfers of one worker. vLLM's worker thread calls; decoders come on another.

    Args:
        prefiller: the worker's end of the protocol.
        cache: what the scheduler's blocks are here.
        then: calls back when the device has done what it was given; in order.
        lease: seconds that blocks are held for decoders that neither ask nor renew it.
        on_release: called when the jobs of held blocks may be over, by any thread.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        cache: WorkerCache,
        *,
        then: Callable[[Callable[[], object]], None],
        lease: float,
        on_release: Callable[[], object] = lambda: None,
    ) -> None:
        self.renews = True
        """Whether decoders may renew leases."""
        self._on_release = on_release
        self._prefiller, self._cache, self._then, self._lease = prefiller, cache, then, lease
        self._lock = threading.Lock()
        self._transfers: dict[str, _Transfer] = {}
        self._keys: dict[str, str] = {}
        # Ended ones, so that late decoders get an error at once, and those that decoders left, so
        # that nothing is held for them.
        self._over: OrderedDict[str, str] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()
        self._pass: list[Ready] = []
        self._layers_left: deque[str] = deque()
        self._written: set[str] = set()
        prefiller.on_renewal(self._renewed)
        self._clerk = threading.Thread(target=self._listen, name="fabric-kv-sender", daemon=True)
        self._clerk.start()

    def offer(self) -> bytes:
        """What this worker adds to its instance's offer."""
        return self._prefiller.offer()

    def begin(self, ready: Sequence[Ready]) -> None:
        """A pass through all layers begins that completes these requests' pages. Those that are
        complete are sent at once: no pass need follow. What is queued for the device looks them up
        again: they may be over, and their blocks another's, when it gets there (MR-1)."""
        for each in ready:
            self._prepare(each)
        whole = [each for each in ready if each.computed >= each.tokens]
        if whole:
            self._then(lambda: self._computed(whole))
        passing = self._pass = [each for each in ready if each.computed < each.tokens]
        if not passing:
            return
        self._layers_left, self._written = deque(self._cache.layers), set()
        self._then(lambda: self._begin(passing))

    def layer(self, name: str) -> None:
        """A layer's pages of the pass are written, or will be when the device has come so far."""
        if not self._pass:
            return
        self._written.add(name)
        # Decoders are told of layers by their number: of the next one, when all before are written
        # (RS-1).
        left, silent = self._layers_left, self._cache.silent
        while left and (left[0] in self._written or (left[0] in silent and name in left)):
            left.popleft()
            self._then(self._prefiller.layer_done)

    def end(self, *, broken: bool = False) -> None:
        """The pass is through, with the layers that weren't named (graphs replay without hooks).

        ``broken``: it was left by an exception, and what is in the pages is unknown.
        """
        done, self._pass = self._pass, []
        if not done:
            return
        if broken:
            for ready in done:
                with self._lock:
                    key = self._key(ready.request, ready.transfer)
                self._fail(key, "the prefiller's model failed")
        for _ in range(len(self._layers_left)):
            self._then(self._prefiller.layer_done)
        self._layers_left = deque()
        self._then(lambda: self._computed(done))

    def preempted(self, requests: Sequence[str]) -> None:
        """Returns when nothing reads the blocks of requests that lose them (MR-1). Pages that are
        on their way have a moment; then their decoders are told that they don't come.

        Raises:
            NotQuiesced: that could not be shown within a lease; the blocks must not be used.
        """
        end = time.monotonic() + self._lease
        through = threading.Event()
        self._then(through.set)
        if not through.wait(self._lease):
            raise NotQuiesced(
                f"the device did not get to preempted requests {', '.join(requests)} within "
                f"{self._lease} s; end this worker"
            )
        with self._lock:
            lost = [t for t in self._transfers.values() if t.ready and t.ready.request in requests]
            for transfer in lost:
                transfer.ready, transfer.computed = None, False
            taken = [job for transfer in lost for job in transfer.taken]
        leaving = time.monotonic() + min(_LEAVING, self._lease)
        late = [job for job in taken if not _free_by(leaving, job)]
        for job in late:
            job.fail("the prefiller needs the pages for another request")
        if stuck := sum(not _free_by(end, job) for job in late):
            raise NotQuiesced(
                f"{stuck} transfers of preempted requests {', '.join(requests)} may still read "
                f"their blocks after {self._lease} s; end this worker"
            )

    def hold(self, request: str, transfer: str) -> None:
        """A request is over and its blocks stay, for decoders that ask within the lease."""
        with self._lock:
            key = self._key(request, transfer)
            held = self._kept(key)
            held.request, held.lease = request, lease_number(key)
            held.deadline = time.monotonic() + self._lease

    def give_up(self, request: str, transfer: str, why: str, *, held: bool) -> None:
        """A request is over without its pages; decoders are told why. Unless its blocks are
        ``held``, vLLM has taken them back: no job has read them."""
        with self._lock:
            key = self._key(request, transfer)
            if held:  # before its jobs fail: the last job drops transfers without holders
                self._kept(key).request = request
        self._fail(key, why)
        if not held:
            with self._lock:
                self._forget(key, request, why)

    def sent(self) -> set[str]:
        """Requests whose held blocks nothing reads any more (MR-1), since the last call."""
        now = time.monotonic()
        over = set()
        late: list[Job] = []
        with self._lock:
            for key, held in list(self._transfers.items()):
                if held.request is None or any(not job.is_released for job in held.taken):
                    continue
                # A decoder that is between asking and getting its pages counts as not served.
                if held.why is None and (held.waiting or not held.served):
                    if now < held.deadline:
                        continue
                    held.why = (
                        f"its decoder neither asked for the pages within {self._lease} s nor said "
                        "that the request is in its queue"
                    )
                    late += [job for job, _ in held.waiting]
                    _LOG.warning("request %s: %s", held.request, held.why)
                over.add(held.request)
                self._forget(key, held.request, held.why or "its pages were handed over before")
        for job in late:
            job.fail("the prefiller has given its pages up")
        return over

    def close(self) -> None:
        """Stops all jobs and says so to the decoders."""
        self._prefiller.close()
        self._clerk.join(5.0)

    def _listen(self) -> None:
        async def listen() -> None:
            async for job in self._prefiller.jobs():
                try:
                    self._asked(job, Claim.decoded(job.payload))
                except DecodeError as error:
                    job.fail(str(error))

        asyncio.run(listen())

    def _asked(self, job: Job, claim: Claim) -> None:
        with self._lock:
            why = self._over.get(claim.transfer)
            if why is None:
                transfer = self._kept(claim.transfer)
                why = transfer.why
            if why is None and claim.digest:
                transfer.waiting.append((job, claim))
        if why is not None:
            job.fail(f"transfer {claim.transfer}: {why}")
            return
        job.on_release(lambda: self._released(transfer, job, claim))
        if not claim.digest:
            job.fail("the decoder needs no pages")
            return
        if transfer.computed:
            self._take(transfer)

    def _renewed(self, leases: Sequence[int]) -> None:
        """Decoders have requests in their queues for these."""
        if not self.renews:
            return
        deadline, renewed = time.monotonic() + self._lease, set(leases)
        with self._lock:
            for transfer in self._transfers.values():
                if transfer.lease in renewed:
                    transfer.deadline = deadline

    def _released(self, transfer: _Transfer, job: Job, claim: Claim) -> None:
        with self._lock:
            transfer.waiting = [pair for pair in transfer.waiting if pair[0] is not job]
            transfer.ended[claim.attempt] = transfer.ended.get(claim.attempt, 0) + 1
            transfer.served |= transfer.ended[claim.attempt] >= claim.ranks
            unknown = transfer.ready is None and transfer.request is None
            left = self._transfers.get(claim.transfer) is not transfer  # for one of the same name
            if unknown and not left and not transfer.waiting and not transfer.taken:
                del self._transfers[claim.transfer]
                if transfer.served:
                    remember(self._left, claim.transfer, None)
        self._on_release()

    def _begin(self, ready: Sequence[Ready]) -> None:
        passing = []
        try:
            for each in ready:
                with self._lock:
                    transfer = self._current(each)
                if transfer is not None:
                    passing += [(job, each.tokens) for job in self._take(transfer)]
            self._prefiller.begin(passing)
        except Exception as error:
            # Its layers are counted but not sent: no job waits for them.
            for each in ready:
                with self._lock:
                    key = self._keys.get(each.request) if self._current(each) else None
                if key is not None:
                    self._fail(key, f"the prefiller could not begin to send: {error}")
            raise

    def _prepare(self, ready: Ready) -> None:
        with self._lock:
            key = self._key(ready.request, ready.transfer)
            self._over.pop(key, None)
            transfer = self._kept(key)
            transfer.ready, transfer.computed = ready, False
            transfer.weights = weights()

    def _current(self, ready: Ready) -> _Transfer | None:
        """The transfer of a request, unless it is over or its blocks were taken from it."""
        transfer = self._transfers.get(self._keys.get(ready.request, ""))
        return transfer if transfer is not None and transfer.ready is ready else None

    def _computed(self, done: Sequence[Ready]) -> None:
        for each in done:
            with self._lock:
                transfer = self._current(each)
                if transfer is None:
                    continue
                transfer.computed = True
            self._take(transfer)

    def _take(self, transfer: _Transfer) -> list[Job]:
        """Accepts the jobs that wait for a transfer; what is in the pages is sent at once."""
        with self._lock:
            ready = transfer.ready
            if ready is None or transfer.why is not None:
                return []
            waiting, transfer.waiting = transfer.waiting, []
            computed = ready.tokens if transfer.computed else ready.computed
            made_with = transfer.weights
            transfer.taken += [job for job, _ in waiting]
        taken = []
        for job, claim in waiting:
            try:
                self._check(job, claim, ready, made_with)
                tables = self._cache.tables(ready.tables, job.tokens)
                job.accept(tables, computed=min(computed, job.tokens))
                job.finish()
            except InvalidArgument as error:
                job.fail(str(error))
            except Cancelled:
                continue  # Its decoder gave it up; it is released like any other.
            else:
                taken.append(job)
        return taken

    def _check(self, job: Job, claim: Claim, ready: Ready, made_with: str) -> None:
        # A state is of one moment. Decoders with windows compute the last token without having
        # loaded it, those with several draft modules some more. Of a window no other pages are
        # kept.
        groups, least = self._cache.layouts[0].groups, 1
        if any(group.is_state for group in groups):
            least = ready.tokens
        elif any(group.window is not None for group in groups):
            least = ready.tokens - 1
        if claim.digest != ready.digest or not least <= job.tokens <= ready.tokens:
            raise InvalidArgument(
                f"transfer {ready.transfer} is of another prompt of {ready.tokens} tokens; give "
                "each request a transfer_id of its own"
            )
        if made_with != weights():
            raise InvalidArgument(
                f"the pages of transfer {ready.transfer} are of the weights before the prefiller's "
                "update; send the prompt to it again"
            )
        if claim.weights != made_with:
            raise InvalidArgument(
                f"the prefiller computes with weights {weights() or 'as loaded'}, the decoder with "
                f"{claim.weights or 'as loaded'}; update both before requests go on"
            )

    def _fail(self, key: str, why: str) -> None:
        with self._lock:
            transfer = self._kept(key)
            transfer.why = why
            jobs = [job for job, _ in transfer.waiting] + transfer.taken
        for job in jobs:
            job.fail(why)

    def _key(self, request: str, transfer: str) -> str:
        """Where a request's transfer is kept. A second request of the same name doesn't get the
        first one's decoders."""
        if request not in self._keys:
            taken = transfer in self._keys.values()
            if taken:
                _LOG.error("request %s: transfer_id %s is another's", request, transfer)
            self._keys[request] = f"{transfer} of {request}" if taken else transfer
        return self._keys[request]

    def _forget(self, key: str, request: str, why: str) -> None:
        # A thread that still holds it takes nothing of it.
        if transfer := self._transfers.pop(key, None):
            transfer.why = transfer.why or why
        self._keys.pop(request, None)
        remember(self._over, key, why)

    def _kept(self, key: str) -> _Transfer:
        """The transfer of that name. One whose decoder has asked and gone again before it was
        scheduled counts as served."""
        if key not in self._transfers:
            served = key in self._left
            self._left.pop(key, None)
            self._transfers[key] = _Transfer(served=served)
        return self._transfers[key]


def _free_by(deadline: float, job: Job) -> bool:
    """Whether nothing reads a job's pages, by a moment of the monotonic clock."""
    try:
        job.wait_released(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return False
    return True
