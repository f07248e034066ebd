"""Weight updates of real servers of a model with experts: every output is that of a plain server of
one version."""

from __future__ import annotations

import pytest

from tests.adapters.vllm import servers
from tests.adapters.vllm.test_weights import NEW, OLD, sharded_trainers, standing, trainer

pytestmark = servers.needed


@pytest.mark.parametrize("ranks", [1, 2])
def test_rs_1_experts_answer_with_the_version_that_was_pushed(ranks: int) -> None:
    parallel = ("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()
    with standing("qwen3_moe", *parallel) as stand:
        with trainer(stand.server, workers=ranks) as sender:
            assert sender.send(NEW) is None
            assert stand.right(NEW) == 30
        with sharded_trainers(stand.server, workers=ranks) as trainers:
            for version in (OLD, NEW):
                assert trainers.send(version)["error"] is None
                assert stand.right(version) == 30
