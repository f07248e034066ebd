"""Callers of a link that prove nothing: hung up on in time, and bounded in number."""

from __future__ import annotations

import contextlib
import re
import socket
import time

import pytest

from fabric_ray.integrations import link as module
from fabric_ray.integrations.link import Link, Server


def target_name(engine: object, name: str) -> str:
    return name


def test_idle_callers_are_hung_up_on_and_keep_no_trainer_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_S", 0.5)
    monkeypatch.setattr(module, "_MOST_UNPROVEN", 2)
    server = Server({"target_name": target_name}, "127.0.0.1", "worker")
    found = re.search(r":(\d+)$", server.session_id)
    assert found is not None
    with contextlib.ExitStack() as strangers:
        idle = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", int(found[1])), 10))
            for _ in range(6)
        ]
        time.sleep(0.2)
        assert Link(server.session_id).ask(target_name, (), 10) == "worker"
        for stranger in idle:
            stranger.settimeout(10)
            while stranger.recv(4096):
                pass
    server.close()
