"""Messages between the doctors of two hosts, and the invitation text that names one of them."""

from __future__ import annotations

import base64
import binascii
import queue
import time
from typing import TypeVar

import msgspec

from fabric_ray._native import Message as Received
from fabric_ray.decoding import from_msgpack
from fabric_ray.doctor.findings import Finding, Speed
from fabric_ray.engine import EngineAddress, TransferEngine
from fabric_ray.errors import (
    DecodeError,
    FabricError,
    InvalidArgument,
    TransferTimeout,
    Unreachable,
)

_MARK = "fabric1-"
_LONGEST_TEXT = 4096


class Invitation(msgspec.Struct, frozen=True):
    """The address of a waiting doctor, as text to paste."""

    address: bytes
    secret: bytes | None
    """A random token for this visit; ``None`` where both hosts have a token."""

    def __str__(self) -> str:
        text = base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()
        return _MARK + text.rstrip("=")

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Parses an invitation.

        Raises:
            InvalidArgument: the text is not a complete invitation.
        """
        text = "".join(text.split())
        try:
            if not text.startswith(_MARK) or len(text) > _LONGEST_TEXT:
                raise ValueError
            body = text.removeprefix(_MARK)
            packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            invitation = from_msgpack(packed, cls)
            EngineAddress.from_bytes(invitation.address)
        except (ValueError, binascii.Error, msgspec.DecodeError, DecodeError) as error:
            why = f": {error}" if isinstance(error, DecodeError) else ""
            raise InvalidArgument(
                f"cannot read the address of the other doctor{why}; paste all that `fabric-ray "
                f"doctor --listen` printed on the other host, from {_MARK} on"
            ) from None
        return invitation


class End(msgspec.Struct, frozen=True):
    """One end of a link: a transport, and its NIC if it has some."""

    transport: str
    nic: str
    provider: str | None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The visitor's first message."""

    address: bytes
    version: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The waiting doctor's answer: the links of its host."""

    version: str
    ends: list[End]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Asks for memory behind this end to write to."""

    end: End


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    region: bytes
    counter: bytes


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Asks for the digest of that memory once the counted write has arrived."""


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    digest: bytes


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Asks for a write from this end."""

    end: End
    region: bytes
    counter: bytes


class Wrote(msgspec.Struct, frozen=True, tag="wrote"):
    digest: bytes
    speed: Speed
    way: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request failed."""

    cause: str
    unreachable: bool = False
    """Whether no transport reached the visitor."""


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """All findings; ends the visit."""

    findings: list[Finding]


Message = Hello | Welcome | Open | Opened | Check | Checked | Write | Wrote | Failed | Bye
_Answer = TypeVar("_Answer", Welcome, Opened, Checked, Wrote)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with the number of its request, which tells late answers apart."""

    number: int
    message: Message


class Line:
    """Sends messages to one peer, and receives messages of any peer."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        # Queued messages hold slots of the receive pool, which bounds what peers can queue.
        self._received: queue.SimpleQueue[Received | BaseException] = queue.SimpleQueue()
        self._address: EngineAddress | None = None
        self._requests = 0
        engine.receive(self._received.put)

    def connect(self, address: EngineAddress, seconds: float) -> None:
        """Sets the peer; its loss is an error of :meth:`receive`."""
        self._address = address
        peer = self.engine.peer(address)
        self._watch = self.engine.counter().expect(1, writers=[peer], timeout=seconds)
        self._watch.add_done_callback(
            lambda transfer: self._received.put(
                transfer.exception() or TransferTimeout("no answer")
            )
        )

    def send(
        self,
        message: Message,
        seconds: float,
        *,
        number: int = 0,
        to: EngineAddress | None = None,
    ) -> None:
        """Sends a message, and waits until the peer has received it.

        Raises:
            FabricError: the peer can't be reached.
        """
        address = to or self._address
        assert address is not None, "connect() comes first"
        packed = msgspec.msgpack.encode(Envelope(number, message))
        self.engine.send(self.engine.peer(address), packed, timeout=seconds).wait()

    def receive(self, seconds: float) -> tuple[str, Envelope | DecodeError] | None:
        """The next message, or why it can't be read, with its sender's id; ``None`` after so many
        seconds.

        Any peer with the token may send: the caller must check the sender.

        Raises:
            FabricError: the peer of :meth:`connect` was lost.
        """
        try:
            received = self._received.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if isinstance(received, BaseException):
            raise received
        sender = received.sender
        try:
            return sender, from_msgpack(received.data, Envelope)
        except msgspec.DecodeError as error:
            return sender, DecodeError(
                f"cannot decode a message of the other doctor ({error}); install the same version "
                "on both hosts"
            )

    def ask(self, message: Message, answer: type[_Answer], seconds: float) -> _Answer:
        """Sends a request to the peer, and returns its answer.

        Raises:
            Unreachable: no transport of the peer reached this host.
            FabricError: the peer is lost, refuses, or doesn't answer in time.
        """
        end = time.monotonic() + seconds
        self._requests += 1
        self.send(message, seconds, number=self._requests)
        while (received := self.receive(end - time.monotonic())) is not None:
            sender, envelope = received
            if self._address is None or sender != self._address.id:
                continue
            if isinstance(envelope, DecodeError):
                raise envelope
            if envelope.number != self._requests:
                continue
            reply = envelope.message
            if isinstance(reply, answer):
                return reply
            if isinstance(reply, Failed):
                raise Unreachable(reply.cause) if reply.unreachable else FabricError(reply.cause)
        raise TransferTimeout(f"no answer within {seconds:.0f} s")
