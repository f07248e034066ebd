"""The demo: a deployment is started, streams, grows, loses a replica, and is checked."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
from ray import serve

from fabric_ray.decoding import converted
from fabric_ray.demo.cluster import cluster, named_failures
from fabric_ray.demo.kvcache.clients import Load, stream
from fabric_ray.demo.kvcache.options import Event, Layer, Options, Outcome
from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.serve import LocalApp, ServeArgs, run_local
from fabric_ray.serve.instance import load_model, tokenizer

PROMPT = "Pages leave layer by layer, while the next layer is computed."
_PROMPTS = 16

Tell = Callable[[str, str], None]
"""Called with ``stage``, ``piece`` or ``event``, and a text."""


def run(options: Options, tell: Tell) -> Outcome:
    """Runs it all.

    Raises:
        InvalidArgument: no such model, or an option that it can't have.
        FabricError: the deployment didn't come up.
    """
    if options.clients < 1 or options.seconds <= 0 or options.max_tokens < 1:
        raise InvalidArgument("give at least one client, one token and some seconds")
    with cluster(options.address), named_failures():
        tell("stage", "starting Ray Serve: a router, a prefiller, a decoder")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            with run_local(serve_args(options), port=_free_port()) as app:
                return _on(app, options, tell)
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]


def serve_args(options: Options) -> ServeArgs:
    """The deployment."""
    fabric: dict[str, Any] = {"name": "kvcache-demo"}
    if options.transport != "auto":
        fabric["transports"] = [options.transport]
    return ServeArgs.model_validate(
        {
            "model": options.model,
            "seed": options.seed,
            "torch_threads": 1,
            "prefill": {
                "tp": options.prefill_tp,
                "chunk_tokens": 32,
            },
            "decode": {
                "tp": options.decode_tp,
                "cache": {"page_tokens": 8, "pages": 1024},
                "prefill_timeout": 20,
            },
            "terms": {"beat": 0.2, "silence": 2.0},
            "fabric": fabric,
        }
    )


def _on(app: LocalApp, options: Options, tell: Tell) -> Outcome:
    args = serve_args(options)
    words = tokenizer(args)
    draw = random.Random(options.seed)
    prompts = [
        [draw.randrange(256) for _ in range(draw.randint(4, options.prompt_tokens))]
        for _ in range(_PROMPTS)
    ]
    tell("stage", "one engine that does both halves makes the reference")
    plain = Generator(TorchEngine(load_model(args, tp=1)))
    asked = [words.encode(PROMPT), *prompts]
    expected = plain.run([GenerationRequest(p, options.max_tokens, stop=words.stop) for p in asked])
    text = words.decode([t for t in expected[0] if t not in words.stop])

    tell("stage", "streaming a completion")
    streamed = stream(app, PROMPT, options.max_tokens, text, lambda piece: tell("piece", piece))
    streamed = msgspec.structs.replace(streamed, layers=_layers(app))

    events: list[Event] = []
    load = Load(app, prompts, expected[1:], options.max_tokens)

    def note(what: str) -> None:
        events.append(Event(load.now, what))
        tell("event", f"{load.now:6.1f} s  {what}")

    note(f"{options.clients} clients begin")
    load.start(options.clients)
    time.sleep(options.seconds / 3)
    note("scaling to two prefillers and two decoders")
    app.scale("Prefill", 2)
    app.scale("Decode", 2)
    _wait(lambda: _count(app, "prefill") >= 2 and _count(app, "decode") >= 2, 60)
    note(f"{_count(app, 'prefill')} prefillers and {_count(app, 'decode')} decoders answer")
    time.sleep(options.seconds / 3)
    victim = next(r for r in app.stats() if r["role"] == "prefill")
    os.kill(victim["pid"], signal.SIGKILL)
    note(f"kill -9 of prefiller {victim['replica']}")
    killed = load.now
    time.sleep(options.seconds / 3)
    ended = load.stop(90)
    note("the clients have stopped")
    idle = _wait(lambda: _idle(app.stats()), 30)
    return Outcome(
        options=options,
        streamed=streamed,
        answers=tuple(load.answers),
        events=tuple(events),
        replicas=tuple(app.stats()),
        checks={
            "the stream says what one engine says": streamed.equal,
            "every layer was delivered": bool(streamed.layers),
            "every request ended": ended,
            "no token is wrong": not any(a.wrong for a in load.answers),
            "no request failed": not any(a.error for a in load.answers),
            "requests went on after the kill": any(a.began > killed for a in load.answers),
            "all pages are free": idle,
        },
    )


def _layers(app: LocalApp) -> tuple[Layer, ...]:
    """Of the one prompt that was sent so far."""
    sent: list[dict[str, Any]] = []

    def released() -> bool:
        sent.extend(r["last_sent"] for r in app.stats() if r.get("last_sent"))
        return bool(sent)

    # The prefiller lets go a moment after the decoder has all.
    if not _wait(released, 30):
        return ()
    return tuple(converted(layer, Layer) for layer in sent[0]["layers"])


def _count(app: LocalApp, role: str) -> int:
    return sum(replica["role"] == role for replica in app.stats())


def _idle(replicas: list[dict[str, Any]]) -> bool:
    pages = [r for r in replicas if r["role"] in ("prefill", "decode")]
    return bool(pages) and all(r["idle"] for r in pages)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
