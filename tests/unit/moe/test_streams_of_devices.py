"""Streams and captures are those of the GPU that holds the tensors, whichever GPU is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fabric_ray.moe.deepep.event import EventHandle, EventOverlap, Mark, behind
from fabric_ray.moe.device_memory import is_captured

CURRENT, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Event:
    """Notes the stream that it is recorded on."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    @property
    def device(self) -> torch.device:
        assert self.stream is not None
        return self.stream.device

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Cuda.now.current_stream()


class Stream:
    """Notes what it waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)


class Cuda:
    """Two GPUs, the first of them current; one stream each."""

    now: Cuda

    def __init__(self) -> None:
        self.streams = {gpu: Stream(gpu) for gpu in (CURRENT, OTHER)}
        self.current, self.captured = CURRENT, set[torch.device]()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.streams[device or self.current]

    def is_current_stream_capturing(self) -> bool:
        return self.current in self.captured

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with self.device(stream.device):
            yield


class OnOther(torch.Tensor):
    """Host memory that says that it is the other GPU's."""

    device = OTHER
    is_cuda = True
    used_on: Any = None

    def record_stream(self, stream: Any) -> None:
        self.used_on = stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    Cuda.now = two = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("current_stream", "is_current_stream_capturing", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(two, name))
    return two


def test_an_event_is_behind_what_made_the_tensor(cuda: Cuda) -> None:
    tensor = torch.zeros(1).as_subclass(OnOther)
    overlap = behind(True, tensor)
    assert tensor.used_on is cuda.streams[OTHER]
    assert isinstance(overlap.event, EventHandle)
    overlap.current_stream_wait()
    [waited] = cuda.streams[OTHER].waits
    assert waited.stream is cuda.streams[OTHER]
    assert cuda.streams[CURRENT].waits == [waited]


def test_a_stream_of_the_event_s_gpu_waits(cuda: Cuda) -> None:
    event = Event()
    event.record(cuda.streams[OTHER])
    EventOverlap(event).current_stream_wait()
    assert cuda.streams[OTHER].waits == [event]


def test_a_capture_is_that_of_the_device(cuda: Cuda) -> None:
    cuda.captured = {OTHER}
    assert is_captured(OTHER)
    assert not is_captured(CURRENT)
    assert not is_captured(torch.device("cpu"))


@pytest.mark.parametrize("captured_then", [False, True])
@pytest.mark.parametrize("captured_now", [False, True])
def test_a_mark_is_waited_for_in_the_same_capture_of_its_device(
    captured_then: bool, captured_now: bool, cuda: Cuda
) -> None:
    cuda.captured = {OTHER} if captured_then else {CURRENT}
    mark = Mark(OTHER)
    cuda.captured = {OTHER} if captured_now else set()
    mark.wait()
    assert bool(cuda.streams[OTHER].waits) == (captured_then == captured_now)
