"""A trainer's half of a delta push: compares its share with the version sent before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import numpy as np

from fabric_ray._native import (
    Batch,
    DeltaEncoder,
    Digest,
    Region,
    RegionDescriptor,
    RemoteRegion,
    bind_copies,
)
from fabric_ray.engine import TransferEngine
from fabric_ray.plan import Copy, LocalContainer, Plan
from fabric_ray.weights.delta.pieces import SHARE, inbox_shares, itemsizes, pieces, threads
from fabric_ray.weights.report import Changes, PushTarget, Sent
from fabric_ray.weights.step_sender import Route, StepSender
from fabric_ray.weights.steps import Step

# Bytes that are compared before they are sent, while what was compared before is under way.
_PART = 32 << 20
_TOO_MUCH = "changes would take more than 1/4 of the bytes of some tensors"

Sources = Callable[[Step, Iterable[Copy]], dict[int, tuple[Region, int]]]
"""Region and offset of the containers that copies of a step read."""


class _Member(NamedTuple):
    """A piece of one rollout."""

    number: int
    """Of the trainer's distinct pieces."""
    place: int
    """Among the rollout's pieces of this trainer."""
    copy: Copy


class _Part(NamedTuple):
    """Consecutive pieces of one step, which are compared together."""

    first: int
    last: int
    members: Mapping[int, list[_Member]]
    """By plan rank."""


class _Encoded(NamedTuple):
    """A piece in the outbox; no bytes if it is sent whole."""

    at: int
    nbytes: int
    digest: int


class _Stream:
    """What one rollout is sent in one push."""

    def __init__(self, target: PushTarget, inbox: RemoteRegion, begin: int) -> None:
        self.target = target
        self.inbox = inbox
        self.region: RemoteRegion | None = None
        self.count = 0
        self.sends_whole = False
        self._begin = begin
        self._nbytes = 0
        self._pieces: list[int] = []
        self._digest = 0

    def add(self, batch: Batch, outbox: Region, members: list[tuple[_Member, _Encoded]]) -> int:
        """Adds the writes of encoded pieces to a batch; returns their bytes."""
        ranges: list[list[int]] = []
        for member, encoded in members:
            if ranges and sum(ranges[-1]) == encoded.at:
                ranges[-1][1] += encoded.nbytes
            else:
                ranges.append([encoded.at, encoded.nbytes])
            self._pieces.append(member.place)
            self._digest = (self._digest + encoded.digest) & ((1 << 64) - 1)
        for at, nbytes in ranges:
            to = self._begin + self._nbytes
            batch.write(outbox, self.inbox, nbytes, src_offset=at, dst_offset=to)
            self._nbytes += nbytes
        self.count += len(ranges)
        return sum(nbytes for _, nbytes in ranges)

    def changes(self) -> Changes | None:
        """What the rollout has to know; ``None`` if all was sent whole."""
        if not self._pieces:
            return None
        return Changes(np.array(self._pieces, dtype="<u4").tobytes(), self._nbytes, self._digest)


