"""The waiting doctor: serves one visit of the doctor of another host."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from typing_extensions import Self

from fabric_ray import __version__
from fabric_ray.doctor import line as messages
from fabric_ray.doctor.devices import nowhere, survey
from fabric_ray.doctor.examine import links
from fabric_ray.doctor.findings import Report
from fabric_ray.doctor.line import End, Invitation, Line
from fabric_ray.doctor.speed import NBYTES, digest, send
from fabric_ray.doctor.writes import Link
from fabric_ray.engine import Counter, EngineAddress, EngineConfig, Region, TransferEngine
from fabric_ray.errors import (
    DecodeError,
    FabricError,
    InvalidArgument,
    PeerLost,
    TransferTimeout,
    Unreachable,
)

STEP_S = 20.0
"""Seconds for one step of a visit."""
_VISIT_S = 600.0
_REJECT_S = 2.0
"""Seconds for the answer to a second visitor; the first one waits meanwhile."""


class Host:
    """Serves one visit, and returns the visitor's findings.

    Args:
        provider: libfabric provider; efa by default.
        nics: names or globs of this host's NICs; all by default.
        token: by default ``FABRIC_RAY_TOKEN``; without one the invitation holds a random secret.

    Raises:
        InvalidArgument: a name matches no NIC of this host.
        FabricError: no engine opens; see :class:`fabric_ray.TransferEngine`.
    """

    def __init__(
        self,
        *,
        provider: str | None = None,
        nics: Sequence[str] = (),
        token: bytes | None = None,
    ) -> None:
        found = survey(nics, provider)
        for missing in nowhere(found, nics):
            raise InvalidArgument(f"{missing.subject}: {missing.detail}; {missing.remedy}")
        self._ends = [End(e.transport, e.nic, e.provider) for e in links(found, provider, nics)]
        configured = token or EngineConfig.resolve(None, {}).token
        secret = None if configured else secrets.token_bytes(16)
        self._token = configured or secret or b""
        self.engine = TransferEngine(name=socket.gethostname(), token=self._token)
        self._line = Line(self.engine)
        self.invitation = Invitation(self.engine.address.to_bytes(), secret)
        self._target: tuple[TransferEngine, Region, Counter] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Accepts no more visits."""
        self._close_target()
        self.engine.close()

    def wait(self, seconds: float, on_visit: Callable[[str], object] | None = None) -> Report:
        """Serves one visitor.

        Args:
            seconds: timeout for its arrival.
            on_visit: called with the visitor's name on arrival.

        Returns:
            The visitor's findings.

        Raises:
            TransferTimeout: no visitor came.
            FabricError: the visitor was lost.
        """
        address, number = self._accept(seconds)
        began = time.monotonic()
        if on_visit is not None:
            on_visit(address.name)
        self._line.connect(address, _VISIT_S)
        self._line.send(messages.Welcome(__version__, self._ends), STEP_S, number=number)
        while (received := self._line.receive(_VISIT_S)) is not None:
            sender, envelope = received
            if sender != address.id:
                self._reject(envelope)
            elif isinstance(envelope, DecodeError):
                raise envelope
            elif isinstance(envelope.message, messages.Bye):
                return Report(tuple(envelope.message.findings), time.monotonic() - began)
            else:
                self._line.send(self._answer(envelope.message), STEP_S, number=envelope.number)
        raise TransferTimeout(f"{address.name} sent no request for {_VISIT_S:.0f} s")

    def _accept(self, seconds: float) -> tuple[EngineAddress, int]:
        """The visitor's address, and the number of its request."""
        end = time.monotonic() + seconds
        why = (
            "if the other host had no answer, have a firewall here let in the ports of "
            "FABRIC_RAY_PORTS, and name some if it is not set"
        )
        while (received := self._line.receive(end - time.monotonic())) is not None:
            sender, envelope = received
            try:
                if isinstance(envelope, DecodeError):
                    raise envelope
                if isinstance(envelope.message, messages.Hello):
                    address = EngineAddress.from_bytes(envelope.message.address)
                    if address.id == sender:
                        return address, envelope.number
            except DecodeError as error:
                why = str(error)
        raise TransferTimeout(f"no visitor came within {seconds:.0f} s; {why}")

    def _reject(self, envelope: messages.Envelope | DecodeError) -> None:
        if isinstance(envelope, messages.Envelope) and isinstance(envelope.message, messages.Hello):
            busy = messages.Failed("another host is visiting it; wait until that visit has ended")
            # The present visit goes on, even if this answer is lost.
            with contextlib.suppress(FabricError):
                address = EngineAddress.from_bytes(envelope.message.address)
                self._line.send(busy, _REJECT_S, number=envelope.number, to=address)

    def _answer(self, request: messages.Message) -> messages.Message:
        try:
            match request:
                case messages.Open(end):
                    return self._open_target(end)
                case messages.Check():
                    return self._check()
                case messages.Write(end, region, counter):
                    # A target whose write has not come may still hold a port.
                    self._close_target()
                    with self._open(end) as engine:
                        sent = send(engine, region, counter, STEP_S)
                    return messages.Wrote(sent.digest, sent.speed, sent.way)
                case _:
                    raise DecodeError("unknown request; install the same version on both hosts")
        except Exception as error:  # The doctor goes on, whatever the visitor sent.
            return messages.Failed(
                f"on {socket.gethostname()}: {error or type(error).__name__}",
                unreachable=isinstance(error, Unreachable | PeerLost),
            )

    def _open(self, end: End) -> TransferEngine:
        link = Link(end.transport, end.nic, end.provider)
        if end not in self._ends:
            raise FabricError(f"{link.label} is not among the links that this host offered")
        return link.open(f"{socket.gethostname()} {link.label}", self._token, STEP_S)

    def _open_target(self, end: End) -> messages.Opened:
        self._close_target()
        engine = self._open(end)
        region, counter = engine.alloc(NBYTES), engine.counter()
        self._target = engine, region, counter
        return messages.Opened(region.descriptor().to_bytes(), counter.ref.to_bytes())

    def _check(self) -> messages.Checked:
        if self._target is None:
            raise FabricError("check: no target is open; ask for one first")
        _, region, counter = self._target
        counter.wait(1, timeout=STEP_S)
        found = digest(region)
        self._close_target()
        return messages.Checked(found)

    def _close_target(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target[0].close()
