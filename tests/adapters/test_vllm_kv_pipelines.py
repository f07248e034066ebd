"""Pipelines as vLLM runs them: steps in flight, and its first runner's order of calls."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.vllm_kv import FabricRayConnector
from tests.adapters.test_vllm_kv_models import BLOCKS, FREE, LAYERS
from tests.adapters.vllm_kv_configs import config
from tests.adapters.vllm_kv_instances import Instance
from tests.adapters.vllm_kv_play import PROMPT, instances, prefill, pump, released, served


class FirstRunner(Instance):
    """vLLM's first model runner with drafts: their stage saves when they are computed, and the
    stages before it don't."""

    def step(self) -> None:
        output = self.scheduler.schedule()
        numbers = list(output.num_scheduled_tokens)
        reports = []
        with ExitStack() as stack:
            stack.enter_context(set_forward_context(None, self.vllm))
            for worker in self.workers:
                kv_transfer_state._KV_CONNECTOR_AGENT = worker.kv_connector
                worker.kv_connector.handle_preemptions(output.kv_connector_metadata)
                reports.append(
                    stack.enter_context(
                        KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                            output, defer_finalize=bool(numbers)
                        )
                    )
                )
            if numbers:
                self._forward(output)
        for worker in self.workers[-self.tp :] if numbers else ():
            kv_transfer_state._KV_CONNECTOR_AGENT = worker.kv_connector
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        result = []
        for report in reports:
            made = ModelRunnerOutput(numbers, {n: i for i, n in enumerate(numbers)})
            made.sampled_token_ids = [self._sampled(n) for n in numbers]
            made.kv_connector_output = report
            result.append(made)
        self.update(output, result)


def test_stages_before_that_of_the_drafts_send_what_asks_for_pages_after_the_pass() -> None:
    p = FirstRunner(config("kv_producer", pp=2), layers=LAYERS["drafts"], blocks=BLOCKS)
    d = Instance(config("kv_consumer"), layers=LAYERS["drafts"], blocks=BLOCKS)
    with instances(p, d):
        d.add("d", PROMPT, prefill(p))
        served(d, "d", PROMPT, p)
        released(p, d, free=FREE)


def test_an_executor_that_reports_of_the_last_stage_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = config("kv_consumer")
    d = Instance(vllm)
    with instances(d):
        vllm.parallel_config.distributed_executor_backend = "ray"
        monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False, raising=False)
        caches = d.scheduler.kv_cache_config
        FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, caches)
        vllm.parallel_config.pipeline_parallel_size = 2
        with pytest.raises(InvalidArgument, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"):
            FabricRayConnector(vllm, KVConnectorRole.SCHEDULER, caches)


@dataclass
class _Batch:
    """A step in flight."""

    output: Any
    tables: dict[str, list[list[int]]]
    requests: dict[str, Any]
    sampled: dict[str, list[int]]
    results: list[ModelRunnerOutput] = field(default_factory=list)


class InFlight(Instance):
    """A pipeline with as many steps in flight as stages: a stage computes a step when the stages
    before it have computed the next ones, and the scheduler has made them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[_Batch] = []
        self.now: tuple[int, _Batch] | None = None
        """The stage that computes, and the step."""

    def step(self) -> None:
        output = self.scheduler.schedule()
        numbers = list(output.num_scheduled_tokens)
        requests = {number: self.scheduler.requests[number] for number in numbers}
        self.batches.append(
            _Batch(
                output,
                {number: Instance.tables(self, number) for number in numbers},
                requests,
                {number: self._sampled(number) for number in numbers},
            )
        )
        for stage, batch in enumerate(reversed(self.batches)):
            self._compute(stage, batch)
        if len(self.batches) == self.pp:
            done = self.batches.pop(0)
            self.update(done.output, done.results)

    def _compute(self, stage: int, batch: _Batch) -> None:
        numbers = list(batch.output.num_scheduled_tokens)
        workers = self.workers[stage * self.tp : (stage + 1) * self.tp]
        for worker in workers:
            worker.pre_forward(batch.output)
        if numbers:
            self.now, scheduler = (stage, batch), self.scheduler
            self.scheduler = SimpleNamespace(requests=batch.requests)
            computed = dict(self.computed)
            self._forward(batch.output)
            self.now, self.scheduler = None, scheduler
            if stage:  # the first one has counted them
                self.computed = computed
        for worker in workers:
            worker.finish_forward()
            made = ModelRunnerOutput(numbers, {n: i for i, n in enumerate(numbers)})
            made.sampled_token_ids = [batch.sampled[n] for n in numbers]
            made.kv_connector_output = worker.post_forward(batch.output.finished_req_ids)
            batch.results.append(made)

    def _ranks(self, layer: int) -> range:
        ranks = super()._ranks(layer)
        now = getattr(self, "now", None)
        return ranks if now is None or ranks.start // self.tp == now[0] else range(0)

    def tables(self, number: str) -> list[list[int]]:
        return super().tables(number) if self.now is None else self.now[1].tables[number]


@pytest.mark.parametrize("kind", ["full", "windows", "states"])
@pytest.mark.parametrize("seed", range(2))
def test_pages_are_right_while_the_steps_of_a_pipeline_are_in_flight(kind: str, seed: int) -> None:
    source = random.Random(seed)
    ways = {"chunk": 16, "seqs": 6, **({"states": "align"} if kind == "states" else {})}
    ours = config("kv_producer", pp=2, lease=4.0, **ways)
    theirs = config("kv_consumer", pp=3, policy="recompute", **ways)
    p, d = (InFlight(each, layers=LAYERS[kind], blocks=26) for each in (ours, theirs))
    shared = [source.randrange(900) for _ in range(20)]
    with instances(p, d):
        early = prefill(p, "warm", PROMPT[:5], transfer_id="warm")
        names = [f"r{i}" for i in range(14)]
        for i, name in enumerate(names):
            prompt = shared[: source.choice([0, 8, 20])]
            prompt = prompt + [source.randrange(900) for _ in range(source.randrange(1, 40))]
            asks = {"do_remote_decode": True, "transfer_id": name}
            p.add(name, prompt, asks, source.choice([1, 1, 12]))
            d.add(name, prompt, {**early, "transfer_id": name}, source.choice([1, 9, 14]))
            for _ in range(source.randrange(6)):
                for each in (p, d):
                    if each.scheduler.has_requests():
                        each.step()
            if source.random() < 0.2:
                source.choice([p, d]).abort(source.choice(names[: i + 1]))
        pump("all ends", lambda: not d.scheduler.requests and not p.scheduler.requests, p, d)
        assert d.misread == []
        assert p.misread == []
        assert sum(tokens == 1 for tokens in d.computed.values()) > 5
        released(p, d, free=25)


@pytest.mark.parametrize("stage", [0, 1])
def test_mr_1_blocks_are_held_until_every_stage_has_done_with_them(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = Instance(config("kv_producer", pp=2), blocks=BLOCKS)
    d = Instance(config("kv_consumer"), blocks=BLOCKS)
    with instances(p, d):
        with monkeypatch.context() as late:
            late.setattr(p.workers[stage].kv_connector._sender, "sent", set)
            d.add("d", PROMPT, prefill(p))
            served(d, "d", PROMPT, p)
            released(d, free=FREE)
            for _ in range(20):
                p.step()
            assert p.free() < FREE
        released(p, free=FREE)
