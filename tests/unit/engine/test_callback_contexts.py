"""Callbacks run in the context in which they were given, and leave nothing behind in it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from fabric_ray import Transfer, TransferEngine
from fabric_ray.kvcache import Decoder, Job, Prefiller
from fabric_ray.kvcache.errors import KvError
from fabric_ray.observe import span
from tests.processes import within
from tests.unit.kvcache.test_pull import TERMS, Node

Pair = tuple[TransferEngine, TransferEngine]
T = TypeVar("T")

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="unset")


class Heard:
    """A callback that notes what the variable is, on which thread, and then sets it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, *_: object) -> None:
        self.names.append(NAME.get())
        self.threads.add(threading.get_ident())
        NAME.set("left by a callback")

    def often(self, times: int) -> bool:
        return len(self.names) == times


def given_as(name: str, give: Callable[[], T]) -> T:
    """What `give` returns, in a context of its own where the variable is `name`."""
    context = contextvars.copy_context()
    context.run(NAME.set, name)
    return context.run(give)


def test_a_watchers_calls_see_the_context_of_watch_and_nothing_of_each_other(
    open_engine: Callable[..., TransferEngine],
) -> None:
    engine, heard = open_engine(), Heard()
    watcher = given_as("ann", partial(engine.watch, heard))
    for turn in range(3):
        watcher.add()
        within(10, "the call", partial(heard.often, turn + 1))
    assert heard.names == ["ann"] * 3
    assert threading.get_ident() not in heard.threads
    assert NAME.get() == "unset"


def test_messages_are_delivered_in_the_context_of_receive(pair: Pair) -> None:
    a, b = pair
    heard = Heard()
    given_as("ann", partial(b.receive, heard))
    peer = a.peer(b.address)
    for _ in range(3):
        a.send(peer, b"hello").wait(10)
    within(10, "three messages", lambda: len(heard.names) == 3)
    assert heard.names == ["ann"] * 3


def test_done_callbacks_of_one_transfer_have_contexts_of_their_own(pair: Pair) -> None:
    a, b = pair
    heard = Heard()
    src, dst, counter = a.alloc(64), b.alloc(64), b.counter()
    there = a.import_region(dst.descriptor())
    arrival = counter.expect(1)
    for name in ("ann", "bob"):
        given_as(name, partial(arrival.add_done_callback, heard))
    arrival.add_done_callback(heard)
    a.write(src, there, imm=counter.ref).wait(10)
    within(10, "three calls", lambda: len(heard.names) == 3)
    assert heard.names == ["ann", "bob", "unset"]
    # One that is called at once changes nothing where it was given.
    given_as("cid", partial(arrival.add_done_callback, heard))
    within(10, "the fourth call", lambda: len(heard.names) == 4)
    assert heard.names[3] == "cid"
    assert NAME.get() == "unset"


def test_what_a_registered_callback_asks_is_not_for_the_request_that_registered_it(
    pair: Pair,
) -> None:
    a, b = pair
    back = b.peer(a.address)
    answers: list[Transfer] = []
    a.receive(lambda _: None)
    with span("opening the server"):
        b.receive(lambda _: answers.append(b.send(back, b"received")))
        watcher = b.watch(lambda *_: answers.append(b.send(back, b"changed")))
        b.send(back, b"open").wait(10)
    a.send(a.peer(b.address), b"hello").wait(10)
    watcher.add()
    within(10, "both answers", lambda: len(answers) == 2)
    for answer in answers:
        answer.wait(10)
    asked = [t.span for t in b.records().transfers if t.op == "send"]
    assert asked[0] != 0
    assert asked[1:] == [0, 0]


def test_callbacks_of_pulls_and_jobs_have_their_callers_contexts() -> None:
    with ExitStack() as stack:
        ours, theirs = Node(stack, "p", 1, 4, 8), Node(stack, "d", 1, 4, 8)
        prefiller = stack.enter_context(Prefiller(ours.ranks, terms=TERMS))
        decoder = stack.enter_context(Decoder(theirs.ranks, terms=TERMS))
        pull = decoder.pull(decoder.connect(prefiller.offer()), tokens=8, tables=[[0, 1]])
        jobs: list[Job] = []

        def asked() -> bool:
            jobs.extend(prefiller.take())
            return bool(jobs)

        within(10, "the request", asked)
        causes: list[KvError] = []
        given: list[Callable[[Callable[..., None]], None]] = [
            pull.on_release,
            jobs[0].on_release,
            jobs[0].on_stop,
        ]
        heard = [Heard() for _ in given]
        for give, hear in zip(given, heard, strict=True):
            for name in ("ann", "bob"):
                given_as(name, partial(give, hear))
        jobs[0].on_stop(causes.append)
        pull.cancel()
        within(10, "two calls of each", lambda: all(hear.often(2) for hear in heard))
        within(10, "the cause", lambda: causes == [jobs[0].cause])
        # Those that are called at once change nothing where they were given.
        for give, hear in zip(given, heard, strict=True):
            give(hear)
            assert hear.names == ["ann", "bob", "unset"]
            assert NAME.get() == "unset"
