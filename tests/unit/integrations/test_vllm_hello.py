"""What vLLM's workers say to a trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fabric_ray.errors import WeightSyncError
from fabric_ray.integrations import vllm_hello
from fabric_ray.integrations.vllm_hello import Hello, Hellos


def test_what_workers_say_may_come_after_the_call_to_them_has_ended() -> None:
    """On a busy host the trainer's end may hear of a message later than of the call's end."""
    heard: list[Callable[[Any], None]] = []
    engine: Any = SimpleNamespace(receive=lambda put, count: heard.append(put))
    hellos, call = Hellos(engine, 1), Future[None]()
    call.set_result(None)
    late = SimpleNamespace(data=msgspec.msgpack.encode(Hello(update=3, text=b"ready")))
    timer = threading.Timer(3 * vllm_hello._LOOK_S, heard[0], [late])
    timer.start()
    assert hellos.collect(3, call, 30.0, what="shards") == ([b"ready"], None)
    timer.join()


def test_workers_beyond_those_that_are_awaited_are_refused_by_update() -> None:
    heard: list[Callable[[Any], None]] = []
    engine: Any = SimpleNamespace(receive=lambda put, count: heard.append(put))
    hellos, call = Hellos(engine, 1), Future[None]()
    for update in (2, 3, 3):
        heard[0](SimpleNamespace(data=msgspec.msgpack.encode(Hello(update=update, text=b""))))
    assert hellos.collect(2, call, 30.0, what="shards") == ([b""], None)
    hellos.refuse_more(2)
    for _ in range(2):
        heard[0](SimpleNamespace(data=msgspec.msgpack.encode(Hello(update=3, text=b""))))
    with pytest.raises(WeightSyncError, match="`workers` says, which is 1"):
        hellos.refuse_more(3)
