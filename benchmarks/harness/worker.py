"""The program that one end of a pair runs in: `python -m benchmarks.harness.worker`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import cast

import msgspec

from benchmarks.harness.cases import Case
from benchmarks.harness.processes import die_with_parent
from benchmarks.harness.roles import Role, Stamps, Sync


class Open(msgspec.Struct, frozen=True, tag=True):
    """Answered with an address."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: bytes


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Answered with a description; the memory is filled (sender) or zeroed (target)."""

    case: Case
    sender: bool


class Bind(msgspec.Struct, frozen=True, tag=True):
    case: Case
    description: bytes


class Run(msgspec.Struct, frozen=True, tag=True):
    """Answered with stamps."""

    case: Case
    operations: int
    samples: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare the target's memory with what `operations` operations must have left there."""

    case: Case
    operations: int


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Open | Connect | Prepare | Bind | Run | Check | Close


class Reply(msgspec.Struct, frozen=True):
    blob: bytes = b""
    stamps: Stamps | None = None
    error: str | None = None


def _obey(role: Role, command: Command) -> Reply:
    match command:
        case Open():
            return Reply(blob=role.open())
        case Connect(peer):
            role.connect(peer)
        case Prepare(case, sender):
            description = role.prepare(case)
            role.moved = 0
            role.lay_out(sender=sender)
            return Reply(blob=description)
        case Bind(case, description):
            role.bind(case, description)
        case Run(case, operations, samples):
            return Reply(stamps=role.run(case, operations, samples))
        case Check(case, operations):
            return Reply(error=role.check(case, operations))
        case Close():
            role.close()
    return Reply()


def main() -> None:
    die_with_parent()
    target, control_fd, sync_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    module, _, name = target.partition(":")
    role = cast(Role, getattr(importlib.import_module(module), name)(Sync(sync_fd)))
    control: Connection[bytes, bytes] = Connection(control_fd)
    decoder = msgspec.msgpack.Decoder(Command)
    while True:
        try:
            command = decoder.decode(control.recv_bytes())
        except EOFError:
            break
        try:
            reply = _obey(role, command)
        except Exception as error:
            traceback.print_exc()
            reply = Reply(error=f"{type(error).__name__}: {error}")
        control.send_bytes(msgspec.msgpack.encode(reply))
        if isinstance(command, Close):
            break
    sys.stdout.flush()
    sys.stderr.flush()
    # Some libraries crash in their exit handlers; what matters was said already.
    os._exit(0)


if __name__ == "__main__":
    main()
