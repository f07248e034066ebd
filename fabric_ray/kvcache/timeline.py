"""When the layers of a prompt were computed, posted and delivered."""

from __future__ import annotations

import msgspec


class LayerTimes(msgspec.Struct, frozen=True):
    """One layer of a job; nanoseconds of the clock behind ``time.monotonic_ns``.

    ``None`` where it hasn't come so far, or nothing of the layer had to be sent. Of a prompt that
    is computed in chunks they are those of the last one.
    """

    layer: int
    """Its number in the model."""
    computed: int | None
    """It was said to be in the cache; where a kernel counts, it was seen to be."""
    posted: int | None
    """The last of its pages was given to the engines."""
    delivered: int | None
    """The last of its pages is known to be in the decoder's memory."""
