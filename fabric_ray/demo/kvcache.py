"""The demo of disaggregated inference: a deployment streams, grows, loses a replica, is checked."""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import signal
import socket
import statistics
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from ray import serve
from rich.console import Console
from rich.table import Table

from fabric_ray.decoding import converted
from fabric_ray.demo.common import cluster, named, plain, print_checks
from fabric_ray.demo.options import KvCache as Options
from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.serve import LocalApp, ServeArgs, run_local
from fabric_ray.serve.instance import check_model, load_model, max_model_len, tokenizer

PROMPT = "Pages leave layer by layer, while the next layer is computed."
_PROMPTS, _PROMPT_TOKENS = 16, 96
_WIDTH = 32

Tell = Callable[[str, str], None]
"""Called with ``stage``, ``piece`` or ``event``, and a text."""


def serve_args(options: Options) -> ServeArgs:
    """The deployment."""
    fabric: dict[str, Any] = {"name": "kvcache-demo"}
    if options.transport != "auto":
        fabric["transport"] = options.transport
    cache = {"page_tokens": 8, "pages": _pages(options)}
    return ServeArgs.model_validate(
        {
            "model": options.model,
            "seed": options.seed,
            "torch_threads": 1,
            "prefill": {"tp": options.prefill_tp, "chunk_tokens": 32},
            "decode": {"tp": options.decode_tp, "cache": cache, "prefill_timeout": 20},
            "terms": {"beat": 0.2, "silence": 2.0},
            "fabric": fabric,
        }
    )


