"""RS-1: tokens that a step will compute do not count as computed before it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace as Fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_ray.integrations.vllm_kv_groups import LayerGroup
from fabric_ray.integrations.vllm_kv_plan import Ready, digest_of
from fabric_ray.integrations.vllm_kv_scheduler import KvScheduler
from tests.unit.integrations.test_vllm_kv_groups import Pool

BLOCK = 4
GROUPS = [LayerGroup(BLOCK)]


def request(name: str, tokens: int) -> Any:
    return Fields(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": name},
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        status=Fields(name="FINISHED_LENGTH_CAPPED"),
    )


@dataclass
class Steps:
    """Steps of vLLM's scheduler, as its ``SchedulerOutput`` tells a connector of them."""

    scheduler: KvScheduler = field(default_factory=lambda: KvScheduler(groups=GROUPS, engine=""))
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    requests: dict[str, Any] = field(default_factory=dict)

    def admit(self, name: str, tokens: int, *tables: list[int]) -> None:
        """A request is new, or resumed after a preemption."""
        if (made := self.requests.get(name)) is None:
            made = self.requests[name] = request(name, tokens)
            self.scheduler.queued(made)
        self.tables[name] = tables
        self.scheduler.allocated(made, tables, 0)

    def step(
        self, scheduled: dict[str, tuple[int, int]], *, loads: bool = False, preempted: str = ""
    ) -> dict[str, Ready]:
        """One step. ``scheduled``: tokens computed before it, and tokens of it, by request."""
        state = Fields(get_block_ids=lambda name: self.tables[name])
        output = Fields(
            preempted_req_ids={preempted} - {""},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=Fields(
                req_ids=list(scheduled), num_computed_tokens=[c for c, _ in scheduled.values()]
            ),
            num_scheduled_tokens={name: count for name, (_, count) in scheduled.items()},
            kv_connector_block_state=state,
            has_sync_kv_loads=loads,
            total_num_scheduled_tokens=sum(count for _, count in scheduled.values()),
        )
        return {ready.request: ready for ready in self.scheduler.step(output).ready}


@pytest.mark.parametrize("first", ["a", "b"])
def test_rs_1_hits_on_blocks_of_the_same_step_are_not_computed(first: str) -> None:
    steps = Steps()
    steps.admit("a", 10, [1, 2, 3])
    steps.admit("b", 9, [1, 2, 4])
    scheduled = {"a": (0, 10), "b": (8, 1)}
    order = [first, *(scheduled.keys() - {first})]
    ready = steps.step({name: scheduled[name] for name in order})
    assert {name: each.computed for name, each in ready.items()} == {"a": 0, "b": 0}


def test_rs_1_hits_on_blocks_of_an_earlier_step_are_computed() -> None:
    steps = Steps()
    steps.admit("a", 10, [1, 2, 3])
    steps.step({"a": (0, 8)})
    steps.admit("b", 9, [1, 2, 4])
    ready = steps.step({"a": (8, 2), "b": (8, 1)})
    assert {name: each.computed for name, each in ready.items()} == {"a": 8, "b": 8}


def test_rs_1_hits_of_a_resumed_request_are_not_computed() -> None:
    steps = Steps()
    steps.admit("b", 9, [5, 6, 7])
    assert steps.step({"b": (0, 9)})["b"].computed == 0
    steps.step({}, preempted="b")
    steps.admit("a", 10, [1, 2, 3])
    steps.admit("b", 9, [1, 2, 4])
    assert steps.step({"a": (4, 6), "b": (8, 1)})["b"].computed == 4


def test_rs_1_a_request_beside_loads_of_another_connector_is_ready_when_it_is_over() -> None:
    steps = Steps()
    steps.admit("a", 10, [1, 2, 3])
    assert steps.step({"a": (8, 2)}, loads=True) == {}
    assert steps.step({"a": (10, 1)}) == {}
    assert steps.scheduler.finished(steps.requests["a"], [[1, 2, 3, 4]])[0]
    assert steps.scheduler.busy
    digest = digest_of(steps.requests["a"])
    assert steps.step({})["a"] == Ready("a", "a", digest, 10, 10, ((1, 2, 3),))


