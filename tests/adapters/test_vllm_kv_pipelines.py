"""Pipelines as vLLM runs them: steps in flight, and its first runner's order of calls."""

from __future__ import annotations

from contextlib import ExitStack
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