def _pages(options: Options) -> int:
    """Pages of 8 tokens, enough for one request of each client at the same time."""
    return max(1024, options.clients * -(-(_PROMPT_TOKENS + options.max_tokens) // 8))


class Layer(msgspec.Struct, frozen=True):
    """A layer of a prompt; seconds from the begin of the prompt's last pass."""

    layer: int
    computed: float
    """It was in the prefiller's cache."""
    posted: float
    """The last of its pages was given to the engines."""
    delivered: float
    """The last of its pages was known to be in the decoder's memory."""


class Streamed(msgspec.Struct):
    """The completion that was streamed."""

    prompt: str
    text: str
    tokens: int
    first_token: float
    """Seconds until the client had the first token."""
    seconds: float
    timings: dict[str, float | int]
    """As the decoder measured them, seconds: queue, prefill, transfer, first token; and counts."""
    equal: bool
    """Whether one engine that does both halves says the same."""
    layers: tuple[Layer, ...] = ()
    """As the prefiller saw them leave."""


class Answer(msgspec.Struct, frozen=True):
    """What a client got; seconds since the load began."""

    began: float
    seconds: float
    tokens: int = 0
    error: str | None = None
    """What it was told instead of tokens."""
    wrong: bool = False
    """Tokens that one engine wouldn't have said."""


class Outcome(msgspec.Struct, frozen=True):
    options: Options
    streamed: Streamed
    answers: tuple[Answer, ...]
    events: tuple[dict[str, Any], ...]
    """What was done to the deployment, and when, since the load began."""
    replicas: tuple[dict[str, Any], ...]
    """What they said of themselves when all was over."""
    checks: dict[str, bool]

    @property
    def verified(self) -> bool:
        return all(self.checks.values())

    def summary(self) -> dict[str, Any]:
        """Machine-readable; times are seconds."""
        good = [a for a in self.answers if a.error is None and not a.wrong]
        span = max((a.began + a.seconds for a in self.answers), default=0.0)
        return {
            "verified": self.verified,
            "checks": self.checks,
            "streamed": msgspec.to_builtins(self.streamed),
            "requests": len(self.answers),
            "failed": dict(Counter(a.error for a in self.answers if a.error is not None)),
            "wrong": sum(a.wrong for a in self.answers),
            "goodput_tokens_per_s": sum(a.tokens for a in good) / span if span else 0.0,
            "request_seconds": {"p50": _quantile(good, 50), "p99": _quantile(good, 99)},
            "events": list(self.events),
            "replicas": list(self.replicas),
            "model": self.options.model,
        }

    def show(self, console: Console) -> None:
        """Prints the tables and the verdict."""
        said, found = self.streamed, self.summary()
        rows = {"first token, seen by the client": f"{said.first_token * 1e3:.0f} ms"}
        for name, value in said.timings.items():
            shown = f"{value * 1e3:.1f} ms" if isinstance(value, float) else str(value)
            rows[name.replace("_", " ")] = shown
        console.print(_pairs("The streamed completion", rows | {"tokens": str(said.tokens)}))
        console.print(_timeline(said.layers))
        rows = {
            "requests": str(found["requests"]),
            "goodput": f"{found['goodput_tokens_per_s']:.0f} tokens/s",
        }
        for name, seconds in found["request_seconds"].items():
            rows[f"{name} of a request"] = f"{seconds * 1e3:.0f} ms"
        for cause, count in found["failed"].items():
            rows[f"[red]{cause}[/]"] = str(count)
        console.print(_pairs("Under load", rows))
        print_checks(self.checks, console)


def run(options: Options, tell: Tell) -> Outcome:
    """Runs it all.

    Raises:
        InvalidArgument: no such model, or an option that it can't have.
        FabricError: the deployment didn't come up.
    """
    options.check()
    # A wrong model or tp ends here, before any process is started.
    args = serve_args(options)
    with named("--model", "--prefill-tp", "--decode-tp"):
        check_model(args)
    _check_context(args, options.max_tokens)
    with cluster(options.address):
        tell("stage", "starting Ray Serve: a router, a prefiller, a decoder")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            with run_local(args, port=_free_port()) as app:
                return _on(app, options, tell)
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]


def _check_context(args: ServeArgs, max_tokens: int) -> None:
    """Raises InvalidArgument if the model has too few positions for a request."""
    prompt = max(_PROMPT_TOKENS, len(tokenizer(args).encode(PROMPT)))
    context = max_model_len(args)
    if context is not None and prompt + max_tokens > context:
        raise InvalidArgument(
            f"--max-tokens: got {max_tokens}, expected at most {context - prompt}: the model's "
            f"maximum context length is {context}, and prompts have up to {prompt} tokens"
        )


def _on(app: LocalApp, options: Options, tell: Tell) -> Outcome:
    args = serve_args(options)
    words = tokenizer(args)
    draw = random.Random(options.seed)
    prompts = [
        [draw.randrange(256) for _ in range(draw.randint(4, _PROMPT_TOKENS))]
        for _ in range(_PROMPTS)
    ]
    tell("stage", "one engine that does both halves makes the reference")
    spec = CacheSpec(page_tokens=args.decode.cache.page_tokens, pages=args.decode.cache.pages)
    plain = Generator(TorchEngine(load_model(args, tp=1), spec))
    asked = [words.encode(PROMPT), *prompts]
    expected = plain.run([GenerationRequest(p, options.max_tokens, stop=words.stop) for p in asked])
    text = words.decode([t for t in expected[0] if t not in words.stop])

    tell("stage", "streaming a completion")
    streamed = _stream(app, options.max_tokens, text, lambda piece: tell("piece", piece))
    streamed.layers = _layers(app)

    events: list[dict[str, Any]] = []
    load = Load(app, prompts, expected[1:], options.max_tokens)

    def note(what: str) -> None:
        events.append({"at": load.now, "what": what})
        tell("event", f"{load.now:6.1f} s  {what}")

    def count(role: str) -> int:
        return sum(replica["role"] == role for replica in app.stats())

    def idle() -> bool:
        pages = [r for r in app.stats() if r["role"] in ("prefill", "decode")]
        return bool(pages) and all(r["idle"] for r in pages)

    note(f"{options.clients} clients begin")
    load.start(options.clients)
    time.sleep(options.seconds / 3)
    note("scaling to two prefillers and two decoders")
    app.scale("Prefill", 2)
    app.scale("Decode", 2)
    _wait(lambda: count("prefill") >= 2 and count("decode") >= 2, 60)
    note(f"{count('prefill')} prefillers and {count('decode')} decoders answer")
    time.sleep(options.seconds / 3)
    victim = next(r for r in app.stats() if r["role"] == "prefill")
    os.kill(victim["pid"], signal.SIGKILL)
    note(f"kill -9 of prefiller {victim['replica']}")
    killed = load.now
    time.sleep(options.seconds / 3)
    ended = load.stop(90)
    note("the clients have stopped")
    checks = {
        "the stream says what one engine says": streamed.equal,
        "every layer was delivered": bool(streamed.layers),
        "every request ended": ended,
        "no token is wrong": not any(a.wrong for a in load.answers),
        "no request failed": not any(a.error for a in load.answers),
        "requests went on after the kill": any(a.began > killed for a in load.answers),
        "all pages are free": _wait(idle, 30),
    }
    answers, replicas = tuple(load.answers), tuple(app.stats())
    return Outcome(options, streamed, answers, tuple(events), replicas, checks)


def _stream(app: LocalApp, max_tokens: int, expected: str, tell: Callable[[str], None]) -> Streamed:
    """Reads a completion as it comes, and hands its pieces to ``tell``."""
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(app.url.removeprefix("http://"), timeout=120)
    begin = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(fields))
    text, first = "", 0.0
    last: dict[str, Any] = {}
    for line in connection.getresponse():
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        last = json.loads(data)
        if piece := last["choices"][0]["text"] if last.get("choices") else "":
            first = first or time.monotonic() - begin
            text += piece
            tell(piece)
    connection.close()
    return Streamed(
        prompt=PROMPT,
        text=text,
        tokens=last.get("usage", {}).get("completion_tokens", 0),
        first_token=first,
        seconds=time.monotonic() - begin,
        timings=last.get("x-fabric", {}),
        equal=bool(text) and text == expected,
    )


