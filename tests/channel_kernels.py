"""What the kernels of the channel promise, on whatever device a launcher has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from fabric_ray.kernels import Channel, Waited, Words
from fabric_ray.kernels.launch import Launcher

LAP = 1 << 63
LIMIT = 60.0


class Shared:
    """Words that host and device see: pinned if there is a device."""

    def __init__(self, n: int, device: str) -> None:
        self.tensor = torch.zeros(n, dtype=torch.int64, pin_memory=device != "cpu")
        self.words = self.tensor.numpy().view(np.uint64)
        self.address = self.tensor.data_ptr()


class Proxy:
    """The host's end of a FIFO: a command is there when both its words show the lap."""

    def __init__(
        self, launcher: Launcher, device: str, capacity: int, timeout: float = LIMIT
    ) -> None:
        self.slots = Shared(2 * capacity, device)
        self.completed = Shared(1, device)
        self.abort = Shared(1, device)
        self.pushers = torch.zeros(2, dtype=torch.int64, device=device)
        self.capacity = capacity
        self.commands: list[tuple[int, int]] = []
        words = Words(self.slots.address, self.pushers.data_ptr(), self.completed.address, capacity)
        self.channel = Channel(launcher, words, abort=self.abort.address, timeout=timeout)

    def poll(self) -> bool:
        index = len(self.commands)
        lap = 0 if index & self.capacity else LAP
        place = 2 * (index % self.capacity)
        first, second = (int(word) for word in self.slots.words[place : place + 2])
        if first & LAP != lap or second & LAP != lap:
            return False
        self.commands.append((first & ~LAP, second & ~LAP))
        return True

    def complete(self) -> None:
        self.completed.words[0] = len(self.commands)


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def some_commands(n: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(n)
    words = torch.randint(0, (1 << 63) - 1, (n, 2), dtype=torch.int64, generator=dice)
    words[:, 0] = words[:, 0] // 1000 * 1000 + torch.arange(n) % 1000
    return words


def check_push(launcher: Launcher, device: str, *, n: int, capacity: int, at_once: bool) -> None:
    """Every command once and whole, over many laps, however slow the host is."""
    proxy = Proxy(launcher, device, capacity)
    commands = some_commands(n).to(device)
    count = torch.tensor([n], dtype=torch.int32, device=device)
    indices = torch.zeros(n, dtype=torch.int64, device=device)
    waited = torch.full((n,), 9, dtype=torch.int32, device=device)

    def push() -> None:
        proxy.channel.push(commands, count, indices, waited, at_once=at_once)

    thread = beside(push)
    end = time.monotonic() + LIMIT
    while len(proxy.commands) < n:
        assert time.monotonic() < end, f"{len(proxy.commands)} of {n} commands came"
        if not proxy.poll():
            proxy.complete()  # only when the FIFO looks empty: pushers wait for room
    proxy.complete()
    thread.join()
    finish(device)
    assert not proxy.poll()
    assert set(waited.tolist()) <= {Waited.READY}
    came = np.array(proxy.commands, dtype=np.uint64)
    wanted = commands.cpu().numpy().view(np.uint64)
    assert sorted(indices.tolist()) == list(range(n))
    np.testing.assert_array_equal(came[indices.cpu().numpy()], wanted)


def check_full(launcher: Launcher, device: str) -> None:
    """A host that takes nothing: the wait for room ends, and nothing is written over."""
    for aborts, how in ((False, Waited.TIMED_OUT), (True, Waited.ABORTED)):
        proxy = Proxy(launcher, device, 32, timeout=LIMIT if aborts else 0.02)
        proxy.abort.words[0] = int(aborts)
        commands = some_commands(40).to(device)
        count = torch.tensor([40], dtype=torch.int32, device=device)
        indices = torch.zeros(40, dtype=torch.int64, device=device)
        waited = torch.full((40,), 9, dtype=torch.int32, device=device)
        proxy.channel.push(commands, count, indices, waited, at_once=False)
        finish(device)
        ends = waited.tolist()
        assert ends.count(Waited.READY) == 32
        assert ends.count(how) == 8
        assert indices.tolist().count(-1) == 8
        while proxy.poll():
            pass
        pushed = indices.cpu().numpy()
        wanted = commands.cpu().numpy().view(np.uint64)[pushed >= 0]
        came = np.array(proxy.commands, dtype=np.uint64)
        np.testing.assert_array_equal(came[pushed[pushed >= 0]], wanted)


def check_wait_command(launcher: Launcher, device: str) -> None:
    proxy = Proxy(launcher, device, 32)
    index = torch.tensor([5], dtype=torch.int64, device=device)
    waited = torch.full((1,), 9, dtype=torch.int32, device=device)
    thread = beside(lambda: proxy.channel.wait_command(index, waited))
    proxy.completed.words[0] = 6
    thread.join()
    finish(device)
    assert waited.item() == Waited.READY
    proxy.completed.words[0] = 5
    proxy.abort.words[0] = 1
    proxy.channel.wait_command(index, waited)
    finish(device)
    assert waited.item() == Waited.ABORTED, "completed up to, not including"


def check_wait_word(launcher: Launcher, device: str) -> None:
    """RS-4: a wait ends by the word, by the abort word, or by the clock."""
    word, abort = Shared(1, device), Shared(1, device)
    value = torch.tensor([3], dtype=torch.int64, device=device)
    waited = torch.full((1,), 9, dtype=torch.int32, device=device)
    channel = Channel(launcher, abort=abort.address, timeout=LIMIT)
    thread = beside(lambda: channel.wait_word(word.address, value, waited))
    for now in (1, 2, 4):
        word.words[0] = now
    thread.join()
    finish(device)
    assert waited.item() == Waited.READY

    word.words[0] = 2
    thread = beside(lambda: channel.wait_word(word.address, value, waited))
    abort.words[0] = 1
    thread.join()
    finish(device)
    assert waited.item() == Waited.ABORTED

    hasty = Channel(launcher, timeout=0.01)
    hasty.wait_word(word.address, value, waited)
    finish(device)
    assert waited.item() == Waited.TIMED_OUT

    gate = torch.ones(1, dtype=torch.int64, device=device)
    for now, left in ((4, 1), (2, 0), (4, 0)):
        word.words[0] = now
        hasty.wait_word(word.address, value, waited, gate=gate)
        finish(device)
        assert gate.item() == left, "it stays closed"


def finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
