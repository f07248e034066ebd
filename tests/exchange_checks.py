"""What exchanges promise, asked of ranks that :func:`tests.gpu.moe_rank.serve` drives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from tests.exchange_cases import Case
from tests.gpu.moe_rank import serve
from tests.processes import Other
from tests.stands import Stand

#: Seconds that ranks may be apart. A device's own waits end after sixteen times as long; a caller
#: that waits for its answer must learn of that.
TIMEOUT = 4.0
LIMIT = 100.0


@contextlib.contextmanager
def ranks(
    transport: str, stands: Sequence[Callable[[], Stand]], beside: type[Other] = Other
) -> Iterator[list[Other]]:
    """One of each stand, in a process each, or a thread."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(beside(serve, rank, len(stands), transport, stand, TIMEOUT))
            for rank, stand in enumerate(stands)
        ]


def begin(others: Sequence[Other], cases: Sequence[Case]) -> None:
    """A new exchange: the same case for all, but for options."""
    for other, case in zip(others, cases, strict=True):
        other.say(("open", case))
    descriptors = [other.hear(LIMIT) for other in others]
    for other in others:
        other.say(descriptors)
    for other in others:
        other.hear(LIMIT)


def run(
    others: Sequence[Other], seed: int, what: str = "run"
) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    for other in others:
        other.say((what, seed))
    return [other.hear(LIMIT) for other in others]


def expect(others: Sequence[Other], case: Case, seed: int) -> None:
    """One exchange, or a replay of it, with the bits of one place."""
    for rank, (sums, left_out) in enumerate(run(others, seed)):
        wanted = case.wanted(seed, rank)
        assert torch.equal(sums.view(torch.uint8), wanted.view(torch.uint8)), f"rank {rank}, {seed}"
        assert left_out == ()


def check_case(others: Sequence[Other], case: Case, *, captured: bool = True) -> None:
    """Exchanges, and replays of a graph with other tokens and routes."""
    begin(others, [case] * len(others))
    for seed in (0, 1):
        expect(others, case, seed)
    if captured:
        run(others, 2, "capture")
        for seed in (3, 4, 5):
            expect(others, case, seed)
