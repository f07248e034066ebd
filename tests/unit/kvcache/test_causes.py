"""Why pages didn't come, row by row of the table in ``docs/kvcache.md``, between real ends."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fabric_ray import TransferEngine
from fabric_ray.kvcache import (
    CacheGroup,
    CacheLayout,
    CacheTensor,
    Decoder,
    Job,
    Place,
    Prefiller,
    Pull,
    RankCache,
    Terms,
    errors,
)

PAGE = Path(__file__).parents[3] / "docs/kvcache.md"
# No pause of a busy machine is taken for silence.
TERMS = Terms(beat=0.05, silence=30.0)


@dataclass
class Pair:
    """A prefiller and a decoder that has met it."""

    stack: ExitStack
    prefiller: Prefiller
    decoder: Decoder
    engines: tuple[TransferEngine, TransferEngine]
    met: int

    def pull(self, payload: bytes = b"", timeout: float = 30.0) -> Pull:
        return self.decoder.pull(
            self.met, tokens=8, tables=[[0, 1]], payload=payload, timeout=timeout
        )

    def job(self) -> Job:
        """The next that has come."""
        waiting = threading.Event()
        for _ in range(2000):
            if jobs := self.prefiller.take():
                return jobs[0]
            waiting.wait(0.01)
        raise AssertionError("no request came")


def end(stack: ExitStack, name: str) -> RankCache:
    engine = stack.enter_context(TransferEngine(name=name))
    _, region = engine.empty((1, 4, 1, 4, 8), torch.uint8)
    tensor = CacheTensor("k", 1, 0, 1, 8, "uint8", 32, 32, 8, (Place(0, 0),))
    layout = CacheLayout("test", (CacheGroup("all", (0,), 4, 4, (tensor,)),), (region.nbytes,))
    return RankCache(engine, layout, [region])


def pair(stack: ExitStack, theirs: Terms = TERMS, ours: Terms = TERMS) -> Pair:
    p, d = end(stack, "p"), end(stack, "d")
    prefiller = stack.enter_context(Prefiller([p], terms=theirs))
    decoder = stack.enter_context(Decoder([d], terms=ours))
    return Pair(stack, prefiller, decoder, (p.engine, d.engine), decoder.connect(prefiller.offer()))


def cancelled(stack: ExitStack) -> Pull:
    pull = pair(stack).pull()
    pull.cancel()
    return pull


def died(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    it.job()
    it.engines[0].close()
    return pull


def closed_there(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    it.job()
    it.prefiller.close()
    return pull


def declined(stack: ExitStack) -> Pull:
    it = pair(stack)
    first = it.pull()
    gate, closed = threading.Event(), threading.Event()

    def hold() -> None:
        closed.set()
        gate.wait(20)

    # What comes to the prefiller waits for this callback.
    it.job().on_release(hold)
    first.cancel()
    assert closed.wait(20)
    d = end(stack, "rare")
    decoder = stack.enter_context(Decoder([d], terms=Terms(beat=20.0, silence=60.0)))
    met = decoder.connect(it.prefiller.offer())
    pull = decoder.pull(met, tokens=8, tables=[[0, 1]])
    gate.set()
    return pull


def left(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    it.decoder.disconnect(it.met)
    return pull


def late(stack: ExitStack) -> Pull:
    return pair(stack).pull(timeout=0.05)


def failed(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    it.job().fail("out of pages")
    return pull


def left_in_the_middle(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    job = it.job()
    job.accept([[0, 1]])
    it.prefiller.begin([(job, 8)])
    it.prefiller.begin([])
    return pull


def too_much(stack: ExitStack) -> Pull:
    it = pair(stack, theirs=TERMS.model_copy(update={"max_message": 4096, "max_payloads": 4096}))
    it.pull(bytes(3000))
    it.job()
    return it.pull(bytes(3000))


def closed_here(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    it.job()
    it.decoder.close()
    return pull


def engine_closed_here(stack: ExitStack) -> Pull:
    it = pair(stack)
    pull = it.pull()
    it.job()
    it.engines[1].close()
    return pull


Scenario = Callable[[ExitStack], Pull]
ROWS: list[tuple[str, bool, dict[Scenario, str]]] = [
    ("PullCancelled", False, {cancelled: "cancelled"}),
    (
        "PrefillerLost",
        True,
        {
            died: "was lost",
            closed_there: "the prefiller is closed",
            declined: "declined this decoder: its beats are",
            left: "this decoder has left it",
        },
    ),
    ("PullTimeout", True, {late: "did not finish within 50ms"}),
    ("PrefillFailed", True, {failed: "out of pages", left_in_the_middle: "in the middle"}),
    ("PullRefused", True, {too_much: "would pass 4096 bytes"}),
    # A decoder finds out itself what is wrong with a request, and raises: below.
    ("PullRefused", False, {}),
    ("DecoderClosed", False, {closed_here: "closed", engine_closed_here: "closed"}),
]


def documented() -> list[tuple[str, bool]]:
    """The table: what is raised, and whether another prefiller may be asked."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| *(yes|no)? *\|$", PAGE.read_text(), re.MULTILINE)
    return [(name, answer == "yes") for name, answer in rows]


def test_every_row_of_the_table_is_tried() -> None:
    assert documented() == [(name, retryable) for name, retryable, _ in ROWS]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("raised", "retryable", "scenario", "text"),
    [
        pytest.param(raised, retryable, scenario, text, id=f"{raised}-{scenario.__name__}")
        for raised, retryable, scenarios in ROWS
        for scenario, text in scenarios.items()
    ],
)
def test_a_pull_ends_as_the_table_says(
    stack: ExitStack, raised: str, retryable: bool, scenario: Scenario, text: str
) -> None:
    pull = scenario(stack)
    with pytest.raises(errors.KvError, match=text) as error:
        pull.wait_ready(30)
    assert (type(error.value).__name__, error.value.retryable) == (raised, retryable)
    pull.wait_released(30)


def test_what_is_refused_as_wrong_is_refused_by_others_as_well() -> None:
    error = errors.error_for("refused", "page 8 of 8")
    assert (type(error), str(error)) == (errors.PullRefused, "page 8 of 8")
    assert not error.retryable