WINDOWED = [LayerGroup(BLOCK), LayerGroup(BLOCK, window=6)]


def windowed(*, ranks: int = 1) -> tuple[Steps, Pool]:
    """A scheduler of a model with two cache groups, and vLLM's blocks."""
    scheduler, pool = KvScheduler(groups=WINDOWED, engine="", ranks=ranks), Pool(40)
    scheduler.pins.bind(pool)
    return Steps(scheduler), pool


def test_rs_1_hits_count_up_to_the_first_block_that_any_group_lacks() -> None:
    steps, _ = windowed()
    steps.admit("a", 14, [1, 2, 3, 4], [11, 12, 13, 14])
    steps.admit("b", 13, [1, 2, 3, 5], [0, 12, 13, 15])
    ready = steps.step({"a": (4, 10), "b": (12, 1)})
    assert {name: each.computed for name, each in ready.items()} == {"a": 4, "b": 4}
    assert ready["b"].tables == ((1, 2, 3, 5), (0, 12, 13, 15))


def test_mr_1_blocks_of_a_prompt_are_kept_until_all_workers_say_that_they_are_sent() -> None:
    steps, pool = windowed(ranks=2)
    steps.admit("a", 14, [1, 2, 3, 4], [11, 12, 13, 14])
    steps.step({"a": (0, 14)})
    # The last token is number 13, and sees 8 to 13.
    assert pool.used() == [13, 14]
    tables = [[1, 2, 3, 4, 5], [0, 0, 0, 14, 15]]
    delays, params = steps.scheduler.finished(steps.requests["a"], tables)
    assert not delays
    assert params
    for reports in ({}, {"a": 1}, {"b": 2}):
        steps.step({})
        steps.scheduler.freed(reports)
        assert pool.used() == [1, 2, 3, 4, 13, 14]
    steps.scheduler.freed({"a": 1})
    assert pool.used() == []
    assert not steps.scheduler.busy


def test_mr_1_a_request_with_the_id_of_one_whose_blocks_are_held_is_not_sent() -> None:
    steps, pool = windowed()
    others = [5, 6, 7, 8], [15, 16, 17, 18]
    for tables in ([1, 2, 3, 4], [11, 12, 13, 14]), others:
        steps.admit("a", 14, *tables)
        assert bool(steps.step({"a": (0, 14)})) == (1 in tables[0])
        params = steps.scheduler.finished(steps.requests.pop("a"), tables)[1]
        assert bool(params) == (1 in tables[0])
    assert pool.used() == [1, 2, 3, 4, 11, 12, 13, 14]
    steps.scheduler.freed({"a": 1})
    assert pool.used() == []
    # The id is free again.
    steps.admit("a", 14, *others)
    assert steps.step({"a": (0, 14)})


def test_blocks_that_stay_ask_for_steps_for_a_second_and_when_vllm_wakes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, pool = windowed()
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def made() -> int:
        """The steps that vLLM makes now that it is awake, up to 10."""
        count = 0
        while count < 10 and steps.scheduler.busy:
            steps.step({})
            count += 1
        return count

    steps.admit("a", 14, [1, 2, 3, 4], [11, 12, 13, 14])
    steps.step({"a": (0, 14)})
    steps.scheduler.finished(steps.requests["a"], [[1, 2, 3, 4], [0, 0, 0, 14]])
    assert made() == 10
    for now in (101.0, 102.0, 102.5, 160.0):
        assert made() == (now != 102.5)
    steps.admit("b", 14, [5, 6, 7, 8], [15, 16, 17, 18])
    steps.step({"b": (0, 14)})
    steps.scheduler.finished(steps.requests["b"], [[5, 6, 7, 8], [0, 0, 0, 18]])
    assert made() == 10
    steps.scheduler.freed({"b": 1})
    assert made() == 0
    assert pool.used() == [1, 2, 3, 4, 13, 14]
    steps.scheduler.freed({"a": 1})
    now = 170.0
    assert made() == 0


