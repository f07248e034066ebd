"""When the layers of a prompt were computed, posted and delivered."""

from __future__ import annotations

import msgspec


class LayerTimes(msgspec.Struct, frozen=True):
    """Times of one layer of a job, in nanoseconds of ``time.monotonic_ns``'s clock.

    ``None`` where the event has not happened, or the layer had nothing to send. For a prompt that
    is computed in chunks, the times are those of the last chunk.
    """

    layer: int
    """Its number in the model."""
    computed: int | None
    """The layer was reported as computed, or its count was seen."""
    posted: int | None
    """The last of its pages was posted."""
    delivered: int | None
    """The last of its pages was confirmed to be in the decoder's memory."""
