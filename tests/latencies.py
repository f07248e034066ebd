"""How long it takes until the other side knows, replay by replay of a captured graph: between the
host and kernels, wherever those run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fabric_ray import TransferEngine
from fabric_ray.engine import Watcher
from fabric_ray.kernels import Channel
from fabric_ray.kernels.launch import Launcher
from fabric_ray.moe import AllToAll, RowPart, cast
from tests.moe_ranks import batch
from tests.processes import within
from tests.stands import Stand

LIMIT = 30.0
#: DeepSeek-V3's decode: tokens of fp8 with a scale for each 128 elements.
EXPERTS, TOPK, HIDDEN, BLOCK = 256, 8, 7168, 128


def until(done: Callable[[], bool], what: str) -> None:
    """Looks without a pause, which keeps Python's lock: for what needs none."""
    end = time.perf_counter() + LIMIT
    while not done():
        assert time.perf_counter() < end, f"{what} did not come within {LIMIT} s"


def awake(watcher: Watcher) -> None:
    """The thread that watches looks without a nap from now on, for a fifth of a millisecond."""
    watcher.store(watcher.value)
    end = time.perf_counter() + 60e-6
    while time.perf_counter() < end:
        pass


def word_of(watcher: Watcher, stand: Stand) -> Tensor:
    """A watched word, for kernels."""
    if stand.device.type == "cuda":
        return torch.as_tensor(watcher, device=stand.device)
    return torch.from_numpy(np.asarray(watcher).view(np.int64))


def changes(engine: TransferEngine, stand: Stand, replays: int) -> tuple[list[float], ...]:
    """Seconds from the launch of a graph that adds to a watched word to its callback: until the
    watching thread, which is Rust's, begins with it, and until its Python runs."""
    came, heard = [0.0, 0.0], threading.Event()

    def changed(_old: int, new: int) -> None:
        came[:] = [time.perf_counter(), float(new)]
        heard.set()

    def hear(value: int) -> None:
        while came[1] < value:
            assert heard.wait(LIMIT), f"no callback came in {LIMIT} s"
            heard.clear()

    watcher = engine.watch(changed, device=_index(stand))
    word = word_of(watcher, stand)
    one = torch.ones_like(word)
    word.add_(one)
    stand.finish()
    replay = stand.capture(lambda: word.add_(one))
    stand.finish()
    hear(watcher.value)
    in_rust, in_python = [], []
    for _ in range(replays):
        value = watcher.value + 1
        awake(watcher)
        begin = time.perf_counter()
        replay()
        hear(value)
        _, ago = watcher.seen
        in_rust.append(time.perf_counter() - ago - begin)
        in_python.append(came[0] - begin)
    stand.finish()
    return in_rust, in_python


def round_trips(
    engines: tuple[TransferEngine, TransferEngine], stand: Stand, launcher: Launcher, replays: int
) -> list[float]:
    """Seconds from a store of the host to a word that a kernel waits for, until the word is seen to
    change that the next kernel adds to. The word lies where flags of transfers do.

    Two engines, so that the thread that waits for the answer looks at nothing else."""
    flag, answer = (one.watch(lambda _old, _new: None, device=_index(stand)) for one in engines)
    word, where = word_of(answer, stand), word_of(flag, stand).data_ptr()
    one = torch.ones_like(word)
    value = torch.ones_like(word)
    waited = torch.zeros(1, dtype=torch.int32, device=stand.device)
    channel = Channel(launcher, timeout=LIMIT)

    def step() -> None:
        channel.wait_word(where, value, waited)
        value.add_(one)
        word.add_(one)

    flag.store(1)
    step()
    stand.finish()
    if stand.device.type != "cuda":
        # It is done while it is captured.
        flag.store(2)
    replay = stand.capture(step)
    stand.finish()
    times = []
    for _ in range(replays):
        answered = answer.value
        raised = int(value.item())
        if stand.device.type == "cuda":
            replay()
            # By now the kernel waits.
            time.sleep(200e-6)
        awake(answer)
        begin = time.perf_counter()
        flag.store(raised)
        if stand.device.type != "cuda":
            replay()
        within(LIMIT, "the kernel's answer", lambda a=answered: answer.seen[0] > a)  # type: ignore[misc]
        _, ago = answer.seen
        times.append(time.perf_counter() - ago - begin)
        stand.finish()
    return times


def first_commands(
    engine: TransferEngine, stand: Stand, tokens: int, replays: int, *, hidden: int = HIDDEN
) -> list[float]:
    """Seconds from the launch of a captured dispatch to the moment at which its first command has
    been taken out of the FIFO, and what follows from it was posted."""
    a = AllToAll(
        engine, rank=0, ranks=1, experts=EXPERTS, topk=TOPK, hidden=hidden, max_tokens=tokens,
        dtype=torch.float8_e4m3fn, parts=[RowPart("scales", hidden // BLOCK, torch.float32)],
        device=stand.device, launcher=stand.launcher, timeout=LIMIT,
    )  # fmt: skip
    x, idx, _ = batch(0, tokens, EXPERTS, TOPK, hidden)
    values, scales = cast.to_fp8(x, block=BLOCK)
    there = [t.to(stand.device) for t in (values, idx, scales)]

    def step() -> None:
        a.dispatch_send(there[0], there[1], scales=there[2])
        a.dispatch_recv(stride=tokens)

    step()
    a.check()
    replay = stand.capture(step)
    steps = a._steps
    assert steps is not None
    completed = steps._box.completed.numpy()
    times = []
    for _ in range(replays):
        a.check()
        before = int(completed[0])
        begin = time.perf_counter()
        replay()
        until(lambda b=before: int(completed[0]) > b, "a command")  # type: ignore[misc]
        times.append(time.perf_counter() - begin)
    a.check()
    a.close()
    return times


def percentiles(times: Sequence[float]) -> tuple[float, float]:
    """Half and 99 of a hundred are below, in microseconds."""
    half, most = np.percentile(times, (50, 99))
    return float(half) * 1e6, float(most) * 1e6


def _index(stand: Stand) -> int | None:
    return stand.device.index if stand.device.type == "cuda" else None
