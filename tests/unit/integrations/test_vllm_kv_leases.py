"""Leases of finished prefills that a decoder renews while their requests wait in its queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace as Fields
from typing import Any

import pytest

from fabric_ray.integrations import vllm_kv_leases
from fabric_ray.integrations.vllm_kv_config import KvConnectorConfig
from fabric_ray.integrations.vllm_kv_fetch import Fetcher
from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_leases import Admissions, Renewals, lease_number
from fabric_ray.integrations.vllm_kv_offer import to_text
from fabric_ray.integrations.vllm_kv_plan import Load, Ready, Step, digest
from fabric_ray.integrations.vllm_kv_scheduler import KvScheduler
from fabric_ray.integrations.vllm_kv_send import Sender
from fabric_ray.kvcache import Decoder, Prefiller
from tests.processes import within
from tests.unit.integrations.test_vllm_kv_send import PROMPT, TERMS, at_once, end

LEASE = 1.0


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(vllm_kv_leases, "time", made)
    return made


def test_leases_of_all_queued_requests_are_renewed_once_in_an_interval(clock: Clock) -> None:
    renewals = Renewals(0.5)
    assert renewals.due() == {}
    for request, offer in (("a", "one"), ("b", "one"), ("c", "two")):
        renewals.add(request, offer, f"t{request}")
    assert renewals.due() == {
        "one": [lease_number("ta"), lease_number("tb")],
        "two": [lease_number("tc")],
    }
    clock.now += 0.4
    assert renewals.due() == {}
    renewals.drop("a")
    renewals.drop("a")
    renewals.drop("c")
    clock.now += 0.1
    assert renewals.due() == {"one": [lease_number("tb")]}


def test_a_prompt_is_starved_when_it_has_lacked_blocks_for_long(clock: Clock) -> None:
    admissions = Admissions(10.0)
    admissions.tried("a")
    clock.now += 9.0
    admissions.tried("a")
    admissions.tried("b")
    assert not admissions.are_starved
    clock.now += 1.1
    assert admissions.are_starved
    admissions.over("a")
    assert not admissions.are_starved, "the other one has waited for a second"


def request(name: str, **params: Any) -> Any:
    return Fields(
        request_id=name,
        prompt_token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        kv_transfer_params=params,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        status=Fields(name="FINISHED_ABORTED"),
        get_skip_reading_prefix_cache=lambda: False,
    )


def wanted(name: str, offer: object = "offer") -> Any:
    return request(name, do_remote_prefill=True, transfer_id=f"t{name}", remote_offer=offer)


OUTPUT = Fields(
    preempted_req_ids=set(),
    scheduled_new_reqs=[],
    scheduled_cached_reqs=Fields(req_ids=[], num_computed_tokens=[]),
    num_scheduled_tokens={},
    kv_connector_block_state=Fields(get_block_ids=None, block_ids={}),
    has_sync_kv_loads=False,
    total_num_scheduled_tokens=0,
    finished_req_ids=set(),
)


def stepped(scheduler: KvScheduler, clock: Clock) -> Step:
    clock.now += 60.0
    return scheduler.step(OUTPUT)


def test_requests_count_as_queued_until_they_have_blocks_or_are_over(clock: Clock) -> None:
    scheduler = KvScheduler(groups=[LayerGroup(4)], engine="")
    for made in (wanted("a"), wanted("b"), request("c"), wanted("d", offer=None)):
        scheduler.queued(made)
    both = {"offer": [lease_number("ta"), lease_number("tb")]}
    assert stepped(scheduler, clock).renewals == both
    scheduler.matched(wanted("a"), 0)  # vLLM has looked at it, and had no blocks
    assert stepped(scheduler, clock).renewals == both
    scheduler.allocated(wanted("a"), [[1, 2]], len(PROMPT))
    assert stepped(scheduler, clock).renewals == {"offer": [lease_number("tb")]}
    scheduler.finished(wanted("b"), [[]])  # its client has left
    assert stepped(scheduler, clock).renewals == {}
    prefiller = KvScheduler(groups=[LayerGroup(4)], engine="", consumes=False)
    prefiller.queued(wanted("a"))
    assert stepped(prefiller, clock).renewals == {}


def test_a_prefiller_whose_prompt_lacks_blocks_for_a_lease_is_starved(clock: Clock) -> None:
    config = KvConnectorConfig(lease=90.0)
    scheduler = KvScheduler(groups=[LayerGroup(4)], engine="", config=config)
    first, second = (request(name, do_remote_decode=True) for name in "ab")
    scheduler.matched(first, 0)
    assert not stepped(scheduler, clock).is_starved
    scheduler.matched(first, 0)
    assert stepped(scheduler, clock).is_starved
    scheduler.allocated(first, [[1, 2]], 0)
    assert not stepped(scheduler, clock).is_starved
    scheduler.matched(second, 0)
    stepped(scheduler, clock)
    assert stepped(scheduler, clock).is_starved
    scheduler.finished(second, [[]])
    assert not stepped(scheduler, clock).is_starved


class Pair:
    """A prefiller that holds the pages of a prompt, and a decoder."""

    def __init__(self, stack: ExitStack, lease: float = LEASE) -> None:
        _, rank, cache = end(stack, "p")
        self.sender = Sender(Prefiller([rank], terms=TERMS), cache, then=at_once, lease=lease)
        stack.callback(self.sender.close)
        self.fetcher = self.decoder(stack, "d")
        self.sender.begin([Ready("r", "t", digest(PROMPT), len(PROMPT), 0, ((4, 5),))])
        self.sender.end()
        self.sender.hold("r", "t")
        self.offer = to_text([self.sender.offer()])

    def decoder(self, stack: ExitStack, name: str) -> Fetcher:
        _, rank, cache = end(stack, name)
        decoder = stack.enter_context(Decoder([rank], terms=TERMS))
        return Fetcher(decoder, cache, ranks=1, block_tokens=4, timeout=20.0)

    def for_a_while(self, leases: float, act: Callable[[], object] = lambda: None) -> None:
        """Steps both ends; the pages are held all the while."""
        until = time.monotonic() + leases * LEASE
        while time.monotonic() < until:
            act()
            assert self.sender.sent() == set()
            time.sleep(0.01)

    def renew(self) -> None:
        self.fetcher.renew({self.offer: [lease_number("t"), lease_number("another")]})

    def is_free_within(self, seconds: float) -> None:
        within(seconds, "the lease's end", lambda: self.sender.sent() == {"r"})


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_pages_stay_for_a_request_that_waits_for_longer_than_the_lease(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.for_a_while(2.5, pair.renew)
    load = Load("x", "t", digest(PROMPT), pair.offer, len(PROMPT), 0, ((0, 1),))
    pair.fetcher.start([load])
    within(10, "the load", lambda: pair.fetcher.received() == {"x"})
    assert not pair.fetcher.invalid()
    pair.is_free_within(10)


def test_pages_are_free_a_lease_after_the_last_renewal(stack: ExitStack) -> None:
    """The decoder's engine core was killed, or its request left the queue: its worker's heartbeats
    go on, and renew nothing."""
    pair = Pair(stack)
    pair.for_a_while(1.5, pair.renew)
    stopped = time.monotonic()
    pair.is_free_within(20)
    assert 0.5 * LEASE < time.monotonic() - stopped < 5 * LEASE


def test_one_of_two_decoders_that_wait_for_the_pages_is_enough(stack: ExitStack) -> None:
    pair = Pair(stack)
    other = pair.decoder(stack, "other")
    pair.for_a_while(0.5, lambda: (pair.renew(), other.renew({pair.offer: [lease_number("t")]})))
    other.close()
    pair.for_a_while(1.5, pair.renew)
    pair.fetcher.close()
    pair.is_free_within(20)


def test_renewals_of_other_leases_and_of_a_starved_prefiller_keep_nothing(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.sender.renews = False
    with pytest.raises(AssertionError):
        pair.for_a_while(20, pair.renew)
    pair.sender.hold("r2", "t2")
    pair.sender.renews = True
    with pytest.raises(AssertionError):
        pair.for_a_while(20, lambda: pair.fetcher.renew({pair.offer: [lease_number("t")]}))


def test_a_renewal_that_cannot_be_sent_harms_nothing(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.fetcher.renew({"invalid": [1], pair.offer: [lease_number("t")]})
    pair.sender.close()
    within(
        10,
        "the loss",
        lambda: not pair.fetcher._are_connected(next(iter(pair.fetcher._prefillers.values()))),
    )
    known = dict(pair.fetcher._prefillers)
    pair.renew()
    assert pair.fetcher._prefillers == known, "a prefiller that was lost is not called again"
    load = Load("x", "t", digest(PROMPT), pair.offer, len(PROMPT), 0, ((0, 1),))
    pair.fetcher.start([load])
    within(10, "the error", lambda: pair.fetcher.received() == {"x"})
    assert pair.fetcher.invalid() == {0, 1}