def test_mr_1_blocks_of_a_window_are_kept_until_workers_hear_of_a_preemption() -> None:
    steps, pool = windowed()
    steps.admit("a", 14, [1, 2, 3, 4], [11, 12, 13, 14])
    steps.step({"a": (0, 14)})
    assert not steps.scheduler.finished(steps.requests["a"], [[], []])[0]
    assert pool.used() == [13, 14]
    steps.step({})
    assert pool.used() == []
    steps.admit("b", 14, [1, 2, 3, 4], [11, 12, 13, 14])
    steps.step({"b": (0, 14)})
    steps.step({}, preempted="b")
    assert pool.used() == []


def test_rs_1_a_window_that_was_taken_back_is_not_sent() -> None:
    steps, pool = windowed()
    steps.admit("a", 14, [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 15, 16])
    assert steps.step({"a": (20, 2)}) == {}
    assert pool.used() == []
    tables = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 15, 16]]
    assert steps.scheduler.finished(steps.requests["a"], tables) == (False, None)


def test_rs_1_windows_beside_loads_of_another_connector_are_not_sent() -> None:
    steps, pool = windowed()
    steps.admit("a", 14, [1, 2, 3, 4], [11, 12, 13, 14])
    assert steps.step({"a": (0, 14)}, loads=True) == {}
    tables = [[1, 2, 3, 4], [0, 0, 0, 14]]
    assert steps.scheduler.finished(steps.requests["a"], tables) == (False, None)
    assert steps.step({}) == {}
    assert pool.used() == []


def wanted(*, prompt_logits: bool = False) -> Any:
    """A request for a prefiller's pages."""
    made = request("a", 10)
    made.kv_transfer_params = {"do_remote_prefill": True, "transfer_id": "a", "remote_offer": ""}
    made.get_skip_reading_prefix_cache = lambda: prompt_logits
    return made


def test_an_instance_takes_and_holds_pages_by_its_role_only() -> None:
    takes, gives = wanted(), request("b", 9)
    prefiller = KvScheduler(groups=GROUPS, engine="", consumes=False)
    assert prefiller.matched(takes, 0) == (0, False)
    decoder = KvScheduler(groups=GROUPS, engine="", produces=False)
    assert decoder.matched(takes, 0) == (10, True)
    decoder.allocated(gives, [[1, 2, 3]], 0)
    assert decoder.finished(gives, [[1, 2, 3]]) == (False, None)
    assert not decoder.busy


def test_rs_1_a_request_for_the_logits_of_its_prompt_computes_it() -> None:
    scheduler = KvScheduler(groups=GROUPS, engine="")
    assert scheduler.matched(wanted(prompt_logits=True), 0) == (0, False)


def test_a_load_keeps_no_paused_engine_from_coming_to_rest() -> None:
    """vLLM makes steps for a request that waits for pages, unless it is paused. One that it has
    cancelled is the connector's alone."""
    steps, made = Steps(), wanted()
    scheduler = steps.scheduler
    scheduler.matched(made, 0)
    scheduler.allocated(made, [[1, 2, 3]], 10)
    assert not scheduler.busy
    scheduler.finished(made, [[1, 2, 3]])
    steps.step({})
    assert scheduler.busy
    scheduler.over(None, {"a"})
    assert not scheduler.busy


