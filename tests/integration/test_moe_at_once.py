"""An exchange of tokens with calls from wrong threads: clear errors, and no endless wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fabric_ray.errors import FabricError, InvalidArgument, Unsupported
from fabric_ray.moe import AllToAll
from fabric_ray.moe.tokens import Outgoing, Room
from tests.at_once import at_once, unused
from tests.processes import within
from tests.unit.moe.test_all_to_all import batch, expert, group, unsharded

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 64, 17
SIZES = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}

OUT = Outgoing(*batch(0, TOKENS, EXPERTS, TOPK, HIDDEN)[:2], {})
ROOM = Room({}, torch.empty(4, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int64))
TURNS: dict[str, Callable[[AllToAll], object]] = {
    "dispatch": lambda a: a.dispatch(OUT),
    "dispatch_send": lambda a: a.dispatch_send(*batch(0, TOKENS, EXPERTS, TOPK, HIDDEN)[:2]),
    "arriving": lambda a: a.arriving(),
    "dispatch_recv": lambda a: a.dispatch_recv(),
    "combine_send": lambda a: a.combine_send(torch.empty(0, HIDDEN, dtype=torch.bfloat16)),
    "combine_answers": lambda a: a.combine_answers(),
    "combine_recv": lambda a: a.combine_recv(),
    "finish": lambda a: a.finish(),
    "disconnect": lambda a: a.disconnect(),
}
ANY_TIME = {"dispatch", "dispatch_send", "finish", "disconnect"}


def look(a: AllToAll) -> None:
    a.check()
    a.set_timeout(120)
    assert a.lost == a.left_out == ()
    a.between_exchanges()
    assert a.present == (True, True)
    assert f"{a.nbytes:,}" in a.explain()
    assert a.local_experts == range(a.rank * 4, a.rank * 4 + 4)
    with pytest.raises(InvalidArgument, match="is present"):
        a.descriptor(1 - a.rank)
    with pytest.raises(Unsupported):  # it has no device
        a.dispatch_recv_into(ROOM, TOKENS)


# Between or after exchanges alone; and what ends waits, which is tried below.
APART = {"admit", "connect", "close", "expect_departures", "mask"}


def test_every_public_call_of_an_exchange_is_made() -> None:
    assert unused(__file__, AllToAll) <= {f"AllToAll.{name}" for name in APART}


def answered(a: AllToAll, seed: int) -> None:
    """The rest of an exchange whose tokens were sent, and whether its sums are right."""
    x, idx, w = batch(seed, TOKENS, EXPERTS, TOPK, HIDDEN)
    got = a.dispatch_recv()
    y = torch.zeros(len(got.x), HIDDEN, dtype=torch.bfloat16)
    for local, number in enumerate(a.local_experts):
        y[got.of(local)] = expert(number, got.x[got.of(local)]).to(torch.bfloat16)
    a.combine_send(y)
    assert torch.equal(a.combine_recv(w), unsharded(x, idx, w))


def test_other_threads_are_told_that_one_is_waiting_and_disturb_nothing() -> None:
    with group(2, timeout=120.0, **SIZES) as alls:
        first, second = alls
        done: list[object] = []

        def wait() -> None:
            first.dispatch_send(*batch(1, TOKENS, EXPERTS, TOPK, HIDDEN)[:2])
            sent.set()
            answered(first, 1)
            done.append(first)

        sent = threading.Event()
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert sent.wait(60)

        def is_waiting() -> bool:
            try:
                first.combine_recv()
            except InvalidArgument as error:
                return "another thread is in a call" in str(error)
            return False

        within(60, "the wait", is_waiting)

        def work(number: int) -> None:
            look(first)
            for call in TURNS.values():
                with pytest.raises(InvalidArgument, match="another thread is in a call"):
                    call(first)

        at_once(work)
        assert done == []
        second.dispatch_send(*batch(2, TOKENS, EXPERTS, TOPK, HIDDEN)[:2])
        answered(second, 2)
        waiting.join(120)
        assert done == [first]


def test_calls_out_of_turn_from_32_threads_say_whose_turn_it_is() -> None:
    with group(2, timeout=120.0, **SIZES) as alls:
        out_of_turn = [call for name, call in TURNS.items() if name not in ANY_TIME]

        def work(number: int) -> None:
            for call in out_of_turn:
                with pytest.raises(InvalidArgument, match=r"it is dispatch_send|another thread"):
                    call(alls[number % 2])
                look(alls[number % 2])

        at_once(work)

        def exchange(number: int) -> None:
            x, idx, _ = batch(number, TOKENS, EXPERTS, TOPK, HIDDEN)
            alls[number].dispatch_send(x, idx)
            answered(alls[number], number)

        at_once(exchange, threads=2)


@pytest.mark.parametrize("end", ["mask", "close"])
def test_rs_4_a_thread_that_gives_a_rank_up_ends_the_wait_of_another(end: str) -> None:
    with group(2, timeout=120.0, **SIZES) as alls:
        first = alls[0]
        x, idx, _ = batch(1, TOKENS, EXPERTS, TOPK, HIDDEN)
        first.dispatch_send(x, idx)
        ended: list[Any] = []

        def wait() -> None:
            try:
                ended.append(first.dispatch_recv())
            except FabricError as error:
                ended.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        if end == "mask":
            first.mask(1, "a thread gave it up")
        else:
            alls[1].close()
            first.mask(1)
        waiting.join(100)
        assert not waiting.is_alive(), "the wait went on"
        assert [lost.rank for lost in first.lost] == [1]
        assert len(ended) == 1
