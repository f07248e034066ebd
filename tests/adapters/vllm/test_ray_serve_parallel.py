"""Ray Serve LLM with replicas of several tensor parallel ranks."""

from __future__ import annotations

import time

from tests.adapters.vllm import serve_llm, servers
from tests.adapters.vllm.serve_llm import ask_all, expected_of, prompts_of
from tests.adapters.vllm.servers import Spec

pytestmark = servers.needed


def test_ranks_of_a_replica_answer_as_a_plain_server_of_as_many() -> None:
    prompts = prompts_of(10)
    with servers.running(Spec("plain", ("--tensor-parallel-size", "2"))) as (plain,):
        expected = expected_of(plain, prompts)
    with serve_llm.running("--tensor-parallel", "2") as app:
        for _ in range(2):
            assert ask_all(app, prompts) == expected
        # Ray exports metrics once in some seconds.
        deadline, wanted = time.monotonic() + 120, sum(map(len, prompts)) / 2
        while (hits := serve_llm.external_hits()) < wanted:
            assert time.monotonic() < deadline, f"{hits} tokens of {wanted}\n{app.tail()}"
            time.sleep(1)
