"""A transfer that may be posted again and again, the notification after it, and its handle."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fabric_ray.compat.addresses import EmptyTransfer, Op, submit
from fabric_ray.compat.nixl.status import (
    NixlError,
    as_nixl,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
)
from fabric_ray.engine import Batch, Region, Transfer, TransferEngine
from fabric_ray.engine.memory import is_free_here
from fabric_ray.errors import FabricError, Stale

if TYPE_CHECKING:
    from fabric_ray.compat.nixl.agent import nixl_agent

_QUIESCE_S = 2.0

Notify = Callable[[bytes], "Transfer | None"]
"""Sends a notification; ``None`` if that was over at once."""


class nixlXferTelemetry(NamedTuple):
    """Of the last time that a request was posted; times are microseconds."""

    startTime: int
    """Since the epoch."""
    postDuration: int
    xferDuration: int
    """From the post until it was over, the notification included."""
    totalBytes: int
    descCount: int


class Request:
    """What is copied where, and which agent is told. For any thread.

    Args:
        copies: the batch, its bytes, its descriptors, and the local regions.
        notify: tells the remote agent.
        message: what it is told when nothing else is said at the post; nothing if empty.
        backend: the name of its backend.
        on_disconnect: called when the remote agent was lost, before the error is raised.
    """

    def __init__(
        self,
        engine: TransferEngine,
        op: Op,
        copies: tuple[Batch, int, int, list[Region]],
        notify: Notify,
        message: bytes,
        backend: str,
        on_disconnect: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._notify, self._on_disconnect = engine, notify, on_disconnect
        self._op, (self._batch, self._nbytes, self._count, self._regions) = op, copies
        self.message, self.backend = message, backend
        self._lock = threading.Lock()
        self._transfer: Transfer | EmptyTransfer | None = None
        self._notice: Transfer | None = None
        self._error: NixlError | None = None
        self._over = False
        self._started = self._posted = self._ended = 0.0
        self._epoch = 0.0

    def post(self, message: bytes) -> bool:
        """Begins; whether it was over at once.

        Raises:
            nixlRepostActiveError: it is under way.
            nixlNotFoundError: local memory of it was deregistered.
            NixlError: it can't be sent.
        """
        with self._lock:
            if self._transfer is not None and not self._over:
                raise nixlRepostActiveError("the request is under way; post it when it is over")
            self.message = message or self.message
            self._notice, self._error, self._over = None, None, False
            self._epoch, self._started = time.time(), time.perf_counter()
            try:
                self._transfer = submit(self._engine, self._batch)
            except FabricError as error:
                self._transfer = None
                raise self._as_nixl(error) from error
            transfer = self._transfer
            self._posted = time.perf_counter()
        transfer.add_done_callback(lambda _: self._advance(transfer))
        return self.check()

    def check(self) -> bool:
        """Whether it is over.

        Raises:
            nixlNotPostedError: it was never posted.
            NixlError: what it failed with.
        """
        with self._lock:
            transfer = self._transfer
        if transfer is None:
            raise nixlNotPostedError("the request was not posted; call transfer() first")
        self._advance(transfer)
        if self._over and self._error is not None:
            raise self._error
        return self._over

    def cancel(self) -> None:
        """Returns when it touches no memory of this process any more.

        Raises:
            nixlBackendError: that can't be shown; its buffers must be kept, and this tried again.
        """
        with self._lock:
            transfer = self._transfer
            if transfer is None:
                return
            transfer.cancel()
        if not is_free_here(self._engine, transfer.wait_quiesced(_QUIESCE_S)):
            raise nixlBackendError(
                "bytes of the cancelled request may still land; keep its buffers, and release it "
                "again later or close the agent"
            )

    def give_up(self) -> None:
        """Ends it, but waits for nothing and takes no lock; :meth:`cancel` comes later."""
        transfer = self._transfer
        if transfer is not None:
            transfer.cancel()

    def telemetry(self) -> nixlXferTelemetry:
        """
        Raises:
            nixlNotAllowedError: it is not over.
        """
        if not self._over:
            raise nixlNotAllowedError("the request is not over; ask when it is")
        post, whole = self._posted - self._started, self._ended - self._started
        return nixlXferTelemetry(
            startTime=round(1e6 * self._epoch),
            postDuration=_microseconds(post),
            xferDuration=_microseconds(whole),
            totalBytes=self._nbytes,
            descCount=self._count,
        )

    def _advance(self, transfer: Transfer | EmptyTransfer) -> None:
        """Tells the peer when the bytes are in place: from whichever thread sees that first."""
        with self._lock:
            if transfer is not self._transfer or self._over or not transfer.done():
                return
            try:
                transfer.result()
                if self._notice is None and self.message:
                    self._notice = self._notify(self.message)
                    if self._notice is not None:
                        self._notice.add_done_callback(lambda _: self._later(transfer))
                if self._notice is not None:
                    if not self._notice.done():
                        return
                    self._notice.result()
            except FabricError as error:
                # Callers reuse buffers once they know of an error (MR-1).
                quiesced = transfer.quiesced
                if quiesced is False:
                    return
                found, landed = self._as_nixl(error), quiesced is True
                if self._op == "read":
                    landed = is_free_here(self._engine, quiesced)
                self._error = found if landed else _may_land(error)
            self._ended = time.perf_counter()
            self._over = True

    def _as_nixl(self, error: FabricError) -> NixlError:
        if isinstance(error, Stale) and any(map(_has_ended, self._regions)):
            return nixlNotFoundError(str(error), **error.fields)  # the other agent isn't lost
        found = as_nixl(error)
        if self._on_disconnect is not None and isinstance(found, nixlRemoteDisconnectError):
            self._on_disconnect()
        return found

    def _later(self, transfer: Transfer | EmptyTransfer) -> None:
        # A callback that is hung on what is over runs at once, while the lock is held.
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._advance(transfer)


def _has_ended(region: Region) -> bool:
    try:
        region.sync()
    except Stale:
        return True
    return False


def _microseconds(seconds: float) -> int:
    return max(1, round(1e6 * seconds))


def _may_land(error: FabricError) -> nixlBackendError:
    """The error of a transfer of which it can't be known whether it still writes."""
    found = nixlBackendError(f"{error}; bytes of it may still land: keep its buffers")
    found.__cause__ = error
    return found


class DroppedRequests:
    """Requests whose handles the caller dropped without a release. For any thread."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self._may_land: list[Request] = []
        """Kept until the agent is closed."""

    def release(self) -> None:
        """Waits until nothing of them can land any more."""
        while self.waiting:
            try:
                request = self.waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                request.cancel()
            except nixlBackendError:
                self._may_land.append(request)


class nixl_xfer_handle:
    """A transfer."""

    def __init__(self, agent: nixl_agent, request: Request) -> None:
        self._agent, self._made, self._released = agent, request, False
        self._releasing = threading.Lock()

    @property
    def _request(self) -> Request:
        if self._released:
            raise nixlInvalidParamError("the transfer was released; make another")
        return self._made

    def release(self) -> None:
        """See :meth:`nixl_agent.release_xfer_handle`. Any thread may call it more than once."""
        with self._releasing:
            if not self._released:
                self._made.cancel()
                self._released = True

    def __del__(self) -> None:
        # The garbage collector may run while this thread holds a lock of the request: cancel
        # without one, and leave waiting for it to the agent's next call.
        if not self._released:
            self._made.give_up()
            self._agent._dropped.waiting.append(self._made)
