"""When a worker's kernels are through: what is to happen then, happens in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

_Call = Callable[[], object]


class Stream:
    """Calls functions when all that was given to the device before them is done.

    On the host that is at once. On a GPU a thread waits for an event of the current stream: vLLM's
    hooks run when kernels are launched, not when they have run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = None
        if device.type == "cuda":
            import torch

            self._cuda, self._device = torch.cuda, device
            self._queue: queue.SimpleQueue[tuple[Any, _Call] | None] = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._follow, name="fabric-kv-stream")
            self._thread.daemon = True
            self._thread.start()

    def then(self, call: _Call) -> None:
        """Calls it when the device has done what it was given so far."""
        if self._cuda is None:
            call()
            return
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self._device))
        self._queue.put((event, call))

    def close(self) -> None:
        """Ends the thread after what it was given."""
        if self._cuda is not None:
            self._queue.put(None)
            self._thread.join()

    def _follow(self) -> None:
        while (item := self._queue.get()) is not None:
            event, call = item
            try:
                event.synchronize()
                call()
            except Exception:
                # Without it decoders lack pages, and say so by their deadline.
                _LOG.exception("a layer's pages could not be announced")
