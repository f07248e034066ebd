"""DeepEP's events: when what a call launched is over, on the stream that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe.device_memory import Mark


class EventHandle:
    """DeepEP's event by itself: behind what torch's current stream has been given when it is made;
    over at once without a GPU.

    Args:
        device: the GPU whose current stream it is; by default that of the current GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def current_stream_wait(self) -> None:
        """As :meth:`EventOverlap.current_stream_wait`."""
        if self._event is not None:
            _wait(self._event)


class EventOverlap:
    """What a call returns as its event.

    On the host the work of a call is done when it returns, and waiting returns at once. A call
    whose second half is still to come hands out a hook, not an event.

    Args:
        event: an :class:`EventHandle`, a ``torch.cuda.Event`` that was recorded, or ``None`` for
            work that is done.
        extra_tensors: kept until this is let go.
    """

    def __init__(self, event: Any = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release_on_exit = False
        self._masked: Callable[[], Iterable[int]] = tuple

    @property
    def left_out(self) -> frozenset[int]:
        """Ranks that the buffer has given up by now: the call's result lacks the part of those that
        were given up before it. Empty unless the buffer shrinks or the caller masked ranks; on a
        device, call ``Buffer.check()`` before."""
        return frozenset(self._masked())

    def naming(self, masked: Callable[[], Iterable[int]]) -> Self:
        """Itself, with where :attr:`left_out` is found."""
        self._masked = masked
        return self

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """What is launched on torch's current stream from now on waits for the event, on the
        event's GPU and on the current one; the host doesn't. Then the registered hook runs, once.

        Args:
            release_handle: lets go of the event, and of the tensors that are kept for it.
        """
        if isinstance(self.event, EventHandle):
            self.event.current_stream_wait()
        elif self.event is not None:
            _wait(self.event)
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = self.extra_tensors = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Calls the hook at the end of the next wait.

        Raises:
            InvalidArgument: there is one.
        """
        if self.hook_after_wait is not None:
            raise InvalidArgument("a hook is registered already; wait for the event first")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """Itself: ``with event(release_handle=True): ...`` waits at the end, and lets go."""
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        release, self._release_on_exit = self._release_on_exit, False
        self.current_stream_wait(release)


class Streams:
    """On which streams of a device calls run: torch's current one, or one beside it."""

    def __init__(self) -> None:
        self._beside: dict[torch.device, torch.cuda.Stream] = {}
        self._last: dict[torch.device, Mark] = {}

    def beside(self, device: torch.device) -> torch.cuda.Stream:
        """The one of calls that the current stream doesn't wait for."""
        if (stream := self._beside.get(device)) is None:
            fresh = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._beside.setdefault(device, fresh)  # the same for all threads
        return stream

    def join(self, device: torch.device) -> None:
        """What follows on the current stream waits for calls that ran beside it: an exchange's
        calls come one after the other."""
        last = self._last.pop(device, None)
        if last is not None:
            last.wait()

    def behind(self, device: torch.device, hook: Callable[[], None]) -> Callable[[], None]:
        """The hook, on whichever stream is current then, behind what this one has been given."""
        sent = Mark(device)

        def received() -> None:
            sent.wait()
            hook()

        return received

    @contextmanager
    def run_beside(self, device: torch.device, used: tuple[Tensor, ...]) -> Iterator[EventOverlap]:
        """Runs what is in it on the stream beside, behind what the current one has been given.

        Args:
            used: what is read and written there and belongs to the current stream.

        Yields:
            the event, recorded when the block is left, by an error too: what was launched before
            it uses the exchange.
        """
        stream, found = self.beside(device), EventOverlap()
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in used:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            try:
                yield found
            finally:
                last = self._last[device] = Mark(device)
                found.event = last.event


def _wait(event: torch.cuda.Event) -> None:
    for stream in {torch.cuda.current_stream(), torch.cuda.current_stream(event.device)}:
        stream.wait_event(event)


def keep(*tensors: Tensor) -> None:
    """Memory that was made on another stream isn't used anew before the current one is done with
    it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def captured(device: torch.device | None = None) -> EventOverlap:
    """An event behind what torch's current stream on a GPU, by default the current one, has been
    given; over, if there is no GPU."""
    return EventOverlap(EventHandle(device))


def behind(asynchronous: bool, first: Tensor, *others: Tensor | None) -> EventOverlap:
    """An event behind the call that read these tensors; none where the host made it, unless the
    caller asked for an event. As in DeepEP, tensors of such a call may be let go of on the stream
    that made them."""
    if asynchronous:
        keep(first, *(tensor for tensor in others if tensor is not None))
    if first.is_cuda:
        return captured(first.device)
    return captured() if asynchronous else EventOverlap()
