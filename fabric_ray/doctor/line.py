"""What the doctors of two hosts say to each other, and the text by which one finds the other."""

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
from fabric_ray.errors import DecodeError, FabricError, InvalidArgument, TransferTimeout

_MARK = "fabric1-"
_LONGEST_TEXT = 4096


class Invitation(msgspec.Struct, frozen=True):
    """Where a doctor waits, as text that can be pasted."""

    address: bytes
    secret: bytes | None
    """Drawn for this meeting alone; ``None`` where both hosts have a token."""

    def __str__(self) -> str:
        text = base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()
        return _MARK + text.rstrip("=")

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Reads it.

        Raises:
            InvalidArgument: it isn't one, or not all of it.
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
                f"that is no address of a doctor{why}; paste what `fabric-ray doctor --listen` "
                f"printed on the other host, all of it, from {_MARK} on"
            ) from None
        return invitation


class End(msgspec.Struct, frozen=True):
    """One end of a link: a transport, and its NIC if it has some."""

    transport: str
    nic: str
    provider: str | None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Of who comes."""

    address: bytes
    version: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Of who waits: what there is on its host."""

    version: str
    ends: list[End]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Asks for memory behind this end, to be written to."""

    end: End


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    region: bytes
    counter: bytes


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Asks for the digest of what lies there, once the counted write has arrived."""


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
    """What was asked for can't be done; why."""

    cause: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """All that was found."""

    findings: list[Finding]


Message = Hello | Welcome | Open | Opened | Check | Checked | Write | Wrote | Failed | Bye
_Answer = TypeVar("_Answer", Welcome, Opened, Checked, Wrote)


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """A message, and which question it asks or answers: an answer may come when nobody waits."""

    number: int
    message: Message


class Line:
    """What comes to an engine, message by message, and what goes to its peer."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        # Messages wait in it with their places in the pool: what peers can have kept is bounded.
        self._came: queue.SimpleQueue[Received | BaseException] = queue.SimpleQueue()
        self._address: EngineAddress | None = None
        self._asked = 0
        engine.receive(self._came.put)

    def dial(self, address: EngineAddress, seconds: float) -> None:
        """From now on this engine is the other end; its loss is an error of :meth:`hear`."""
        self._address = address
        peer = self.engine.peer(address)
        self._watch = self.engine.counter().expect(1, writers=[peer], timeout=seconds)
        self._watch.add_done_callback(
            lambda transfer: self._came.put(transfer.exception() or TransferTimeout("no answer"))
        )

    def say(
        self,
        message: Message,
        seconds: float,
        *,
        number: int = 0,
        to: EngineAddress | None = None,
    ) -> None:
        """Sends, and waits until it was taken.

        Raises:
            FabricError: it can't be reached.
        """
        address = to or self._address
        assert address is not None, "nobody was dialled"
        packed = msgspec.msgpack.encode(Letter(number, message))
        self.engine.send(self.engine.peer(address), packed, timeout=seconds).wait()

    def hear(self, seconds: float) -> tuple[str, Letter | DecodeError] | None:
        """The next letter, or why it can't be read, and its sender; ``None`` if none comes.

        Anybody who has the token may send: who hears judges by the sender.

        Raises:
            FabricError: the other end was lost.
        """
        try:
            came = self._came.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if isinstance(came, BaseException):
            raise came
        sender = came.sender
        try:
            return sender, from_msgpack(came.data, Letter)
        except msgspec.DecodeError as error:
            return sender, DecodeError(
                f"the doctor of the other host says what this one doesn't understand ({error}); "
                "install the same version on both"
            )

    def ask(self, message: Message, answer: type[_Answer], seconds: float) -> _Answer:
        """Asks the other end.

        Raises:
            FabricError: it is lost, refuses, or doesn't answer in this time.
        """
        end = time.monotonic() + seconds
        self._asked += 1
        self.say(message, seconds, number=self._asked)
        while (came := self.hear(end - time.monotonic())) is not None:
            sender, letter = came
            if self._address is None or sender != self._address.id:
                continue
            if isinstance(letter, DecodeError):
                raise letter
            if letter.number != self._asked:
                continue
            said = letter.message
            if isinstance(said, answer):
                return said
            if isinstance(said, Failed):
                raise FabricError(said.cause)
        raise TransferTimeout(f"no answer within {seconds:.0f} s")