def test_several_answers_to_one_prompt_load_its_pages_once() -> None:
    """With n above 1, vLLM makes requests of their own names with one ``transfer_id``."""
    scheduler = KvScheduler(groups=GROUPS, engine="")
    first, second = wanted(), wanted()
    first.request_id, second.request_id = "0_a", "1_a"
    assert scheduler.matched(first, 0) == (10, True)
    scheduler.allocated(first, [[1, 2, 3]], 10)
    assert scheduler.matched(second, 0) == (None, False)  # It is asked about again.
    scheduler.over(None, {"0_a"})
    assert scheduler.matched(second, 8) == (0, False)
    scheduler.allocated(second, [[1, 2, 4]], 0)
    assert not scheduler.matched(second, 0)[0]
    assert [load.request for load in scheduler._next.loads] == ["0_a"]


def test_pages_that_another_connector_brought_are_not_asked_for_after_a_preemption() -> None:
    scheduler = KvScheduler(groups=GROUPS, engine="")
    request = wanted()
    assert scheduler.matched(request, 0) == (10, True)
    scheduler.allocated(request, [[1, 2, 3]], 0)
    assert scheduler.matched(request, 0) == (0, False)


REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5)


@given(
    drawn=REQUESTS,
    budgets=st.lists(st.integers(1, 16), min_size=1, max_size=40),
    preempt=st.sets(st.integers(0, 39), max_size=4),
)
def test_rs_1_pages_that_are_called_computed_were_written_before_the_step(
    drawn: list[tuple[int, int]], budgets: list[int], preempt: set[int]
) -> None:
    """A scheduler that caches blocks when it allocates them, as vLLM's does, against memory that
    is written when a step runs: whatever it draws, no block is sent before its tokens are there."""
    steps = Steps()
    prompts = [shared * BLOCK + rest for shared, rest in drawn]
    cached: list[int] = []  # Blocks of the prefix that all share, from their allocation on.
    written: dict[int, int] = {}  # How many tokens of a block are in memory.
    number = iter(range(1, 10_000))
    computed: dict[int, int] = {}
    waiting = list(range(len(drawn)))
    done: set[int] = set()
    for at, budget in enumerate(budgets):
        gone = ""
        if at in preempt and computed:
            last = max(computed)
            computed.pop(last)
            waiting.insert(0, last)
            done.discard(last)
            gone = f"r{last}"
        scheduled: dict[str, tuple[int, int]] = {}
        for i in [*computed, *waiting]:
            if i not in computed:
                if gone or budget == 0:
                    continue
                shared = drawn[i][0]
                hits = cached[: min(shared, (prompts[i] - 1) // BLOCK)]
                table = [*hits, *(next(number) for _ in range(prompts[i] // BLOCK + 4))]
                steps.admit(f"r{i}", prompts[i], table)
                computed[i] = len(hits) * BLOCK
            # Beyond their prompts requests generate, a token in a step.
            count = min(budget, max(1, prompts[i] - computed[i]))
            if count == 0:
                continue
            budget -= count
            scheduled[f"r{i}"] = (computed[i], count)
            whole = min((computed[i] + count) // BLOCK, drawn[i][0])
            cached.extend(steps.tables[f"r{i}"][0][len(cached) : whole])
        waiting = [i for i in waiting if i not in computed]
        ready = steps.step(scheduled, preempted=gone)
        for name, each in ready.items():
            i = int(name[1:])
            assert i not in done
            done.add(i)
            for place in range(each.computed):
                block, inside = divmod(place, BLOCK)
                assert written.get(each.tables[0][block], 0) > inside, (name, place)
        for name, (before, count) in scheduled.items():
            for place in range(before, before + count):
                block, inside = divmod(place, BLOCK)
                if block < len(steps.tables[name][0]):
                    held = steps.tables[name][0][block]
                    written[held] = max(written.get(held, 0), inside + 1)
            computed[int(name[1:])] += count
        for name, each in ready.items():
            for place in range(each.tokens):
                block, inside = divmod(place, BLOCK)
                assert written.get(each.tables[0][block], 0) > inside, (name, place)
        for i, have in computed.items():
            assert (i in done) == (have >= prompts[i])