class DeltaSender:
    """Compares one trainer's share with the version that it sent before, and sends what changed.

    It keeps a copy of the bytes of its share, and memory for their changes: 1/4 more.

    Args:
        plan: from trainers to rollouts.
        rank: of the trainer.
        steps: its copies, in the order of sending.
        containers: of this rank, by the plan.
    """

    def __init__(
        self,
        engine: TransferEngine,
        plan: Plan,
        rank: int,
        steps: Sequence[Step],
        containers: Iterable[LocalContainer],
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._begins: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        copies: dict[int, list[Copy]] = {}
        for step in steps:
            for plan_rank, these in step.copies.items():
                copies.setdefault(plan_rank, []).extend(these)
        indices: dict[int, dict[tuple[int, int], int]] = {}
        shares = inbox_shares(plan)
        for plan_rank, these in copies.items():
            self._begins[plan_rank] = shares[plan_rank][rank].offset
            self._pages[plan_rank] = sum(copy.pages for copy in these)
            known = pieces(these)
            indices[plan_rank] = {(p.dst_container, p.dst_offset): i for i, p in enumerate(known)}
        self._numbers: dict[object, int] = {}
        self._pieces: list[Copy] = []
        self._parts = [self._divided(step, indices) for step in steps]
        sizes = itemsizes(containers)
        each = [sizes[piece.src_container] for piece in self._pieces]
        self._encoder = DeltaEncoder(self._pieces, each)
        self._outbox = engine.alloc(max(1, self._encoder.nbytes // SHARE))
        self._used = 0
        self._sent: int | None = None
        self._streams: dict[int, _Stream] = {}
        self._whole: dict[int, str] = {}
        self._keeps = True
        self._seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the kept copy and of the memory for changes."""
        return self._encoder.nbytes + self._outbox.nbytes

    def begin(self, push_targets: Iterable[PushTarget]) -> None:
        """Begins a push: decides which rollouts get changes. Where none takes any, no copy is
        kept."""
        self._used, self._streams, self._whole, self._seconds = 0, {}, {}, 0.0
        here = [target for target in push_targets if target.rank in self._pages]
        self._keeps = any(target.inbox is not None for target in here)
        for target in here:
            if target.inbox is None:
                self._whole[target.rank] = "the rollout passes the version on to replicas"
            elif not target.usable or target.version is None:
                self._whole[target.rank] = "the rollout holds no whole version"
            elif target.version != self._sent:
                sent = "none since connect" if self._sent is None else f"{self._sent}"
                self._whole[target.rank] = (
                    f"the rollout runs version {target.version}; the version sent before: {sent}"
                )
            else:
                inbox = self._engine.import_region(RegionDescriptor.from_bytes(target.inbox))
                self._streams[target.rank] = _Stream(target, inbox, self._begins[target.rank])
        # Until :meth:`end`, the kept copy is of two versions.
        self._sent = None

    def sends(self, target: PushTarget) -> bool:
        """Whether a rollout gets changes in this push."""
        return target.rank in self._streams

    def send(self, number: int, sources: Sources, sending: StepSender) -> None:
        """Compares a step with the version before, keeps its bytes, and sends the changes."""
        if not self._keeps:
            return
        for part in self._parts[number]:
            step = self._steps[number]
            copies = self._pieces[part.first : part.last]
            memory = sources(step, copies)
            begin = time.perf_counter()
            found = self._encoder.encode(
                part.first,
                part.last,
                memory,
                self._outbox,
                self._used,
                bool(self._streams),
                SHARE,
                threads(),
            )
            self._seconds += time.perf_counter() - begin
            encoded = [_Encoded(*one) for one in found]
            self._used = max([self._used, *(one.at + one.nbytes for one in encoded)])
            for plan_rank, members in part.members.items():
                if stream := self._streams.get(plan_rank):
                    pairs = [(member, encoded[member.number - part.first]) for member in members]
                    route = self._route(stream, pairs, memory)
                    sending.send(number, stream.target, route)

    def end(self, version: int, sent: Sent) -> Sent:
        """Ends a push: the kept copy is of this version from now on. Completes its result."""
        self._sent, replace = version if self._keeps else None, msgspec.structs.replace
        found = {plan_rank: stream.changes() for plan_rank, stream in self._streams.items()}
        counts = {plan_rank: stream.count for plan_rank, stream in self._streams.items()}
        why = self._whole | {
            plan_rank: _TOO_MUCH
            for plan_rank, stream in self._streams.items()
            if stream.sends_whole
        }
        return replace(
            sent,
            links=tuple(replace(link, whole=why.get(link.rollout)) for link in sent.links),
            counts=self._pages | counts,
            changes={plan_rank: changes for plan_rank, changes in found.items() if changes},
            compared=not self._whole,
            comparing=self._seconds,
        )

    def _route(
        self,
        stream: _Stream,
        members: list[tuple[_Member, _Encoded]],
        memory: dict[int, tuple[Region, int]],
    ) -> Route:
        """One batch of changes and of whole pieces."""
        whole = [member.copy for member, encoded in members if not encoded.nbytes]
        batch, digest = Batch(), Digest()
        if whole:
            target = stream.target
            if stream.region is None:
                region = RegionDescriptor.from_bytes(target.region)
                stream.region = self._engine.import_region(region)
            batch, digest = bind_copies(whole, memory, stream.region, target.offsets)
        nbytes = sum(copy.nbytes for copy in whole)
        stream.sends_whole |= bool(whole)
        stream.count += sum(copy.pages for copy in whole)
        changed = [(member, encoded) for member, encoded in members if encoded.nbytes]
        nbytes += stream.add(batch, self._outbox, changed)
        return Route(0, batch, digest, nbytes)

    def _divided(
        self, step: Step, indices: Mapping[int, Mapping[tuple[int, int], int]]
    ) -> list[_Part]:
        """The parts of a step. Rollouts that take the same bytes share a piece."""
        parts: list[_Part] = []
        first, members, nbytes = len(self._pieces), dict[int, list[_Member]](), 0
        # Rollouts in turn, so that none waits for another's share.
        lists = [pieces(copies) for copies in step.copies.values()]
        for piece in (piece for turn in zip_longest(*lists) for piece in turn if piece):
            known = len(self._pieces)
            loops = tuple((loop.count, loop.src_stride) for loop in piece.loops)
            key = (piece.src_container, piece.src_offset, piece.run, loops)
            number = self._numbers.get(key, -1)
            if number < first:  # a part that is over isn't looked at again
                self._numbers[key] = number = known
                if nbytes >= _PART:
                    parts.append(_Part(first, known, members))
                    first, members, nbytes = known, {}, 0
                self._pieces.append(piece)
                nbytes += piece.nbytes
            place = indices[piece.peer][piece.dst_container, piece.dst_offset]
            members.setdefault(piece.peer, []).append(_Member(number, place, piece))
        parts.append(_Part(first, len(self._pieces), members))
        return parts
