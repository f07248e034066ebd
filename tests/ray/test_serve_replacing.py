"""Serve ends a replica that doesn't answer and starts another; requests go on with that one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from ray import serve

from fabric_ray.serve import LocalApp, ServeArgs, run_local
from tests.processes import within
from tests.ray.test_serve_app import complete, expected, free_port, of_role, prompts

ARGS = ServeArgs.model_validate(
    {
        "torch_threads": 1,
        "prefill": {
            "options": {
                "num_replicas": 1,
                "health_check_period_s": 0.5,
                "health_check_timeout_s": 0.5,
                "graceful_shutdown_timeout_s": 1.0,
            }
        },
        "terms": {"beat": 0.2, "silence": 2.0},
    }
)


@pytest.fixture
def app(cluster: list[str]) -> Iterator[LocalApp]:
    try:
        with run_local(ARGS, port=free_port()) as app:
            yield app
    finally:
        serve.shutdown()


def test_a_prefiller_that_fails_its_health_checks_is_replaced(app: LocalApp) -> None:
    first, second = prompts(2, seed=31)
    assert [complete(app, first, 8)] == expected([first], 8)
    victim = of_role(app, "prefill")[0]["pid"]
    os.kill(victim, signal.SIGSTOP)
    try:
        within(90, "another prefiller", lambda: fresh(app, victim))
        within(60, "its answer", lambda: [complete(app, second, 8)] == expected([second], 8))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def fresh(app: LocalApp, victim: int) -> bool:
    return {replica["pid"] for replica in of_role(app, "prefill")} - {victim} != set()
