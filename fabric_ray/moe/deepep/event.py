"""DeepEP's events, without a device: the work of a call is done when it returns."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class EventOverlap:
    """What a call returns as its event; waiting for it returns at once.

    A call whose second half is still to come hands out a hook, not an event.
    """

    def __init__(self, event: Any = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """There is no stream that could run ahead."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()
