"""Waits of the host for what a device does in an exchange."""

from __future__ import annotations

import time

import torch

from fabric_ray._native import MoeExchange
from fabric_ray.errors import Cancelled, Unsupported
from fabric_ray.moe.mailbox import Mailbox

#: Seconds after which a wait for a part of a stream asks for errors of the device.
_LOOK = 1.0


def finish(native: MoeExchange, box: Mailbox, device: torch.device, limit: float) -> None:
    """As :meth:`fabric_ray.moe.device.DeviceSteps.finish`, waiting ``limit`` seconds for the host.

    Raises:
        Cancelled: the host has not caught up then.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    pushed = int(box.pushers[0].item())
    end = time.monotonic() + limit
    while int(box.completed[0]) < pushed or native.begins:
        if box.aborted:
            return
        if time.monotonic() > end:
            raise Cancelled(
                f"the host did not process the device's commands within {limit:g} s; call again, "
                "or raise the timeout"
            )
        time.sleep(50e-6)


def arriving(native: MoeExchange, ticket: int, device: torch.device, limit: float) -> list[int]:
    """As :meth:`fabric_ray.moe.AllToAll.arriving`, of the dispatch with this ticket; waits
    ``limit`` seconds at most, and for nothing else of the device."""
    if not ticket:
        raise Unsupported(
            "a dispatch in a CUDA graph can't be waited for on the host; give dispatch_recv no "
            "counts"
        )
    end = time.monotonic() + limit
    while (counts := native.arriving_on_device(ticket, min(limit, _LOOK))) is None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # raises what a kernel met
        if time.monotonic() > end:
            raise Cancelled(
                f"the device did not reach dispatch_send within {limit:g} s; call again, or raise "
                "the timeout"
            )
    return counts
