"""Weight updates of real servers of a model with experts: every output is that of a plain server of
one version."""

from __future__ import annotations

from tests.adapters.vllm import servers
from tests.adapters.vllm.test_weights import NEW, OLD, sharded_trainers, standing, trainer

pytestmark = servers.needed


def test_rs_1_experts_answer_with_the_version_that_was_pushed() -> None:
    with standing("qwen3_moe") as stand:
        with trainer(stand.server) as sender:
            assert sender.send(NEW) is None
            assert stand.right(NEW) == 30
        with sharded_trainers(stand.server) as trainers:
            for version in (OLD, NEW):
                assert trainers.send(version)["error"] is None
                assert stand.right(version) == 30
