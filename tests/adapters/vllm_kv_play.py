"""How tests of vLLM's KV connector play: instances here and in other processes, stepped in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig

from tests.adapters.vllm_kv_instances import Instance
from tests.processes import Other, _run

PROMPT = [(17 * i) % 900 for i in range(37)]
BLOCKS = 24
FREE = BLOCKS - 1  # vLLM keeps one for itself.

SCHEDULES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
DRAWN = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(1, 12)), min_size=2, max_size=6
)
"""Blocks of the common prefix, further tokens, and tokens that the prefiller itself generates."""

# vLLM takes long to import: processes are forked from one that has done it.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


@contextmanager
def instances(*made: Instance) -> Iterator[tuple[Instance, ...]]:
    try:
        yield made
    finally:
        for each in made:
            each.close()


def pump(what: str, done: Callable[[], object], *running: Instance, seconds: float = 20.0) -> None:
    """Steps instances, as their engine cores do, until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        for each in running:
            if each.scheduler.has_requests():
                each.step()
        time.sleep(0.002)


def prefill(p: Instance, number: str = "p", prompt: list[int] = PROMPT, **params: Any) -> Any:
    """A prefill that is over; what its response says for the decoder."""
    p.add(number, prompt, {"do_remote_decode": True, "transfer_id": "t", **params}, 1)
    pump("the prefill", lambda: number in p.ended, p)
    return p.ended[number].kv_transfer_params


def served(d: Instance, number: str, prompt: list[int], *running: Instance) -> None:
    """Steps until a request has been computed; then its pages are right, and are let go."""
    pump("the load", lambda: d.computed.get(number), d, *running)
    assert d.wrong(number, prompt) == []
    pump("the end", lambda: number in d.ended, d, *running)
    assert d.ended[number].finish_reason.name == "LENGTH"


def known(p: Instance, d: Instance, free: int = FREE) -> dict[str, Any]:
    """What makes a decoder ask for the transfer `t`, before the prefiller has such a request."""
    params = prefill(p, "warm", PROMPT[:5], transfer_id="warm")
    d.add("warm", PROMPT[:5], dict(params))
    served(d, "warm", PROMPT[:5], p)
    released(p, d, free=free)
    return {**params, "transfer_id": "t"}


def released(*each: Instance, free: int = FREE) -> None:
    pump("the release", lambda: all(one.free() == free for one in each), *each)


class Remote(Other):
    """A prefill instance in a process of its own, which does what it is told over a pipe."""

    def __init__(self, vllm: VllmConfig, **options: Any) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_run, args=(serve, theirs, (vllm, options)), daemon=True
        )
        self.process.start()
        theirs.close()


def serve(connection: Connection, vllm: VllmConfig, options: dict[str, Any]) -> None:
    """Steps as an engine core does, and answers in between."""
    torch.set_num_threads(1)
    instance = Instance(vllm, **options)
    connection.send("ready")
    while True:
        busy = instance.scheduler.has_requests()
        if connection.poll(0 if busy else 0.5):
            what, *given = connection.recv()
            if what == "close":
                instance.close()
                return
            if what == "add":
                instance.add(*given)
            elif what == "abort":
                instance.abort(*given)
            elif what == "stand after layer":
                instance.after = lambda layer, at=given[0]: _stand(layer == at)  # type: ignore[method-assign]
            elif what == "asked":
                connection.send(all(given[0] in _transfers(w) for w in instance.workers))
            elif what == "params":
                ended = instance.ended.get(given[0])
                connection.send(ended and ended.kv_transfer_params)
            elif what == "free":
                connection.send(instance.free())
        if busy:
            instance.step()


def _stand(still: bool) -> None:
    while still:
        time.sleep(60.0)


def _transfers(worker: Any) -> dict[str, Any]:
    """Those that this worker's connector knows of."""
    known: dict[str, Any] = worker.kv_connector._sender._transfers
    return known
