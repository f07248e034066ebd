"""Workers answer callers that know their secret, with values or with an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.worker_rpc import WorkerClient, WorkerServer
from fabric_ray.weights.calls import DIED, CallFailure
from fabric_ray.weights.report import PushTarget, Span

TARGET = PushTarget(1, "rollout 1", b"address", b"region", (b"counter",), (0, -1), True, 2**40)


def turn(_: Any, name: str, push_target: PushTarget, digest: int | None = None) -> tuple[Span, ...]:
    if push_target != TARGET:
        raise InvalidArgument(f"not at {name}")
    return (Span(push_target.name, str(digest), 0.5, 1.0),)


@pytest.fixture
def server() -> Iterator[WorkerServer]:
    server = WorkerServer({"turn": turn}, "127.0.0.1", "worker")
    yield server
    server.close()


def test_results_have_the_annotated_type(server: WorkerServer) -> None:
    client = WorkerClient(server.session_id)
    answer = client.ask(turn, (TARGET, 2**64 - 1), 5.0)
    assert answer == (Span("rollout 1", str(2**64 - 1), 0.5, 1.0),)
    assert client.ask(turn, (TARGET,), 5.0)[0].stage == "None"
    refused = client.ask(turn, (replace(TARGET, rank=2),), 5.0)
    assert refused == CallFailure("not at worker", "InvalidArgument")


def test_unknown_functions_and_malformed_arguments_are_refused(server: WorkerServer) -> None:
    def other(_: Any, name: str) -> None: ...

    client = WorkerClient(server.session_id)
    assert client.ask(other, (), 5.0).kind == "DecodeError"
    assert "takes 1 to 2 arguments, got 3" in client.ask(turn, (TARGET, 1, 2), 5.0).cause
    assert "Expected `object`" in client.ask(turn, ("no push_target",), 5.0).cause


def test_a_caller_with_another_secret_is_refused(server: WorkerServer) -> None:
    host, port = WorkerClient(server.session_id)._at
    stranger = WorkerClient(f"fabric://00@{host}:{port}")
    assert "another secret" in stranger.ask(turn, (TARGET,), 5.0).cause


def test_a_closed_server_is_seen_at_the_next_call(server: WorkerServer) -> None:
    client = WorkerClient(server.session_id)
    assert client.ask(turn, (TARGET,), 5.0)
    server.close()
    assert not any(thread.is_alive() for thread in server._server._accepting)
    assert client.ask(turn, (TARGET,), 5.0).kind == DIED


def test_another_librarys_session_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="attach a FabricWorker"):
        WorkerClient("10.0.0.1:15000")
