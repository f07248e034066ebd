"""Workers answer callers that know their secret, with values or with an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from fabric_ray.errors import InvalidArgument
from fabric_ray.integrations.link import Link, Server
from fabric_ray.weights.calls import DIED, CallFailure
from fabric_ray.weights.report import PushTarget, Span

ARM = PushTarget(1, "rollout 1", b"address", b"region", (b"counter",), (0, -1), True, 2**40)


def turn(_: Any, name: str, push_target: PushTarget, digest: int | None = None) -> tuple[Span, ...]:
    if push_target != ARM:
        raise InvalidArgument(f"not at {name}")
    return (Span(push_target.name, str(digest), 0.5, 1.0),)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server({"turn": turn}, "127.0.0.1", "worker")
    yield server
    server.close()


def test_results_have_the_annotated_type(server: Server) -> None:
    link = Link(server.session_id)
    answer = link.ask(turn, (ARM, 2**64 - 1), 5.0)
    assert answer == (Span("rollout 1", str(2**64 - 1), 0.5, 1.0),)
    assert link.ask(turn, (ARM,), 5.0)[0].stage == "None"
    refused = link.ask(turn, (replace(ARM, rank=2),), 5.0)
    assert refused == CallFailure("not at worker", "InvalidArgument")


def test_unknown_functions_and_malformed_arguments_are_refused(server: Server) -> None:
    def other(_: Any, name: str) -> None: ...

    link = Link(server.session_id)
    assert link.ask(other, (), 5.0).kind == "KeyError"
    assert "Expected `object`" in link.ask(turn, ("no push_target",), 5.0).cause


def test_a_caller_with_another_secret_is_refused(server: Server) -> None:
    host, port = Link(server.session_id)._at
    stranger = Link(f"fabric://00@{host}:{port}")
    assert "another secret" in stranger.ask(turn, (ARM,), 5.0).cause


def test_a_closed_server_is_seen_at_the_next_call(server: Server) -> None:
    link = Link(server.session_id)
    assert link.ask(turn, (ARM,), 5.0)
    server.close()
    assert "fabric-accepting" not in {thread.name for thread in threading.enumerate()}
    assert link.ask(turn, (ARM,), 5.0).kind == DIED


def test_another_librarys_session_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="attach a FabricWorker"):
        Link("10.0.0.1:15000")
