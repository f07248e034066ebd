"""Clients of the deployment: one that reads a stream, and many that ask one thing after another."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from typing import Any

from fabric_ray.demo.kvcache.options import Answer, Streamed
from fabric_ray.serve import LocalApp

Reference = Callable[[Sequence[int], int], list[int]]
"""The tokens that one engine makes of a prompt, greedily."""


def stream(
    app: LocalApp, prompt: str, max_tokens: int, expected: str, tell: Callable[[str], None]
) -> Streamed:
    """Reads a completion as it comes, and hands its pieces to ``tell``."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection(app.url.removeprefix("http://"), timeout=120)
    begin = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(fields))
    response = connection.getresponse()
    pieces: list[str] = []
    first = 0.0
    last: dict[str, Any] = {}
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        last = json.loads(data)
        if (text := last["choices"][0]["text"] if last.get("choices") else "") != "":
            first = first or time.monotonic() - begin
            pieces.append(text)
            tell(text)
    connection.close()
    text = "".join(pieces)
    return Streamed(
        prompt=prompt,
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
        self._lock = threading.Lock()
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
            answer = self._ask(draw.randrange(len(self._prompts)))
            with self._lock:
                self.answers.append(answer)

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
