"""Writes over every pair of links of this host, with their bytes compared."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_ray.doctor.findings import Finding, Status
from fabric_ray.engine import TransferEngine
from fabric_ray.errors import FabricError

_NBYTES = 1 << 20
_AT_ONCE = 4
NOT_TRIED = "not tried: the time is over"
MORE_TIME = "give it a longer --budget"


@dataclass(frozen=True)
class Link:
    """One end of a link: a transport, and its NIC if it has one."""

    transport: str
    nic: str = ""
    provider: str | None = None

    @property
    def label(self) -> str:
        return f"{self.transport} {self.nic}".rstrip()

    def open(self, name: str, token: bytes, timeout: float, **options: Any) -> TransferEngine:
        """Opens an engine with this transport and NIC only; ``options`` are fields of its
        configuration."""
        return TransferEngine(
            name=name,
            transport=self.transport,
            nics=(self.nic,) if self.nic else (),
            libfabric_provider=self.provider,
            token=token,
            # FABRIC_RAY_REQUIRE is for users' engines, not for each link.
            require=None,
            op_timeout=timeout,
            **options,
        )


def writes(links: Sequence[Link], budget: float) -> Iterator[Finding]:
    """Writes between all links of each transport, in both directions, and compares the bytes.

    Args:
        links: the links of this host.
        budget: seconds for all writes.
    """
    token = secrets.token_bytes(16)
    end = time.monotonic() + budget
    with contextlib.ExitStack() as stack:
        senders: dict[Link, TransferEngine] = {}
        receivers: dict[Link, TransferEngine] = {}
        for link in links:
            try:
                for end_, engines in (("from", senders), ("to", receivers)):
                    name = f"doctor-{end_}-{link.label}"
                    # Nothing leaves this host: no port of FABRIC_RAY_PORTS is needed.
                    engine = link.open(name, token, budget, ports=None)
                    engines[link] = stack.enter_context(engine)
            except FabricError as error:
                yield Finding("open", link.label, "fail", str(error))
        pairs = [
            (a, b)
            for a in senders
            for b in receivers
            if (a.transport, a.provider) == (b.transport, b.provider)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from pool.map(
                lambda pair: _write(pair, senders[pair[0]], receivers[pair[1]], end), pairs
            )


def _write(
    pair: tuple[Link, Link], sender: TransferEngine, receiver: TransferEngine, end: float
) -> Finding:
    a, b = pair
    # NICs of different rails need not reach each other.
    status: Status = "fail" if a == b else "warn"
    subject = a.label if a == b else f"{a.label} to {b.label}"
    left = end - time.monotonic()
    if left <= 0:
        return Finding("write", subject, status, NOT_TRIED, MORE_TIME)
    try:
        took, transport = _round(sender, receiver, left)
    except (FabricError, TimeoutError) as error:
        return Finding("write", subject, status, str(error))
    detail = f"{_NBYTES >> 20} MiB over {transport}, every byte compared, {took * 1e3:.1f} ms"
    return Finding("write", subject, "ok", detail)


def _round(
    sender: TransferEngine, receiver: TransferEngine, timeout: float
) -> tuple[float, str | None]:
    src, dst = sender.alloc(_NBYTES), receiver.alloc(_NBYTES)
    sent = np.frombuffer(secrets.token_bytes(_NBYTES), dtype=np.uint8)
    src.numpy()[:] = sent
    counter = receiver.counter()
    there = sender.import_region(dst.descriptor())
    began = time.monotonic()
    transfer = sender.write(src, there, imm=counter.ref, timeout=timeout)
    # The sender knows why a write fails; its receiver would wait until the time is over.
    transfer.wait(timeout)
    counter.wait(1, timeout=timeout)
    took = time.monotonic() - began
    if not np.array_equal(dst.numpy(), sent):
        raise FabricError("the bytes that arrived differ from the bytes that were sent")
    return took, transfer.transport
