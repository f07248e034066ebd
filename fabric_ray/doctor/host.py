"""The doctor that waits for one of another host, and lends it this host's ends of links."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from typing_extensions import Self

from fabric_ray import __version__
from fabric_ray.doctor import line as said
from fabric_ray.doctor.devices import nowhere, survey
from fabric_ray.doctor.examine import links
from fabric_ray.doctor.findings import Report
from fabric_ray.doctor.line import End, Invitation, Line
from fabric_ray.doctor.speed import NBYTES, digest, send
from fabric_ray.doctor.writes import Link
from fabric_ray.engine import Counter, EngineAddress, EngineConfig, Region, TransferEngine
from fabric_ray.errors import DecodeError, FabricError, InvalidArgument, TransferTimeout

STEP_S = 20.0
"""Seconds for one step of the two, whatever it is."""
_VISIT_S = 600.0
_AWAY_S = 2.0
"""Seconds for the answer to somebody else, for which the visitor waits."""


class Host:
    """Waits, is visited once, and tells what was found.

    Args:
        provider: of libfabric, instead of efa.
        nics: of this host only these, by name or glob.
        token: by default ``FABRIC_RAY_TOKEN``; without one a secret is drawn, and the invitation
            holds it.

    Raises:
        InvalidArgument: no NIC here answers to one of the names.
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
        self._lent: tuple[TransferEngine, Region, Counter] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for nobody any more."""
        self._take_back()
        self.engine.close()

    def wait(self, seconds: float, on_visit: Callable[[str], object] | None = None) -> Report:
        """Serves one visitor.

        Args:
            seconds: until it must have come.
            on_visit: called with the visitor's name when it has.

        Returns:
            What the visitor found.

        Raises:
            TransferTimeout: nobody came.
            FabricError: the visitor was lost.
        """
        address, number = self._door(seconds)
        began = time.monotonic()
        if on_visit is not None:
            on_visit(address.name)
        self._line.dial(address, _VISIT_S)
        self._line.say(said.Welcome(__version__, self._ends), STEP_S, number=number)
        while (came := self._line.hear(_VISIT_S)) is not None:
            sender, letter = came
            if sender != address.id:
                self._send_away(letter)
            elif isinstance(letter, DecodeError):
                raise letter
            elif isinstance(letter.message, said.Bye):
                return Report(tuple(letter.message.findings), time.monotonic() - began)
            else:
                self._line.say(self._answer(letter.message), STEP_S, number=letter.number)
        raise TransferTimeout(f"{address.name} came and asked for nothing any more")

    def _door(self, seconds: float) -> tuple[EngineAddress, int]:
        """Who comes, and the number of its question."""
        end = time.monotonic() + seconds
        why = (
            "if the other host had no answer, have a firewall here let in the ports of "
            "FABRIC_RAY_PORTS, and name some if it is not set"
        )
        while (came := self._line.hear(end - time.monotonic())) is not None:
            sender, letter = came
            try:
                if isinstance(letter, DecodeError):
                    raise letter
                if isinstance(letter.message, said.Hello):
                    address = EngineAddress.from_bytes(letter.message.address)
                    if address.id == sender:
                        return address, letter.number
            except DecodeError as error:
                why = str(error)
        raise TransferTimeout(f"nobody came within {seconds:.0f} s; {why}")

    def _send_away(self, letter: said.Letter | DecodeError) -> None:
        if isinstance(letter, said.Letter) and isinstance(letter.message, said.Hello):
            busy = said.Failed("it is being visited by another host; wait until that is done")
            # Whether it hears that is nothing to the visitor.
            with contextlib.suppress(FabricError):
                address = EngineAddress.from_bytes(letter.message.address)
                self._line.say(busy, _AWAY_S, number=letter.number, to=address)

    def _answer(self, request: said.Message) -> said.Message:
        try:
            match request:
                case said.Open(end):
                    return self._lend(end)
                case said.Check():
                    return self._check()
                case said.Write(end, region, counter):
                    # Whose write hasn't come may hold a port still.
                    self._take_back()
                    with self._open(end) as engine:
                        sent = send(engine, region, counter, STEP_S)
                    return said.Wrote(sent.digest, sent.speed, sent.way)
                case _:
                    raise DecodeError("nothing that this doctor can be asked; upgrade the older")
        except Exception as error:  # whatever the visitor has made of it, the doctor goes on
            return said.Failed(f"on {socket.gethostname()}: {error or type(error).__name__}")

    def _open(self, end: End) -> TransferEngine:
        link = Link(end.transport, end.nic, end.provider)
        if end not in self._ends:
            raise FabricError(f"{link.label} is not among the ends that it has offered")
        return link.open(f"{socket.gethostname()} {link.label}", self._token, STEP_S)

    def _lend(self, end: End) -> said.Opened:
        self._take_back()
        engine = self._open(end)
        region, counter = engine.alloc(NBYTES), engine.counter()
        self._lent = engine, region, counter
        return said.Opened(region.descriptor().to_bytes(), counter.ref.to_bytes())

    def _check(self) -> said.Checked:
        if self._lent is None:
            raise FabricError("nothing was written that could be checked")
        _, region, counter = self._lent
        counter.wait(1, timeout=STEP_S)
        found = digest(region)
        self._take_back()
        return said.Checked(found)

    def _take_back(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            lent[0].close()
