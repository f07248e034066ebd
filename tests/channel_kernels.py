"""What the kernels of the channel promise, on whatever device a launcher has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from fabric_ray.kernels import Channel, Waited, Words
from fabric_ray.kernels.channel import add_command
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


def check_fetch(launcher: Launcher, device: str) -> None:
    """RS-1: a table comes with its word; without that, what stands for it."""
    word, table = Shared(1, device), Shared(40, device)
    value = torch.tensor([3], dtype=torch.int64, device=device)
    waited = torch.full((1,), 9, dtype=torch.int32, device=device)
    gate = torch.ones(1, dtype=torch.int64, device=device)
    into = torch.zeros(40, dtype=torch.int64, device=device)

    def fetch(timeout: float) -> None:
        channel = Channel(launcher, timeout=timeout)
        where = {"word": word.address, "value": value, "closed": 7}
        channel.fetch_words(table.tensor, into, waited, gate, **where)  # type: ignore[arg-type]

    thread = beside(lambda: fetch(LIMIT))
    table.tensor.copy_(torch.arange(100, 140))
    word.words[0] = 3
    thread.join()
    finish(device)
    assert into.tolist() == [*range(100, 140)]
    assert (waited.item(), gate.item()) == (Waited.READY, 1)
    for come in (2, 3):
        word.words[0] = come
        fetch(0.01)
        finish(device)
        assert gate.item() == 0, "it stays closed"
        assert into.tolist() == [7] * 40

    # A table that its host clears as it aborts counts as none, though its word has come.
    abort = Shared(1, device)
    channel = Channel(launcher, abort=abort.address, timeout=LIMIT)
    for aborted, want in ((0, [*range(100, 140)]), (1, [7] * 40)):
        abort.words[0] = aborted
        gate.fill_(1)
        channel.fetch_words(
            table.tensor, into, waited, gate, word=word.address, value=value, closed=7
        )
        finish(device)
        assert into.tolist() == want


def check_begin(launcher: Launcher, device: str) -> None:
    """MR-1: tokens count unless the exchange before isn't over."""
    over = Shared(1, device)
    values = torch.tensor([-2, 0, 5], dtype=torch.int64, device=device)
    grows = torch.tensor([2, 1, 4], dtype=torch.int64, device=device)
    given, now = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    waited = torch.full((1,), 9, dtype=torch.int32, device=device)
    gate = torch.ones(1, dtype=torch.int64, device=device)
    channel = Channel(launcher, timeout=0.01)
    for tokens, packed, want in ((5, 5, [0, 1, 9]), (6, 6, [2, 2, 13]), (7, 0, [4, 3, 17])):
        # What was summed has added one; the third begins too early.
        values[0] += int(tokens == 6)
        over.words[0] = 3 if tokens > 5 else 0
        channel.begin_exchange(over.address, (values, grows), tokens, (given, now), waited, gate)
        finish(device)
        assert values.tolist() == want
        assert (given.item(), now.item()) == (tokens, packed)
    assert (waited.item(), gate.item()) == (Waited.TIMED_OUT, 0)


def check_tell(launcher: Launcher, device: str) -> None:
    """A command comes after what the host reads with it, and says when a wait has failed."""
    proxy = Proxy(launcher, device, 32)
    note, told = torch.arange(50, 90, device=device), Shared(40, device)
    gate = torch.ones(1, dtype=torch.int64, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    waited = torch.full((1,), 9, dtype=torch.int32, device=device)
    command = add_command(3, 2, 0)
    for turn in range(40):
        gate.fill_(int(turn < 35))
        proxy.channel.tell_host(
            command, gate, index, waited, note=(note, told.tensor), counter=counter
        )
        finish(device)
        assert proxy.poll()
        proxy.complete()
        assert told.tensor.tolist() == note.tolist()
        assert proxy.commands[-1] == (command[0] & ~LAP | int(turn < 35), command[1])
        assert (index.item(), counter.item(), waited.item()) == (turn, turn + 1, Waited.READY)
        note += 1
    proxy.channel.tell_host(command, gate, index, waited)
    finish(device)
    assert counter.item() == 40