class Load:
    """Clients that send one request after the other until they are told to stop.

    Args:
        app: the deployment.
        prompts: that they draw from.
        expected: the tokens of each.
        max_tokens: that each asks for.
    """

    def __init__(
        self,
        app: LocalApp,
        prompts: Sequence[list[int]],
        expected: Sequence[list[int]],
        max_tokens: int,
    ) -> None:
        self._app, self._prompts, self._expected = app, prompts, expected
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._begin = time.monotonic()
        self.answers: list[Answer] = []

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begin

    def start(self, clients: int) -> None:
        for number in range(clients):
            thread = threading.Thread(target=self._run, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, timeout: float) -> bool:
        """Whether every request that was begun has ended."""
        self._stop.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        while not self._stop.is_set():
            self.answers.append(self._ask(draw.randrange(len(self._prompts))))

    def _ask(self, which: int) -> Answer:
        began = self.now
        fields = {"max_tokens": self._max_tokens, "temperature": 0, "return_token_ids": True}
        try:
            found = self._app.complete(self._prompts[which], **fields)
        except urllib.error.HTTPError as error:
            cause = json.load(error)["error"]
            return Answer(began, self.now - began, error=f"{error.code}: {cause['message']}")
        except OSError as error:
            return Answer(began, self.now - began, error=str(error))
        tokens = found["choices"][0]["token_ids"]
        wrong = tokens != self._expected[which]
        return Answer(began, self.now - began, tokens=len(tokens), wrong=wrong)


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


def _pairs(title: str, rows: dict[str, str]) -> Table:
    table = plain(title, show_header=False)
    for row in rows.items():
        table.add_row(*row)
    return table


def _timeline(layers: Sequence[Layer]) -> Table:
    """A row for each layer: the time in which it was computed, then that of its transfer."""
    title = "Its layers, milliseconds from the begin of the prompt's last pass"
    table = plain(title)
    for name in ("layer", "computed", "posted", "delivered"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("[blue]compute[/] [red]transfer[/]", no_wrap=True)
    end = max((layer.delivered for layer in layers), default=0.0)
    before = 0.0
    for layer in layers:
        times = (layer.computed, layer.posted, layer.delivered)
        at = [round(t / end * _WIDTH) for t in (before, layer.computed, layer.delivered)]
        # What is too short for a cell has one all the same.
        computing = max(1, at[1] - at[0])
        sending = max(1, at[2] - max(at[1], at[0] + 1))
        bar = f"{' ' * at[0]}[blue]{'█' * computing}[/][red]{'▒' * sending}[/]"
        table.add_row(str(layer.layer), *(f"{t * 1e3:.2f}" for t in times), bar)
        before = layer.computed
    return table


def _quantile(answers: Sequence[Answer], percent: int) -> float:
    seconds = [a.seconds for a in answers]
    if len(seconds) < 2:
        return seconds[0] if seconds else 0.0
    return statistics.quantiles(seconds, n=100)[percent - 1]
