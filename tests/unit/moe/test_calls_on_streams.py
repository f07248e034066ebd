"""Calls of an exchange on several streams, where DeepEP has one of its own: they run in order, and
what they read is kept for them."""

from __future__ import annotations

import threading

import torch

from fabric_ray.moe.deepep import Buffer
from tests.moe_ranks import ThreadComm
from tests.queued_streams import LIMIT, QueuedGpus, Wait
from tests.unit.moe.test_host_run_ahead import (
    RANKS,
    TOKENS,
    Run,
    answered,
    buffer_of,
    check,
    experts_answered,
    given_batches,
    made,
    normal,
    read,
    run,
    wanted,
)

__all__ = ["run"]


def test_calls_on_two_streams_run_one_after_the_other(run: Run) -> None:
    """The next dispatch is launched while the combine before it waits in another stream."""

    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        a = made(comm, gpus)
        batches = given_batches(comm, gpus, 3)
        main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        launched, sums = threading.Event(), []
        for x, idx, w in batches:
            a.dispatch_send(x, idx)
            if sums:
                threading.Timer(0.2, launched.set).start()
            y = answered(a, a.dispatch_recv(stride=RANKS * TOKENS).x)
            beside.wait_stream(main)
            with torch.cuda.stream(beside):
                beside.launch(lambda _: launched.wait(LIMIT))
                a.combine_send(y)
                sums.append(a.combine_recv(w))
            for used in (y, w):
                used.record_stream(beside)
        main.wait_stream(beside)
        for out in sums:
            out.record_stream(main)
        return read(gpus, sums, [a])

    check(run(work, 0), 3)


def test_what_normal_calls_read_on_another_stream_may_be_let_go_of(run: Run) -> None:
    """Answers, and the handle, by which routes are made again for answers of another type."""

    def work(comm: ThreadComm, gpus: QueuedGpus) -> list[torch.Tensor]:
        buffer = buffer_of(comm, gpus)
        [one] = given_batches(comm, gpus, 1)
        with gpus.may_wait(Wait.DEVICE):
            for _ in range(2):  # making exchanges
                normal(comm, buffer, *one)
                experts_answered(comm, buffer, *one)
        main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        reused, sums = threading.Event(), []
        beside.launch(lambda _: reused.wait(LIMIT))
        with gpus.may_wait(Wait.STREAM):
            for _ in range(3):
                y, handle = experts_answered(comm, buffer, *one)
                event = Buffer.capture()
                with torch.cuda.stream(beside):
                    out, *_ = buffer.combine(y, handle, previous_event=event, async_finish=True)
                sums.append(out)
                del y, handle
        main.launch(lambda _: reused.set())
        main.wait_stream(beside)
        for out in sums:
            out.record_stream(main)
        return read(gpus, [out.to(torch.bfloat16) for out in sums], [buffer])

    for rank, sums in enumerate(run(work, 0)):
        assert all(torch.equal(one, wanted(rank)) for one in sums)
