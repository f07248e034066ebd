"""Reads request bodies, with limits on bytes, time and the number of connections."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from fabric_ray.serve.errors import BodyTimeout, Busy, TooLarge


class BodyReader:
    """Reads the bodies of requests that hold no slot yet.

    When ``max_open`` bodies are being read, a new one displaces the oldest. Idle connections
    therefore can't keep out new requests.

    Args:
        max_bytes: most bytes of one body.
        max_open: most bodies that are read at the same time.
        timeout: seconds from a request's headers to the end of its body.
    """

    def __init__(self, *, max_bytes: int, max_open: int, timeout: float) -> None:
        self._max_bytes, self._max_open, self._timeout = max_bytes, max_open, timeout
        self._open: dict[asyncio.Task[bytes], None] = {}
        self.timed_out = 0
        """Bodies that didn't arrive in time or were displaced."""

    @property
    def open(self) -> int:
        """Number of bodies that are being read."""
        return len(self._open)

    async def read(self, request: Request) -> bytes:
        """The whole body.

        Raises:
            TooLarge: the body has more than ``max_bytes``.
            BodyTimeout: the body took longer than ``timeout``.
            Busy: it was displaced.
        """
        if len(self._open) >= self._max_open:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        reading = asyncio.ensure_future(read_body(request, self._max_bytes))
        self._open[reading] = None
        try:
            await asyncio.wait([reading], timeout=self._timeout)
        finally:
            self._open.pop(reading, None)
            unfinished = not reading.done()
            reading.cancel()
        if unfinished:
            self.timed_out += 1
            raise BodyTimeout(
                f"the body did not arrive within {self._timeout:g} s; send the whole body with "
                "the headers"
            )
        if reading.cancelled():
            self.timed_out += 1
            raise Busy(f"{self._max_open} newer requests came before the body; try again later")
        return reading.result()


async def read_body(request: Request, most: int) -> bytes:
    """Reads a request's body.

    Raises:
        TooLarge: the body has more than ``most`` bytes; the rest isn't read.
    """
    header = request.headers.get("content-length", "")
    body, length = bytearray(), int(header) if header.isdecimal() else 0
    if length <= most:
        async for part in request.stream():
            body += part
            length = max(length, len(body))
            if length > most:
                break
    if length > most:
        raise TooLarge(
            f"the body has more than {most} bytes; shorten the prompt, or raise router.max_body"
        )
    return bytes(body)
