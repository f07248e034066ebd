"""An update pauses and resumes each of several servers by its own state."""

from __future__ import annotations

import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations.vllm_control import ServerGroup, UpdatePause, control_of


class Actor:
    """An ``AsyncLLM`` in a Ray actor; a method that is ``stuck`` is never answered."""

    def __init__(self, *, paused: bool = False, resets: bool = True, stuck: str = "") -> None:
        self._stuck, self._resets, self._paused = stuck, resets, paused
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if name in ("pause_generation", "resume_generation"):
                self._paused = name == "pause_generation"
            answers = {"is_paused": self._paused, "reset_prefix_cache": self._resets}
            return threading.Event() if name == self._stuck else answers.get(name)

        return SimpleNamespace(remote=remote)

    @property
    def is_running(self) -> bool:
        return not self._paused


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Any) -> Any:
        return answer.wait(30.0) if isinstance(answer, threading.Event) else answer

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))


def group_of(*actors: Actor, timeout: float = 7.0) -> ServerGroup:
    return control_of(SimpleNamespace(handles=list(actors)), timeout)


@pytest.mark.usefixtures("ray")
def test_rs_4_a_server_actor_that_does_not_answer_is_named() -> None:
    group = group_of(Actor(), Actor(stuck="pause_generation"), timeout=0.5)
    said = r"server 1 did not answer pause_generation within 0.5 s"
    with pytest.raises(WeightSyncError, match=f"^{said}"):
        group.call("pause_generation", "keep")


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("ends", ["well", "refused"])
def test_of_several_servers_those_that_ran_are_resumed_and_no_other(
    ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    paused, running = Actor(paused=True), Actor(resets=ends == "well")
    pause = UpdatePause(group_of(paused, running), "keep", 0.3)
    if ends == "well":
        pause.begin()
        assert not running.is_running
        pause.end()
        assert re.search(r"server 0 was paused before .* stays paused", caplog.text)
    else:
        with pytest.raises(WeightSyncError, match="success=false"):
            pause.begin()
        pause.cancel()
    assert running.is_running
    assert not paused.is_running
    assert "resume_generation" not in paused.calls, "not even in between"


@pytest.mark.usefixtures("ray")
def test_rs_3_of_several_servers_only_those_with_one_version_run() -> None:
    """A server that a failed update left paused is resumed by the next that succeeds."""
    mixed, running = Actor(), Actor(resets=False)
    group = group_of(mixed, running)
    with pytest.raises(WeightSyncError, match="success=false"):
        UpdatePause(group, "keep", 0.3).begin()
    running.resume_generation.remote()
    refused = UpdatePause(group, "keep", 0.3)
    with pytest.raises(WeightSyncError, match="success=false"):
        refused.begin()
    refused.cancel()
    assert (mixed.is_running, running.is_running) == (False, True)
    running._resets = True
    last = UpdatePause(group, "keep", 0.3)
    last.begin()
    last.end()
    assert (mixed.is_running, running.is_running) == (True, True)
